"""The reference engine: ``docs/semantics.md`` in SimPy, written to be read.

Every role instance is a SimPy process that executes its instructions one by one; whatever it waits
for is an event. The agenda is ordered by (time, SM group, serial): the group is the event priority.
The compiled engine must agree with this one event for event. What instructions do to the units of an SM is in
:mod:`fasim.engine.reference_units`.
"""

from __future__ import annotations

import numpy as np

from fasim.engine import image as im
from fasim.engine import memory as mem
from fasim.engine.common import NO_TRACE, SCHEDULER, Blocked, TraceWindow, deadlock, sort_trace
from fasim.engine.image import Image, RawResult
from fasim.engine.observer import Observer
from fasim.engine.reference_state import Agent, Slot
from fasim.engine.reference_units import DEPENDENCY, FULL, LAUNCH, MEMORY, TAIL, Units, Wait


class ReferenceEngine(Units):
    """One run of one image. ``run`` may be called once. ``observer`` is told what happens."""

    # --- the run ---------------------------------------------------------------------------
    def run(self) -> RawResult:
        """Execute to the end. Raises DeadlockError when roles are left waiting."""
        m = self.m
        for slot in range(m.slots):
            for group in range(m.groups):
                if self.next_cta < m.grid:
                    when = m.ramp + self.next_cta * m.cluster * m.dispatch
                    self.full_from = max(self.full_from, when)
                    self.start_cta(group, slot, when)
        everyone = [a for slots in self.slots for s in slots for cta in s.ctas for a in cta.agents]
        for agent in everyone:
            self.env.process(self.live(agent))
        self.env.run()
        everyone.sort(key=lambda a: (a.group, a.index))
        if stuck := [a for a in everyone if a.started and a.done_at is None]:
            raise deadlock(self.image, [self.describe(a) for a in stuck])
        for agent in everyone:
            if agent.done_at is not None:
                self.stalls[agent.kind, TAIL] += self.last - agent.done_at
        return RawResult(
            ticks=self.last,
            stalls=self.stalls,
            memory=self.memory.scalars[mem.L2_READ : mem.L2_READ + len(mem.COUNTERS)].copy(),
            bins=self.bins,
            bin_shift=self.bin_shift,
            full_from=self.full_from,
            full_until=self.last if self.full_until is None else min(self.last, self.full_until),
            events=self.events,
            trace=sort_trace(np.array(self.trace, dtype=np.int64).reshape(-1, im.TRACE_COLUMNS)),
            truncated=self.truncated,
        )

    def describe(self, agent: Agent) -> Blocked:
        """What an unfinished role waits for."""
        barrier, needed = agent.waiting or (SCHEDULER, 0)
        completed = self.cta_of(agent).phases[barrier] if barrier >= 0 else 0
        return Blocked(agent.group, agent.index, barrier, needed, completed, agent.since)

    def start_cta(self, group: int, slot_index: int, when: int) -> None:
        """Hand the next cluster to a slot; its roles begin at tick ``when``."""
        slot = self.slots[group][slot_index]
        slot.cluster, self.next_cta = self.next_cta, self.next_cta + 1
        slot.running, slot.drawn = self.m.cluster * self.m.agents, []
        if self.observer:
            self.observer.start(group, slot_index, self.now)
        for cta in slot.ctas:
            cta.arrived, cta.phases = [0] * self.m.barriers, [0] * self.m.barriers
            for agent in cta.agents:
                if agent.done_at is not None:
                    self.stalls[agent.kind, TAIL] += self.now - agent.done_at
                self.stalls[agent.kind, LAUNCH] += when - self.now
                fresh = Agent(group, agent.index, agent.kind, agent.sm, slot_index, agent.start)
                agent.__dict__.update(fresh.__dict__, started=True, pc=int(self.image.entry[agent.kind]))
                self.schedule(agent.start, group, when - self.now)

    # --- a role instance -------------------------------------------------------------------
    def live(self, agent: Agent) -> Wait:
        """All CTAs this role instance's slot ever holds."""
        while True:
            yield agent.start
            while (row := self.code[agent.pc])[im.K_KIND] != im.END:
                if self.observer:
                    agent.step = self.observer.begin(agent, agent.pc, self.now)
                yield from self.step(agent, row)
                if self.observer:
                    self.observer.end(agent.step, self.now)
            agent.start = self.env.event()
            self.finish(agent)

    def step(self, agent: Agent, row: list[int]) -> Wait:
        """Execute one instruction."""
        kind = row[im.K_KIND]
        if kind == im.WORK:
            yield from self.work(agent, row)
        elif kind == im.MMA:
            yield from self.mma(agent, row)
        elif kind == im.WAIT_MMA:
            index = len(agent.commits) - 1 - row[2]
            until = agent.commits[index] if index >= 0 else self.now
            cause = agent.commit_slices[index] if index >= 0 else im.NO_CAUSE
            yield from self.spend(agent, until - self.now, DEPENDENCY, row, cause)
        elif kind == im.COPY:
            yield from self.copy(agent, row)
        elif kind == im.WAIT_COPY:
            loads = row[2] == im.LOAD
            until, cause = (agent.loads_done, agent.load_slice) if loads else (agent.stores_done, agent.store_slice)
            yield from self.spend(agent, until - self.now, MEMORY, row, cause)
        elif kind == im.ARRIVE:
            self.arrive_op(agent, row)
        elif kind == im.WAIT:
            yield from self.wait_op(agent, row)
        elif kind == im.DELAY:
            yield from self.spend(agent, row[im.D_TICKS], row[im.D_REASON], row)
        elif kind == im.LOOP:
            trips = row[im.L_TRIPS]
            if row[im.L_COLUMN] >= 0:
                trips = int(self.image.tiles[agent.row, row[im.L_COLUMN]])
            if trips <= 0:
                agent.pc = row[im.L_EXIT]
                return
            agent.left[row[im.L_DEPTH]] = trips
            agent.iteration += 1
        elif kind == im.END_LOOP:
            agent.left[row[im.L_DEPTH]] -= 1
            if agent.left[row[im.L_DEPTH]] > 0:
                agent.iteration += 1
                agent.pc = row[im.L_EXIT]
                return
        elif kind == im.TILE:
            yield from self.tile(agent, row)
            return
        else:  # END_TILE
            agent.iteration = -1
            agent.pc = row[im.T_EXIT]
            return
        agent.pc += 1

    # --- work tiles and CTAs ---------------------------------------------------------------
    def tile(self, agent: Agent, row: list[int]) -> Wait:
        """Take the next work tile, or leave the tile loop."""
        m = self.m
        slot = self.slots[agent.group][agent.slot]
        j = agent.sequence
        if m.mode == im.SINGLE:
            tile = slot.cluster if j == 0 else m.cluster_tiles
        elif m.mode == im.STATIC:
            tile = slot.cluster + j * m.grid
        else:
            if j >= len(slot.drawn):
                if row[im.T_DRAWS] and agent.sm == 0:
                    self.draw(agent, slot, j)
                else:
                    yield from self.block(agent, SCHEDULER, 0, FULL, m.named_wake, row)
            tile = slot.drawn[j]
        if tile >= m.cluster_tiles:
            agent.pc, agent.row, agent.iteration = row[im.T_EXIT], -1, -1
            return
        agent.row, agent.sequence = tile * m.cluster + agent.sm, j + 1
        agent.address.clear()
        agent.pc += 1

    def draw(self, drawer: Agent, slot: Slot, j: int) -> None:
        """Ask the scheduler: the first tile is the CTA's own number, later ones come from the counter."""
        tile = slot.cluster
        if j > 0:
            tile, self.next_tile = self.next_tile, self.next_tile + 1
        slot.drawn.append(tile)
        for cta in slot.ctas:
            for agent in cta.agents:
                if agent.waiting and agent.waiting[0] == SCHEDULER:
                    self.wake(agent, agent.wake_ticks, drawer.last_slice)

    def finish(self, agent: Agent) -> None:
        """A role ended; the last of a cluster frees the slot for the next CTA."""
        if self.observer:
            self.observer.finished(agent, self.now)
        agent.done_at = self.now
        self.last = max(self.last, self.now)
        slot = self.slots[agent.group][agent.slot]
        slot.running -= 1
        if slot.running > 0:
            return
        if self.next_cta < self.m.grid:
            self.start_cta(agent.group, agent.slot, self.now + self.m.turnover)
        else:
            slot.cluster = -1
            self.full_until = self.now if self.full_until is None else min(self.full_until, self.now)


def run(
    image: Image,
    window: TraceWindow = NO_TRACE,
    memory: mem.MemoryState | None = None,
    observer: Observer | None = None,
) -> RawResult:
    """Execute ``image`` on the reference engine. ``memory`` None: an empty L2."""
    return ReferenceEngine(image, window, memory, observer).run()
