"""The observer of the reference engine that executes operations' effects and checks the order of their accesses.

An operation of a role takes effect when the role goes on, an asynchronous one (MMA group, bulk copy) when it
completes; it reads its operands then. Its accesses are ordered by what the role knew when it issued it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from fasim import image as im
from fasim.effects import Effect, Load, Matmul, Place, Register, Smem, Tmem
from fasim.engine.reference_state import Agent
from fasim.errors import ModelError
from fasim.image import Image
from fasim.ops import Arrive, Copy, Mma, Op, TileLoop, Wait, WaitCopies, WaitMma
from fasim.problem import Problem
from fasim.schedule import Kernel, Role
from fasim.values.arithmetic import execute
from fasim.values.arrays import Arrays
from fasim.values.findings import Finding, Kind, Log
from fasim.values.storage import Access, Clock, Piece, PieceKey, Share, Storage, Value, concatenate, join

_WHOLE: Share = (0.0, 1.0)


@dataclass
class Cta:
    """Storage of one CTA and what an observer of its barriers knows."""

    smem: Storage
    tmem: Storage
    pending: dict[int, Clock] = field(default_factory=dict)  # barrier -> clocks of all arrivals so far
    phases: dict[int, list[Clock]] = field(default_factory=dict)


@dataclass
class Actor:
    """A role instance in a CTA of a cluster."""

    agent: Agent
    role: Role
    instance: int
    ctas: list[Cta]  # of the cluster, by rank
    key: tuple[int, int, int, int]
    clock: Clock = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    mma: Clock = field(default_factory=dict)  # the queue of its MMAs
    groups: list[Step] = field(default_factory=list)
    copies: dict[str, list[Step]] = field(default_factory=lambda: {"load": [], "store": []})
    registers: dict[str, Storage] = field(default_factory=dict)
    accesses: dict[Hashable, int] = field(default_factory=dict)  # by component
    turns: dict[type[Effect], int] = field(default_factory=dict)  # executions in this work tile

    @property
    def name(self) -> str:
        """Role and instance, as in traces."""
        return self.role.name if self.role.count == 1 else f"{self.role.name}{self.instance}"


@dataclass(frozen=True)
class Located:
    """An operand found: an interval of addresses of a storage."""

    storage: Storage
    name: str
    stage: int
    share: Share
    lo: float
    hi: float
    text: str

    @property
    def key(self) -> PieceKey:
        """What it is called in its storage."""
        return self.name, self.stage, self.share


@dataclass(eq=False)
class Step:
    """One execution of an instruction."""

    actor: Actor
    op: Op
    pc: int
    tile: int
    begin: int
    until: int | None = None
    line: int = -1
    clock: Clock = field(default_factory=dict)
    found: list[tuple[Effect, list[dict[str, Located]]]] = field(default_factory=list)  # operands by rank
    done: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.actor.name} '{self.op.label}'"

    def cycles(self) -> str:
        """When it ran."""
        until = "" if self.until is None else f" to {self.until / im.TICKS:.0f}"
        return f"cycle {self.begin / im.TICKS:.0f}{until}"


class Machine:
    """Observes one run of ``kernel`` lowered to ``image``; ``ops[pc]`` is the operation of each instruction.

    Reads and writes ``arrays``; what is wrong goes to ``log``. Values stop (``broken``) where a place is read that
    holds nothing; races are looked for all the same.
    """

    def __init__(self, kernel: Kernel, image: Image, ops: tuple[Op | None, ...], arrays: Arrays, log: Log) -> None:
        self.kernel, self.ops, self.arrays, self.log = kernel, ops, arrays, log
        self.cluster = image.machine.cluster
        self.kinds = image.code[:, im.K_KIND].tolist()
        self.bases = dict(zip((t.name for t in kernel.tensors), image.line_base.tolist(), strict=True))
        self.roles = [(role, instance) for role in kernel.roles for instance in range(role.count)]
        self.broken = False
        self._actors: dict[tuple[int, int, int, int], Actor] = {}
        self._ctas: dict[tuple[int, int], list[Cta]] = {}
        self._pending: list[tuple[int, int, Step]] = []
        self._serial = itertools.count()
        self._addresses = _addresses(kernel)

    # --- callbacks of the engine --------------------------------------------------------------------------------------
    def start(self, group: int, slot: int, tick: int) -> None:
        """A new cluster: fresh storage."""
        self._drain(tick)
        self._ctas[group, slot] = [Cta(Storage(0), Storage(1)) for _ in range(self.cluster)]
        for key in [key for key in self._actors if key[:2] == (group, slot)]:
            del self._actors[key]

    def begin(self, agent: Agent, pc: int, tick: int) -> Step:
        """Record the accesses of the instruction, in the order that its role knows of."""
        self._drain(tick)
        actor, op = self._actor(agent), self.ops[pc]
        assert op is not None
        step = Step(actor, op, pc, agent.row, tick)
        if isinstance(op, Copy):  # its line is not known yet
            return step
        if isinstance(op, Mma):  # the queue's order is the order of its MMAs
            join(actor.mma, actor.clock)
            self._act(step, ("mma", actor.key), actor.mma)
            join(actor.mma, step.clock)
            actor.groups.append(step)
        elif op.effects:
            self._act(step, actor.key, actor.clock)
            join(actor.clock, step.clock)
        use = op.use if isinstance(op, Arrive | Wait) else op.bar if isinstance(op, Mma) else None
        if isinstance(op, Arrive):
            step.clock = dict(actor.clock)
        if use is not None:
            actor.counts[use.counter] = actor.counts.get(use.counter, 0) + 1
        return step

    def copying(self, step: object, line: int, until: int) -> None:
        """A copy by threads is done by the role itself when it stores; all others are asynchronous."""
        assert isinstance(step, Step) and isinstance(step.op, Copy)
        actor, op = step.actor, step.op
        step.line = line - self.bases[op.tensor]
        if op.kind == "store" and op.engine == "threads":
            self._act(step, actor.key, actor.clock)
            join(actor.clock, step.clock)
            return
        kind = "load" if op.kind == "load" else "store"
        stage = actor.counts.get(op.bar.counter, 0) % op.bar.stages if op.bar else 0
        self._act(step, (kind, actor.key, op.tensor if op.bar else "", stage), actor.clock)
        if op.bar is None:
            actor.copies[kind].append(step)
        if op.bar:
            actor.counts[op.bar.counter] = actor.counts.get(op.bar.counter, 0) + 1
        self._later(step, until)

    def issued(self, step: object, until: int) -> None:
        """An MMA group takes effect when it completes."""
        assert isinstance(step, Step)
        self._later(step, until)

    def arrived(self, step: object, rank: int, barrier: int, phases: int, tick: int) -> None:
        """Who finds the phase complete knows all that arrived for it."""
        assert isinstance(step, Step)
        self._drain(tick)
        cta = step.actor.ctas[rank]
        clock = cta.pending.setdefault(barrier, {})
        join(clock, step.clock)
        known = cta.phases.setdefault(barrier, [])
        if len(known) < phases:
            known.append(dict(clock))

    def passed(self, step: object, barrier: int, phase: int) -> None:
        """The role learns what the arrivals knew; not by a wait that is left to another barrier."""
        assert isinstance(step, Step) and isinstance(step.op, Wait)
        if phase > 0 and step.op.polled:
            actor = step.actor
            join(actor.clock, actor.ctas[actor.agent.sm].phases[barrier][phase - 1])

    def end(self, step: object, tick: int) -> None:
        """The role goes on: its own work takes effect, and it knows what it waited for."""
        assert isinstance(step, Step)
        self._drain(tick)
        actor, op = step.actor, step.op
        if isinstance(op, WaitMma):
            index = len(actor.groups) - 1 - op.pending
            if index >= 0:
                join(actor.clock, actor.groups[index].clock)
        elif isinstance(op, WaitCopies):
            for other in actor.copies[op.kind]:
                join(actor.clock, other.clock)
        elif isinstance(op, TileLoop) and self.kinds[step.pc] == im.TILE:
            actor.registers.clear()
            actor.turns.clear()
        if step.until is None:
            step.until = tick
            self._execute(step)

    def finished(self, agent: Agent, tick: int) -> None:
        """A store that still reads shared memory must not outlive its CTA."""
        self._drain(tick)
        actor = self._actor(agent)
        for step in actor.copies["store"]:
            if step.found and any(count > actor.clock.get(name, 0) for name, count in step.clock.items()):
                place = next(iter(step.found[0][1][0].values())).text
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
        return self._actors[key]

    def _later(self, step: Step, until: int) -> None:
        step.until = until
        heapq.heappush(self._pending, (until, next(self._serial), step))

    def _drain(self, tick: int | None) -> None:
        """Complete what is due."""
        while self._pending and (tick is None or self._pending[0][0] <= tick):
            self._execute(heapq.heappop(self._pending)[2])

    def _execute(self, step: Step) -> None:
        if step.done or not step.found:
            return
        step.done = True
        for effect, ranks in step.found:
            if self.broken:
                return
            operands = [_Operands(self, step, places) for places in ranks]
            for operand in operands:
                operand.pair = operands
            try:  # an MMA of a pair is one product; what else spreads over a cluster happens in each CTA
                for operand in operands[:1] if isinstance(effect, Matmul) else operands:
                    execute(effect, operand)
            except _Nothing as nothing:
                self.broken = True
                self._report("data", step, nothing.place, f"reads {nothing}")
            step.actor.turns[type(effect)] = step.actor.turns.get(type(effect), 0) + 1

    def _act(self, step: Step, component: Hashable, known: Clock) -> None:
        """Find the operands of a step and check their accesses against all earlier ones, of which ``known`` knows.

        The step's clock is ``known`` and, in ``component``, the step itself.
        """
        actor, op = step.actor, step.op
        count = actor.accesses[component] = actor.accesses.get(component, 0) + 1
        step.clock = {**known, component: count}
        spread = (isinstance(op, Copy) and op.multicast) or (isinstance(op, Mma) and op.two_cta)
        ranks = range(self.cluster) if spread else (actor.agent.sm,)
        for effect in op.effects:
            by_rank = []
            for rank in ranks:
                places = {}
                for writes, names in ((False, effect.reads), (True, effect.writes)):
                    for name in names:
                        where = places[name] = self._locate(step, effect, name, rank)
                        access = Access(where.lo, where.hi, component, count, writes, step, where.text)
                        for old in where.storage.access(access, known):
                            if old.step is not step:
                                self._race(old, access)
                by_rank.append(places)
            step.found.append((effect, by_rank))

    def _locate(self, step: Step, effect: Effect, name: str, rank: int) -> Located:
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
        if place.share is None and space == "smem":
            if isinstance(effect, Load):
                layout = self.kernel.find_tensor(op.tensor).layout if isinstance(op, Copy) else None
                share = layout.share(step.line) if layout and layout.share else _WHOLE
            elif name not in effect.whole and not isinstance(op, Copy):
                share = actor.instance / actor.role.count, (actor.instance + 1) / actor.role.count
        cta = actor.ctas[rank]
        storage = cta.smem if space == "smem" else cta.tmem
        lo = base + stage * size
        text = f"{place.name}[{stage}]" if stages > 1 else place.name
        return Located(storage, place.name, stage, share, lo + size * share[0], lo + size * share[1], text)

    def _stage(self, step: Step, place: Place, stages: int) -> int:
        if place.stage is not None:
            return place.stage % stages
        if stages == 1:
            return 0
        actor, op = step.actor, step.op
        if isinstance(op, Copy) and op.kind == "load" and op.bar and place.counter is None:
            return actor.counts.get(op.bar.counter, 0) % stages
        counter = place.counter or f"{place.name}.get"
        selected = actor.counts.get(counter, 0) - 1 - place.back
        if selected < 0:
            raise ModelError(
                f"{self.kernel.name}: role '{actor.role.name}', operation '{op.label}': which stage of "
                f"'{place.name}'? Counter '{counter}' has not selected one (counters: {', '.join(actor.counts)})"
            )
        return selected % stages

    # --- messages -----------------------------------------------------------------------------------------------------
    def _report(self, kind: Kind, step: Step, place: str, what: str) -> None:
        actor, op = step.actor, step.op

        def describe() -> Finding:
            message = f"{step.name} ({step.cycles()}), {place}: {what}"
            return Finding(kind, self.kernel.name, actor.name, op.label, place, message)

        self.log.add((kind, actor.role.name, op.label, place.partition("[")[0], what), describe)

    def _race(self, old: Access, new: Access) -> None:
        first, second = old.step, new.step
        name = new.place.partition("[")[0]

        def describe() -> Finding:
            verb, what = ("overwrites" if new.writes else "reads"), ("writes" if old.writes else "reads")
            alias = f" as {old.place}, which shares its space" if old.place.partition("[")[0] != name else ""
            other = " of another CTA" if first.actor.agent.sm != second.actor.agent.sm else ""
            luck = "" if first.until is None or first.until > second.begin else "; in this run they are apart by luck"
            message = (
                f"{second.name} ({second.cycles()}) {verb} {new.place} that {first.name}{other} ({first.cycles()}) "
                f"{what}{alias}: {_cause(first, second)}{luck}"
            )
            return Finding("race", self.kernel.name, second.actor.name, second.op.label, new.place, message)

        roles = (first.actor.role.name, first.op.label, second.actor.role.name, second.op.label)
        self.log.add(("race", *roles, name), describe)


class _Nothing(Exception):
    """A place does not hold what is read from it."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(why)
        self.place = place


class _Operands:
    """The operands of one effect at the moment it takes place; see ``arithmetic.Places``."""

    def __init__(self, machine: Machine, step: Step, places: dict[str, Located]) -> None:
        self.machine, self.step, self.places = machine, step, places
        self.pair: Sequence[_Operands] = (self,)

    @property
    def problem(self) -> Problem:
        return self.machine.kernel.problem

    def read(self, field: str) -> Value:
        at = self.places[field]
        value = at.storage.read(at.name, at.stage, at.share)
        if value is None:
            by = at.storage.overwritten.get((at.name, at.stage))
            raise _Nothing(at.text, f"what {by} overwrote" if by else "what nobody has written")
        return value

    def write(self, field: str, value: Value) -> None:
        at, step = self.places[field], self.step
        if not at.storage.write(at.key, at.lo, at.hi, Piece(value, self._tile, isinstance(step.op, Copy), step.name)):
            self.report("data", field, "overwrites what was loaded before and nobody has read")

    def begun(self, field: str) -> bool:
        at = self.places[field]
        return at.storage.written_in(at.key, self._tile)

    @property
    def _tile(self) -> int:
        return self.step.tile // self.machine.cluster

    def turn(self, effect: Effect) -> int:
        return self.step.actor.turns.get(type(effect), 0)

    def load(self) -> Value:
        op = self.step.op
        assert isinstance(op, Copy)
        return self._global(op.tensor, None, self.step.line)

    def fetch(self, tensor: str, array: str | None, lines: int) -> Value:
        first, step = self._first_line(tensor), self.machine.kernel.find_tensor(tensor).step
        return concatenate([self._global(tensor, array, first + step * i) for i in range(lines)], 1)

    def _first_line(self, tensor: str) -> int:
        kernel = self.machine.kernel
        return int(kernel.tiles[kernel.find_tensor(tensor).start][self.step.tile])

    def _global(self, tensor: str, array: str | None, line: int) -> Value:
        layout = self.machine.kernel.find_tensor(tensor).layout
        if layout is None:
            raise ModelError(f"{self.machine.kernel.name}: tensor '{tensor}' has no layout: what do its lines hold?")
        region = layout.region(line, self.step.tile)
        name = array or layout.array or tensor
        if name not in self.machine.arrays.data:
            raise _Nothing(f"{name} in global memory", "what nobody has written")
        return Value(self.machine.arrays.read(name, region), region.rows)

    def store(self, value: Value, tensor: str | None, array: str | None) -> None:
        step, kernel = self.step, self.machine.kernel
        name = tensor or (step.op.tensor if isinstance(step.op, Copy) else "")
        layout = kernel.find_tensor(name).layout
        if layout is None:
            raise ModelError(f"{kernel.name}: operation '{step.op.label}' stores to '{name}', which has no layout")
        line = self._first_line(name) if tensor else step.line
        region = layout.region(line, step.tile)
        size, actor = len(region.rows), step.actor
        if len(value.data) != size:  # an instance's own rows
            rows = size // actor.role.count
            region = region._replace(rows=region.rows[actor.instance * rows : (actor.instance + 1) * rows])
        columns = value.data.shape[1] if array else layout.columns
        if not self.machine.arrays.write(array or layout.array or name, layout, columns, region, value.data):
            self.report("output", "source", f"writes rows of {array or name} a second time")

    def report(self, kind: Kind, field: str, message: str) -> None:
        step = self.step
        self.machine._report(kind, step, self.places[field].text, message)


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


def _cause(first: Step, second: Step) -> str:
    """What is missing between two steps."""
    same = first.actor is second.actor
    if isinstance(first.op, Mma):
        return "an MMA in flight, no wait for it" if same else "the completion of the MMA was not waited for"
    if isinstance(first.op, Copy):
        return "no wait for the copy to land" if first.op.kind == "load" else "no wait until the store has read it"
    if isinstance(second.op, Copy | Mma):
        return "not released, or not waited for, before"
    return "no barrier orders them"
