"""What an instruction does to the units of an SM, in SimPy: pipes, tensor core, copies and barriers, and the accounts.

The base of :class:`fasim.engine.reference.ReferenceEngine`; ``docs/semantics.md`` in code to be read.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import numpy as np
import simpy

from fasim.engine import image as im
from fasim.engine import memory as mem
from fasim.engine.common import NO_TRACE, TraceWindow, beyond_tensor
from fasim.engine.image import Image
from fasim.engine.observer import Observer
from fasim.engine.reference_state import Agent, Cta, Slot, Sm
from fasim.results.reasons import REASONS, UNIT_SLICE

WORK, ISSUE, PIPE, DEPENDENCY, BARRIER, FULL, EMPTY, MEMORY, LAUNCH, TAIL = range(len(REASONS))

Wait = Generator[simpy.Event, None, None]


class Units:
    """The state of one run of one image, and what instructions do to it."""

    def __init__(
        self,
        image: Image,
        window: TraceWindow = NO_TRACE,
        memory: mem.MemoryState | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.image, self.m, self.window, self.observer = image, image.machine, window, observer
        self.env = simpy.Environment()
        self.memory = memory or mem.new_memory(image.lines, image.machine, image.slowest_line)
        self.next_cta, self.next_tile = 0, self.m.grid
        self.events = self.last = self.full_from = 0
        self.full_until: int | None = None
        self.bins = np.zeros((im.BINS, len(image.activity) + 1), dtype=np.int64)
        self.bin_shift = im.FIRST_BIN_SHIFT
        self.stalls = np.zeros((self.m.agents, len(REASONS)), dtype=np.int64)
        self.trace: list[tuple[int, ...]] = []
        self.truncated = False
        self.code = image.code.tolist()
        self.sms = [[Sm() for _ in range(self.m.cluster)] for _ in range(self.m.groups)]
        self.slots = [[self._new_slot(g, s) for s in range(self.m.slots)] for g in range(self.m.groups)]

    def _new_slot(self, group: int, slot: int) -> Slot:
        ctas = []
        for rank in range(self.m.cluster):
            base = (rank * self.m.slots + slot) * self.m.agents
            agents = [Agent(group, base + k, k, rank, slot, self.env.event()) for k in range(self.m.agents)]
            ctas.append(Cta([0] * self.m.barriers, [0] * self.m.barriers, agents))
        return Slot(ctas)

    @property
    def now(self) -> int:
        """The current tick."""
        return int(self.env.now)

    # --- time -------------------------------------------------------------------------------
    def schedule(self, event: simpy.Event, group: int, delay: int) -> simpy.Event:
        """Put ``event`` on the agenda with the group as its priority."""
        event._ok, event._value = True, None
        self.env.schedule(event, priority=group, delay=delay)  # type: ignore[arg-type]
        return event

    def cta_of(self, agent: Agent) -> Cta:
        """The CTA that ``agent`` is a role of."""
        return self.slots[agent.group][agent.slot].ctas[agent.sm]

    def spend(self, agent: Agent, ticks: int, reason: int, row: list[int], cause: int = im.NO_CAUSE) -> Wait:
        """Let time pass and charge it to ``reason``; nothing happens for no time. ``cause``: the slice that ends it."""
        if ticks > 0:
            self.charge(agent, self.now, self.now + ticks, reason, row[im.K_NAME], cause)
            yield from self.pass_time(agent, ticks)

    def pass_time(self, agent: Agent, ticks: int) -> Wait:
        """Go on ``ticks`` later; at once for no time."""
        if ticks > 0:
            self.events += 1
            yield self.schedule(self.env.event(), agent.group, ticks)

    def charge(self, agent: Agent, start: int, end: int, reason: int, name: int, cause: int = im.NO_CAUSE) -> None:
        """Account for an agent's time, and record it."""
        if end > start:
            self.stalls[agent.kind, reason] += end - start
            agent.last_slice = self.record(agent, agent.kind, start, end, reason, name, -1, agent.sm, cause)

    # --- vector work and the tensor core ---------------------------------------------------
    def work(self, agent: Agent, row: list[int]) -> Wait:
        """Chunks of vector work, each reserving every pipe it uses at its next free tick."""
        sm = self.sms[agent.group][agent.sm]
        index = row[im.W_DEMAND]
        for _ in range(row[im.W_CHUNKS]):
            now = self.now
            beside = sm.mma_until > now
            end, span, cause = now, 0, im.NO_CAUSE
            demand = self.image.demand[index, int(beside)].tolist()
            for pipe, ticks in enumerate(demand):
                if ticks > 0:
                    sm.free[pipe] = max(now, sm.free[pipe]) + ticks
                    if sm.free[pipe] > end:
                        end, cause = sm.free[pipe], sm.held_by[pipe]
                    span = max(span, ticks)
            self.count(row[im.K_ACTIVITY], now, 1)
            delay = int(self.image.mma_delay[index])
            if beside and delay > 0:
                sm.settle(now, self.m.mma_ahead)
                sm.owed += delay
            if beside:
                sm.stopped += int(self.image.mma_stop[index])
            self.charge(agent, now, end - span, PIPE, row[im.K_NAME], cause)
            self.charge(agent, end - span, end, WORK, row[im.K_NAME])
            for pipe, ticks in enumerate(demand):
                if ticks > 0:
                    sm.held_by[pipe] = agent.last_slice
            stall = int(self.image.stall[index, int(beside)])
            self.charge(agent, end, end + stall, DEPENDENCY, row[im.K_NAME])
            yield from self.pass_time(agent, end + stall - now)
        column = im.W_LATENCY_BESIDE if sm.mma_until > self.now else im.W_LATENCY
        yield from self.spend(agent, row[column], DEPENDENCY, row)

    def mma(self, agent: Agent, row: list[int]) -> Wait:
        """Issue a group; a warp blocks at issue while too many of its instructions are in flight."""
        for _ in range(row[im.M_COUNT]):
            if len(agent.mma_ends) >= row[im.M_DEPTH]:
                oldest = agent.mma_ends[-row[im.M_DEPTH]] + row[im.M_DRAIN]
                cause = agent.mma_slices[-row[im.M_DEPTH]][agent.sm]
                yield from self.spend(agent, oldest - self.now, ISSUE, row, cause)
            self.queue_mma(agent, row)
            yield from self.spend(agent, row[im.M_INTERVAL], ISSUE, row)
        done = max(self.now, agent.mma_ends[-1] + row[im.M_DRAIN]) if agent.mma_ends else self.now
        agent.commits.append(done)
        agent.commit_slices.append(agent.mma_slices[-1][agent.sm] if agent.mma_ends else im.NO_CAUSE)
        if self.observer:
            self.observer.issued(agent.step, done)
        if row[im.M_BAR] >= 0:
            ranks = range(self.m.cluster) if row[im.M_PAIR] else (agent.sm,)
            running = agent.mma_slices[-1] if done > self.now else dict.fromkeys(ranks, agent.last_slice)
            causes = {rank: running.get(rank, im.NO_CAUSE) for rank in ranks}
            self.complete_later(agent, causes, self.next_barrier(agent, row), done)

    def queue_mma(self, agent: Agent, row: list[int]) -> None:
        """Put one MMA instruction on the tensor core of this SM, or of all SMs of a pair."""
        ranks = range(self.m.cluster) if row[im.M_PAIR] else (agent.sm,)
        sms = [self.sms[agent.group][r] for r in ranks]
        start = max(self.now, *(sm.free[im.P_TENSOR] for sm in sms))
        for sm in sms:
            sm.settle(self.now, self.m.mma_ahead)
        end = start + row[im.M_TICKS] + max(max(0, sm.owed) + sm.stopped for sm in sms)
        slices = {}
        for rank, sm in zip(ranks, sms, strict=True):
            sm.owed = min(0, sm.owed) if row[im.M_ABSORB] > 0 else 0
            sm.absorbed = row[im.M_ABSORB]
            sm.stopped = 0
            sm.free[im.P_TENSOR] = sm.mma_until = end
            self.count(row[im.K_ACTIVITY], start, 1)
            slices[rank] = sm.held_by[im.P_TENSOR] = self.record(
                agent, self.m.agents, start, end, UNIT_SLICE, row[im.K_NAME], agent.kind, rank, agent.last_slice
            )
        agent.mma_ends.append(end)
        agent.mma_slices.append(slices)

    # --- memory ----------------------------------------------------------------------------
    def copy(self, agent: Agent, row: list[int]) -> Wait:
        """Start a copy. A load completes at a barrier, or is the role's own to wait for."""
        m, now, tma = self.m, self.now, not row[im.C_ENGINE]
        sm = self.sms[agent.group][agent.sm]
        tensor, nbytes, kind = row[im.C_TENSOR], row[im.C_BYTES], row[im.C_KIND]
        line = int(self.image.line_base[tensor] + self.image.tiles[agent.row, row[im.C_COLUMN]])
        line += row[im.C_STEP] * agent.address.get(tensor, 0)
        agent.address[tensor] = agent.address.get(tensor, 0) + 1
        if not self.image.line_base[tensor] <= line < self.image.line_end[tensor]:
            raise beyond_tensor(self.image.names[row[im.K_NAME]])
        start, cause = now, im.NO_CAUSE
        if tma:
            start, cause = max(now, sm.tma_free), sm.tma_held_by
            sm.tma_free = start + row[im.C_ISSUE]
        before = self.hbm_bytes()
        stored = False
        receivers = m.cluster if row[im.C_MULTICAST] else 1
        done = int(mem.access(m, self.memory, start, line, nbytes, kind, agent.group, receivers, tma))
        self.count(-1, start, ((self.hbm_bytes() - before) * m.hbm_rate) >> im.RATE_SHIFT)
        self.count(row[im.K_ACTIVITY], start, 1)
        into_sm = (nbytes * m.ingress_rate) >> im.RATE_SHIFT
        if kind != im.LOAD:
            sm.egress_free = max(start, sm.egress_free) + ((nbytes * m.egress_rate) >> im.RATE_SHIFT)
            done = max(sm.egress_free, done) + m.store_latency
            stored = done > agent.stores_done
            agent.stores_done = max(agent.stores_done, done)
        else:
            ranks = range(m.cluster) if row[im.C_MULTICAST] else (agent.sm,)
            latency = m.thread_latency if row[im.C_ENGINE] else m.tma_latency
            latency += m.multicast_latency if row[im.C_MULTICAST] else 0
            for rank in ranks:
                other = self.sms[agent.group][rank]
                other.ingress_free = max(start, other.ingress_free) + into_sm
            done = max(done + into_sm, *(self.sms[agent.group][rank].ingress_free for rank in ranks))
            slices = {}
            for rank in ranks:
                end = self.sms[agent.group][rank].ingress_free
                slices[rank] = self.record(
                    agent,
                    m.agents + 1,
                    end - into_sm,
                    end,
                    UNIT_SLICE,
                    row[im.K_NAME],
                    agent.kind,
                    rank,
                    agent.last_slice,
                )
            done += latency
            if row[im.M_BAR] >= 0:
                self.complete_later(agent, slices, self.next_barrier(agent, row), done)
            elif done > agent.loads_done:
                agent.loads_done, agent.load_slice = done, slices[agent.sm]
        if self.observer:
            self.observer.copying(agent.step, line, done)
        self.charge(agent, now, start + row[im.C_ISSUE], ISSUE, row[im.K_NAME], cause if start > now else im.NO_CAUSE)
        if tma:
            sm.tma_held_by = agent.last_slice
        if stored:
            agent.store_slice = agent.last_slice
        yield from self.pass_time(agent, start + row[im.C_ISSUE] - now)

    def hbm_bytes(self) -> int:
        """Bytes that HBM has moved."""
        return int(self.memory.scalars[mem.HBM_READ] + self.memory.scalars[mem.HBM_WRITE])

    # --- barriers --------------------------------------------------------------------------
    def next_barrier(self, agent: Agent, row: list[int]) -> int:
        """The barrier of the stage that this use's counter points at; the counter moves on."""
        n = agent.count.get(row[im.M_COUNTER], 0)
        agent.count[row[im.M_COUNTER]] = n + 1
        return row[im.M_BAR] + n % row[im.M_STAGES]

    def complete_later(self, agent: Agent, causes: Mapping[int, int], barrier: int, when: int) -> None:
        """An asynchronous arrival at ``barrier`` at tick ``when``; ``causes``: ranks, and the slice behind each."""
        for rank, cause in causes.items():
            slot = self.slots[agent.group][agent.slot]
            event = self.env.event()
            event.callbacks.append(
                lambda _, rank=rank, slot=slot, cluster=slot.cluster, step=agent.step, cause=cause: self.completed(  # type: ignore[misc]
                    slot, rank, barrier, slot.cluster == cluster, step, cause
                )
            )
            self.schedule(event, agent.group, when - self.now)

    def completed(self, slot: Slot, rank: int, barrier: int, alive: bool, step: object, cause: int) -> None:
        """An asynchronous arrival comes due; one meant for a CTA that has ended is lost."""
        self.events += 1
        if alive:
            self.arrive(slot, rank, barrier, step, cause)

    def arrive(self, slot: Slot, rank: int, barrier: int, step: object, cause: int) -> None:
        """One arrival; the last one of a phase wakes the waiting roles in their order."""
        cta = slot.ctas[rank]
        cta.arrived[barrier] += 1
        complete = cta.arrived[barrier] >= self.image.need[barrier]
        if complete:
            cta.arrived[barrier] = 0
            cta.phases[barrier] += 1
        if self.observer:
            self.observer.arrived(step, rank, barrier, cta.phases[barrier], self.now)
        if not complete:
            return
        for agent in cta.agents:
            if agent.waiting and agent.waiting[0] == barrier and agent.waiting[1] <= cta.phases[barrier]:
                self.wake(agent, agent.wake_ticks, cause)

    def wake(self, agent: Agent, ticks: int, cause: int) -> None:
        """Let a blocked role go on in ``ticks``."""
        assert agent.wake is not None
        agent.waiting, agent.released_by = None, cause
        self.schedule(agent.wake, agent.group, ticks)

    def block(self, agent: Agent, barrier: int, phase: int, reason: int, wake_ticks: int, row: list[int]) -> Wait:
        """Wait until :meth:`wake`; the time is charged to ``reason`` afterwards."""
        agent.waiting, agent.since = (barrier, phase), self.now
        agent.wake, agent.wake_ticks = self.env.event(), wake_ticks
        yield agent.wake
        self.events += 1
        self.charge(agent, agent.since, self.now, reason, row[im.K_NAME], agent.released_by)

    def arrive_op(self, agent: Agent, row: list[int]) -> None:
        """ARRIVE: at once in the own CTA, later in another CTA of the cluster."""
        barrier = self.next_barrier(agent, row)
        scopes = {im.SCOPE_CTA: (agent.sm,), im.SCOPE_LEADER: (0,), im.SCOPE_CLUSTER: range(self.m.cluster)}
        for rank in scopes[row[im.B_SCOPE]]:
            if rank == agent.sm:
                self.arrive(self.slots[agent.group][agent.slot], rank, barrier, agent.step, agent.last_slice)
            else:
                self.complete_later(agent, {rank: agent.last_slice}, barrier, self.now + self.m.remote_latency)

    def wait_op(self, agent: Agent, row: list[int]) -> Wait:
        """WAIT: pass if the phase is complete, else block."""
        phase = agent.count.get(row[im.M_COUNTER], 0) // row[im.M_STAGES] + 1 - row[im.B_AHEAD]
        barrier = self.next_barrier(agent, row)
        if self.cta_of(agent).phases[barrier] >= phase:
            yield from self.spend(agent, row[im.B_TRY], ISSUE, row)
        else:
            yield from self.block(agent, barrier, phase, row[im.B_REASON], row[im.B_WAKE], row)
        if self.observer:
            self.observer.passed(agent.step, barrier, phase)

    # --- accounting ------------------------------------------------------------------------
    def count(self, activity: int, start: int, amount: int) -> None:
        """Add to the busy histogram, doubling its bin width when the run outgrows it."""
        while (start >> self.bin_shift) >= im.BINS:
            folded = self.bins[0::2] + self.bins[1::2]
            self.bins[:] = 0
            self.bins[: im.BINS // 2] = folded
            self.bin_shift += 1
        self.bins[start >> self.bin_shift, activity] += amount

    def record(
        self, agent: Agent, track: int, start: int, end: int, kind: int, name: int, owner: int, rank: int, cause: int
    ) -> int:
        """Keep a slice of the trace if the window asks for it. Returns its row, NO_CAUSE if it is not kept."""
        sm = agent.group * self.m.cluster + rank
        if end <= start or sm not in self.window.sms or end <= self.window.ticks[0] or start >= self.window.ticks[1]:
            return im.NO_CAUSE
        if len(self.trace) >= self.window.limit:
            self.truncated = True
            return im.NO_CAUSE
        self.trace.append((start, end, sm, agent.slot, track, name, kind, agent.row, agent.iteration, owner, cause))
        return len(self.trace) - 1
