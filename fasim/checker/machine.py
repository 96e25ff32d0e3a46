"""The observer of the reference engine that executes operations' effects and checks the order of their accesses.

An operation of a role takes effect when the role goes on, an asynchronous one (MMA group, bulk copy) when it
completes; it reads its operands then. Its accesses are ordered by what the role knew when it issued it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Literal

from fasim.checker.arithmetic import execute
from fasim.checker.arrays import Arrays
from fasim.checker.operands import UNCHANGED, Nothing, Numerics, Operands
from fasim.checker.state import Actor, Cta, Execution, Located
from fasim.checker.storage import Access, Clock, Share, Storage, join
from fasim.engine import image as im
from fasim.engine.image import Image
from fasim.engine.reference_state import Agent
from fasim.errors import ModelError
from fasim.program.effects import Effect, Load, Matmul, Syncthreads
from fasim.program.language import Kernel, walk
from fasim.program.ops import Arrive, Copy, Mma, Op, TileLoop, Wait, WaitCopies, WaitMma
from fasim.program.tiles import Place, Register, Smem, Tmem
from fasim.results.findings import Finding, Kind, Log

_WHOLE: Share = (0.0, 1.0)


class ValueMachine:
    """Observes one run of ``kernel`` lowered to ``image``; ``ops[pc]`` is the operation of each instruction.

    Reads and writes ``arrays``; what is wrong goes to ``log``. Values stop (``broken``) where a place is read that
    holds nothing; races are looked for all the same. ``numerics`` replaces choices of the schedule.
    """

    def __init__(
        self,
        kernel: Kernel,
        image: Image,
        ops: tuple[Op | None, ...],
        arrays: Arrays,
        log: Log,
        numerics: Numerics = UNCHANGED,
    ) -> None:
        self.numerics = numerics
        self.kernel, self.ops, self.arrays, self.log = kernel, ops, arrays, log
        self.cluster = image.machine.cluster
        self.kinds = image.code[:, im.K_KIND].tolist()
        self.bases = dict(zip((t.name for t in kernel.tensors), image.line_base.tolist(), strict=True))
        self.roles = [(role, instance) for role in kernel.roles for instance in range(role.count)]
        self.broken = False
        self._by_warp = {
            role.name
            for role in kernel.roles
            if any(isinstance(effect, Syncthreads) for op in walk(role.body) for effect in op.effects)
        }
        self._actors: dict[tuple[int, int, int, int], Actor] = {}
        self._ctas: dict[tuple[int, int], list[Cta]] = {}
        self._pending: list[tuple[int, int, Execution]] = []
        self._serial = itertools.count()
        self._addresses = _addresses(kernel)

    # --- callbacks of the engine --------------------------------------------------------------------------------------
    def start(self, group: int, slot: int, tick: int) -> None:
        """A new cluster: fresh storage."""
        self._drain(tick)
        self._ctas[group, slot] = [Cta(Storage(0), Storage(1)) for _ in range(self.cluster)]
        for key in [key for key in self._actors if key[:2] == (group, slot)]:
            del self._actors[key]

    def begin(self, agent: Agent, pc: int, tick: int) -> Execution:
        """Record the accesses of the instruction, in the order that its role knows of."""
        self._drain(tick)
        actor, op = self._actor(agent), self.ops[pc]
        assert op is not None
        step = Execution(actor, op, pc, agent.row, tick)
        if isinstance(op, Copy):  # its line is not known yet
            return step
        if isinstance(op, Mma):  # the queue's order is the order of its MMAs
            join(actor.mma, actor.common)
            self._act(step, ("mma", actor.key), actor.mma)
            join(actor.mma, step.clock)
            actor.groups.append(step)
        elif not isinstance(op, Wait | WaitMma | WaitCopies):
            self._own(step)
        if isinstance(op, Arrive):
            step.clock = actor.known({})
        actor.count(op.cursor)
        return step

    def copying(self, step: object, line: int, until: int) -> None:
        """A copy by threads is done by the role itself when it stores; all others are asynchronous."""
        assert isinstance(step, Execution) and isinstance(step.op, Copy)
        actor, op = step.actor, step.op
        step.line = line - self.bases[op.tensor]
        layout = self.kernel.find_tensor(op.tensor).layout
        number = actor.copied[op.tensor, op.kind] = actor.copied.get((op.tensor, op.kind), -1) + 1
        if layout and layout.order:
            step.line = layout.order(step.tile, op.kind, number)
        if op.kind == "store" and op.engine == "threads":
            self._own(step)
            return
        kind = "load" if op.kind == "load" else "store"
        cursor = op.cursor
        stage = actor.counts.get(cursor, 0) % op.bar.stages if op.bar else 0
        self._act(step, (op.engine, actor.key, kind, op.tensor if op.bar else "", stage), actor.common)
        if op.bar is None:
            actor.copies[kind].append(step)
        actor.count(cursor)
        self._later(step, until)

    def issued(self, step: object, until: int) -> None:
        """An MMA group takes effect when it completes."""
        assert isinstance(step, Execution)
        self._later(step, until)

    def arrived(self, step: object, rank: int, barrier: int, phases: int, tick: int) -> None:
        """Who finds the phase complete knows all that arrived for it."""
        assert isinstance(step, Execution)
        self._drain(tick)
        cta = step.actor.ctas[rank]
        clock = cta.pending.setdefault(barrier, {})
        join(clock, step.clock)
        known = cta.phases.setdefault(barrier, [])
        if len(known) < phases:
            known.append(dict(clock))

    def passed(self, step: object, barrier: int, phase: int) -> None:
        """The role learns what the arrivals knew; not by a wait that is left to another barrier."""
        assert isinstance(step, Execution) and isinstance(step.op, Wait)
        if phase > 0 and step.op.polled:
            actor = step.actor
            actor.learn(actor.ctas[actor.agent.sm].phases[barrier][phase - 1])

    def end(self, step: object, tick: int) -> None:
        """The role goes on: its own work takes effect, and it knows what it waited for."""
        assert isinstance(step, Execution)
        self._drain(tick)
        actor, op = step.actor, step.op
        if isinstance(op, WaitMma):
            index = len(actor.groups) - 1 - op.pending
            if index >= 0:
                actor.learn(actor.groups[index].clock, own=True)
        elif isinstance(op, WaitCopies):
            for other in actor.copies[op.kind]:
                actor.learn(other.clock)
            actor.copies[op.kind].clear()
        if isinstance(op, Wait | WaitMma | WaitCopies):  # what a wait does, it does with what it has learned
            self._own(step)
        elif isinstance(op, TileLoop) and self.kinds[step.pc] == im.TILE:
            actor.registers.clear()
            actor.turns.clear()
            actor.copied.clear()
        if step.until is None:
            step.until = tick
            self._execute(step)

    def finished(self, agent: Agent, tick: int) -> None:
        """A store that still reads shared memory must not outlive its CTA."""
        self._drain(tick)
        actor = self._actor(agent)
        for step in actor.copies["store"]:
            for _, ranks in step.found:
                place = next(iter(ranks[0].values())).text
                self._report("race", step, place, "still reads when its role ends: a wait for the store is missing")

    def finish(self) -> None:
        """After the run: what is still in flight completes."""
        self._drain(None)

    # --- inside -------------------------------------------------------------------------------------------------------
    def _actor(self, agent: Agent) -> Actor:
        key = (agent.group, agent.slot, agent.sm, agent.kind)
        if key not in self._actors:
            role, instance = self.roles[agent.kind]
            self._actors[key] = Actor(agent, role, instance, self._ctas[key[:2]], key)
            if role.name in self._by_warp:
                self._actors[key].meet()
        return self._actors[key]

    def _later(self, step: Execution, until: int) -> None:
        step.until = until
        heapq.heappush(self._pending, (until, next(self._serial), step))

    def _drain(self, tick: int | None) -> None:
        """Complete what is due."""
        while self._pending and (tick is None or self._pending[0][0] <= tick):
            self._execute(heapq.heappop(self._pending)[2])

    def _execute(self, step: Execution) -> None:
        if step.done or not step.found:
            return
        step.done = True
        for effect, ranks in step.found:
            if self.broken:
                return
            operands = [
                Operands(self.kernel, self.arrays, step, places, self._report, self.numerics) for places in ranks
            ]
            for operand in operands:
                operand.pair = operands
            try:  # an MMA of a pair is one product; what else spreads over a cluster happens in each CTA
                for operand in operands[:1] if isinstance(effect, Matmul) else operands:
                    execute(effect, operand)
            except Nothing as nothing:
                self.broken = True
                self._report("data", step, nothing.place, f"reads {nothing}")
            except ValueError as error:  # NumPy's
                self.broken = True
                self._report("data", step, type(effect).__name__, f"shapes do not fit: {error}")
            step.actor.turns[type(effect)] = step.actor.turns.get(type(effect), 0) + 1

    def _own(self, step: Execution) -> None:
        """Accesses of the role itself."""
        actor = step.actor
        if step.op.effects:
            self._act(step, actor.key, actor.common)
            actor.clock[actor.key] = actor.own["warps", actor.key] = actor.accesses[actor.key]

    def _act(self, step: Execution, component: Hashable, known: Clock) -> None:
        """Find the operands of a step and check their accesses against all earlier ones, of which ``known`` knows.

        The step's clock is ``known`` and, in ``component``, the step itself.
        """
        actor, op = step.actor, step.op
        count = actor.accesses[component] = actor.accesses.get(component, 0) + 1
        step.clock = {**known, component: count}
        spread = (isinstance(op, Copy) and op.multicast) or (isinstance(op, Mma) and op.two_cta)
        ranks = range(self.cluster) if spread else (actor.agent.sm,)
        for effect in op.effects:
            if isinstance(effect, Syncthreads):
                actor.meet()
                continue
            by_rank = []
            for rank in ranks:
                places = {}
                for writes, names in ((False, effect.reads), (True, effect.writes)):
                    for name in names:
                        where = places[name] = self._locate(step, effect, name, rank)
                        of, knows = _order(actor, component, known, where)
                        access = Access(where.lo, where.hi, of, count, writes, step, where.text)
                        for old in where.storage.access(access, knows):
                            if old.step is not step:
                                self._race(old, access, actor.known(known).get(old.component, 0) >= old.count)
                by_rank.append(places)
            step.found.append((effect, by_rank))

    def _locate(self, step: Execution, effect: Effect, name: str, rank: int) -> Located:
        actor, op = step.actor, step.op
        operand = getattr(effect, name)
        place = operand if isinstance(operand, Place) else Register(operand)
        share = place.share or _WHOLE
        if not isinstance(place, Smem | Tmem):
            storage = actor.registers.setdefault(place.name, Storage(1))
            return Located(storage, place.name, 0, share, *share, f"register {place.name}")
        space = "smem" if isinstance(place, Smem) else "tmem"
        if (space, place.name) not in self._addresses:
            raise ModelError(
                f"{self.kernel.name}: role '{actor.role.name}', operation '{op.label}': "
                f"no {'buffer' if space == 'smem' else 'region of tensor memory'} '{place.name}'"
            )
        base, size, stages = self._addresses[space, place.name]
        stage = self._stage(step, place, stages)
        rows = place.share is None and name not in effect.whole and not isinstance(op, Copy)
        if place.share is None and space == "smem":
            if isinstance(effect, Load):
                layout = self.kernel.find_tensor(op.tensor).layout if isinstance(op, Copy) else None
                share = layout.share(step.line) if layout and layout.share else _WHOLE
            elif rows:
                share = actor.instance / actor.role.count, (actor.instance + 1) / actor.role.count
        cta = actor.ctas[rank]
        storage = cta.smem if space == "smem" else cta.tmem
        lo, hi = (base + (stage + part) * size for part in share)
        text = f"{place.name}[{stage}]" if stages > 1 else place.name
        of: Literal["rows", "all"] = "rows" if rows or space == "tmem" else "all"
        return Located(storage, place.name, stage, share, lo, hi, text, place.columns or _WHOLE, of)

    def _stage(self, step: Execution, place: Place, stages: int) -> int:
        if place.stage is not None:
            return place.stage % stages
        if stages == 1:
            return 0
        actor, op = step.actor, step.op
        if isinstance(op, Copy) and op.kind == "load" and op.bar and place.after is None:
            return actor.counts.get(op.cursor, 0) % stages
        cursor = place.cursor
        selected = actor.counts.get(cursor, 0) - 1 - place.back
        if selected < 0:
            raise ModelError(
                f"{self.kernel.name}: role '{actor.role.name}', operation '{op.label}': which stage of "
                f"'{place.name}'? The role has not come to a {cursor.action} of '{cursor.of}' that selects one"
            )
        return selected % stages

    # --- messages -----------------------------------------------------------------------------------------------------
    def _report(self, kind: Kind, step: Execution, place: str, what: str) -> None:
        actor, op = step.actor, step.op

        def describe() -> Finding:
            message = f"{step.name} ({step.cycles()}), {place}: {what}"
            return Finding(kind, self.kernel.name, actor.name, op.label, place, message)

        self.log.add((kind, actor.role.name, op.label, place.partition("[")[0], what), describe)

    def _race(self, old: Access, new: Access, warps: bool) -> None:
        """``warps``: each warp of the role knows its part of ``old``, but not that the others have come as far."""
        first, second = old.step, new.step
        name = new.place.partition("[")[0]

        def describe() -> Finding:
            verb, what = ("overwrites" if new.writes else "reads"), ("writes" if old.writes else "reads")
            alias = f" as {old.place}, which shares its space" if old.place.partition("[")[0] != name else ""
            other = " of another CTA" if first.actor.agent.sm != second.actor.agent.sm else ""
            luck = "" if first.until is None or first.until > second.begin else "; in this run they are apart by luck"
            message = (
                f"{second.name} ({second.cycles()}) {verb} {new.place} that {first.name}{other} ({first.cycles()}) "
                f"{what}{alias}: {'no barrier of the warps between' if warps else _cause(first, second)}{luck}"
            )
            return Finding("race", self.kernel.name, second.actor.name, second.op.label, new.place, message)

        roles = (first.actor.role.name, first.op.label, second.actor.role.name, second.op.label)
        self.log.add(("race", *roles, name), describe)


def _order(actor: Actor, component: Hashable, known: Clock, where: Located) -> tuple[Hashable, Clock]:
    """The component that an access belongs to, and what is ordered before it; see ``effects.Syncthreads``."""
    if actor.met is None:
        return component, known
    if where.of == "register":
        return component, actor.known(known)
    if component != actor.key:
        return component, known
    return (component, actor.clock) if where.of == "rows" else (("warps", actor.key), actor.met)


def _addresses(kernel: Kernel) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Address, size of a stage, and stages of every buffer and region; an alias begins where its buffer does."""
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    end = 0
    for buffer in kernel.buffers:
        base = end if buffer.aliases is None else found["smem", buffer.aliases][0]
        found["smem", buffer.name] = base, buffer.bytes, buffer.stages
        end = max(end, base + buffer.bytes * buffer.stages)
    for region in kernel.regions:
        found["tmem", region.name] = region.first, region.columns, region.stages
    return found


def _cause(first: Execution, second: Execution) -> str:
    """What is missing between two steps."""
    same = first.actor is second.actor
    if isinstance(first.op, Mma):
        return "an MMA in flight, no wait for it" if same else "the completion of the MMA was not waited for"
    if isinstance(first.op, Copy):
        return "no wait for the copy to land" if first.op.kind == "load" else "no wait until the store has read it"
    if isinstance(second.op, Copy | Mma):
        return "not released, or not waited for, before"
    return "no barrier orders them"
