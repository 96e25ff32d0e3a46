"""The compiled engine: ``docs/semantics.md`` in Numba, whole grids in about a second.

SM groups (clusters) share nothing but memory and the tile counter. So each group keeps its own small
agenda and runs ahead alone until it wants a *global* operation (a copy, a tile, a new CTA), which
waits until no other group can act earlier: global operations happen in (time, group) order, exactly
as if all events had gone through one agenda ordered by (time, group, serial).
"""

from __future__ import annotations

import numpy as np

from fasim.engine import image as im
from fasim.engine import memory as mem
from fasim.engine.account import spend
from fasim.engine.agenda import earlier, pop, push, runner_up, sink_first
from fasim.engine.cache import entry, inline
from fasim.engine.common import NO_TRACE, Blocked, TraceWindow, beyond_tensor, deadlock, sort_trace
from fasim.engine.image import Image, Machine, RawResult
from fasim.engine.instructions import (
    arrival,
    arrive,
    arrive_later,
    commit_mma,
    end_role,
    issue_copy,
    issue_mma,
    next_barrier,
    start_cta,
    take_tile,
    work_chunk,
)
from fasim.engine.state import (
    ALIVE,
    APART,
    BAD_LINE,
    BIN_SHIFT,
    BLOCKED,
    COMMITS,
    COUNTS,
    DONE_AT,
    DRAWN,
    ENDS,
    EVENTS,
    FAULT,
    FULL_FROM,
    FULL_UNTIL,
    GROUP_ENDS,
    GROUP_SLICES,
    GROUPS_KEPT,
    ITERATION,
    LAST,
    LAST_SLICE,
    LEFT,
    LOAD_SLICE,
    LOADS_DONE,
    MMA_ENDS,
    MMA_UNTIL,
    MMAS,
    NEEDED,
    NEVER,
    NEXT_CTA,
    NEXT_TILE,
    OK,
    OVERFLOW,
    PC,
    PHASES,
    PROGRESS,
    R_DEPENDENCY,
    R_ISSUE,
    R_MEMORY,
    R_TAIL,
    REASON,
    RELEASED_BY,
    ROW,
    RUNNING,
    SINCE,
    SIZE,
    STATUS,
    STORE_SLICE,
    STORES_DONE,
    TARGET,
    TIME,
    TRACED,
    TRUNCATED,
    WAITS_IN,
    WANTS_AGENT,
    WANTS_AT,
    Program,
    State,
    new_program,
    new_state,
)
from fasim.errors import ModelError


@inline
def _step(m: Machine, p: Program, st: State, ms: mem.MemoryState, g: int, a: int, now: int, rival: int) -> bool:  # fmt: skip  # noqa: E501
    """Run agent ``a`` from ``now`` until it parks or wants a global operation before its group's turn.

    ``rival`` is the group whose turn comes next, itself if there is none. False: it needs a global
    operation but ``rival`` is due first; the request is stored in ``st.group``.
    """
    agent = st.agent[g, a]
    c = a // m.agents
    sm = c // m.slots
    while True:
        row = p.code[agent[PC]]
        kind = row[im.K_KIND]
        nxt = now
        reason = R_ISSUE
        cause = im.NO_CAUSE
        if kind == im.WORK:
            if agent[PROGRESS] < row[im.W_CHUNKS]:
                agent[PROGRESS] += 1
                nxt = work_chunk(m, p, st, g, a, sm, row, now)
                reason = -1  # charged already
            else:
                agent[PROGRESS] = 0
                agent[PC] += 1
                beside = st.sm[g, sm, MMA_UNTIL] > now
                nxt = now + row[im.W_LATENCY_BESIDE if beside else im.W_LATENCY]
                reason = R_DEPENDENCY
        elif kind == im.MMA:
            k = agent[MMAS]
            oldest = 0
            if k >= row[im.M_DEPTH]:
                oldest = agent[MMA_ENDS + (k - row[im.M_DEPTH]) % ENDS] + row[im.M_DRAIN]
            if agent[PROGRESS] == row[im.M_COUNT]:
                agent[PROGRESS] = 0
                agent[PC] += 1
                commit_mma(m, st, g, a, sm, row, now)
            elif oldest > now:
                nxt = oldest
                if len(st.traced) > 0:
                    cause = st.mma_slices[g, a, (k - row[im.M_DEPTH]) % ENDS, sm]
            else:
                issue_mma(m, p, st, g, a, sm, row, now)
                agent[PROGRESS] += 1
                nxt = now + row[im.M_INTERVAL]
        elif kind == im.WAIT_MMA:
            agent[PC] += 1
            reason = R_DEPENDENCY
            k = agent[COMMITS] - 1 - row[2]
            if k >= 0:
                nxt = max(now, agent[GROUP_ENDS + k % GROUPS_KEPT])
                if len(st.traced) > 0:
                    cause = st.mma_slices[g, a, GROUP_SLICES + k % GROUPS_KEPT, sm]
        elif kind == im.COPY or kind == im.TILE or kind == im.END:
            alone = False
            if kind == im.TILE:
                alone = m.mode != im.DYNAMIC or row[im.T_DRAWS] == 0
            elif kind == im.END:
                alone = st.slot[g, c % m.slots, ALIVE] > 1
            if not alone and earlier(st, rival, now, g):
                st.group[g, WANTS_AT], st.group[g, WANTS_AGENT] = now, a
                return False
            if kind == im.COPY:
                agent[PC] += 1
                nxt = issue_copy(m, p, st, ms, g, a, row, now)
                reason = -1
            elif kind == im.TILE:
                if not take_tile(m, p, st, g, a, row, now):
                    return True
            else:
                end_role(m, p, st, g, a, now)
                return True
        elif kind == im.WAIT_COPY:
            agent[PC] += 1
            reason = R_MEMORY
            nxt = max(now, agent[LOADS_DONE] if row[2] == im.LOAD else agent[STORES_DONE])
            if len(st.traced) > 0:
                cause = st.slices[g, a, LOAD_SLICE if row[2] == im.LOAD else STORE_SLICE]
        elif kind == im.ARRIVE or kind == im.WAIT:
            agent[PC] += 1
            n = agent[COUNTS + row[im.M_COUNTER]]
            bar = next_barrier(agent, row)
            if kind == im.ARRIVE:
                first, ranks = sm, 1
                if row[im.B_SCOPE] != im.SCOPE_CTA:
                    first, ranks = 0, m.cluster if row[im.B_SCOPE] == im.SCOPE_CLUSTER else 1
                if len(st.traced) > 0:
                    cause = st.slices[g, a, LAST_SLICE]
                for r in range(first, first + ranks):
                    other = r * m.slots + c % m.slots
                    if other == c:
                        arrive(m, p, st, g, c, bar, now, cause)
                    else:
                        push(st, g, now + m.remote_latency, arrival(m, st, g, other, bar, cause))
            else:
                needed = n // row[im.M_STAGES] + 1 - row[im.B_AHEAD]
                if st.barrier[g, c, bar, PHASES] < needed:
                    agent[BLOCKED] = bar
                    agent[NEEDED] = needed
                    agent[SINCE] = now
                    agent[REASON] = row[im.B_REASON]
                    agent[WAITS_IN] = agent[PC] - 1
                    return True
                nxt = now + row[im.B_TRY]
        elif kind == im.DELAY:
            agent[PC] += 1
            reason = row[im.D_REASON]
            nxt = now + row[im.D_TICKS]
        elif kind == im.LOOP:
            trips = row[im.L_TRIPS]
            if row[im.L_COLUMN] >= 0:
                trips = p.tiles[agent[ROW], row[im.L_COLUMN]]
            if trips <= 0:
                agent[PC] = row[im.L_EXIT]
            else:
                agent[LEFT + row[im.L_DEPTH]] = trips
                agent[ITERATION] += 1
                agent[PC] += 1
        elif kind == im.END_LOOP:
            agent[LEFT + row[im.L_DEPTH]] -= 1
            if agent[LEFT + row[im.L_DEPTH]] > 0:
                agent[ITERATION] += 1
                agent[PC] = row[im.L_EXIT]
            else:
                agent[PC] += 1
        else:  # END_TILE
            agent[ITERATION] = -1
            agent[PC] = row[im.T_EXIT]
        if nxt > now:
            if reason >= 0:
                spend(m, p, st, g, a, now, nxt, reason, row[im.K_NAME], cause)
            st.scalars[EVENTS] += 1
            if st.group[g, SIZE] == 0 or nxt < st.heap[g, 0, TIME]:
                now = nxt
            else:
                push(st, g, nxt, a)
                return True


@entry
def _run(m: Machine, p: Program, st: State, ms: mem.MemoryState) -> None:
    """Run the group whose global operation is due until it wants another, until no group wants any."""
    st.scalars[NEXT_TILE] = m.grid
    for slot in range(m.slots):
        for g in range(m.groups):
            cluster = st.scalars[NEXT_CTA]
            if cluster >= m.grid:
                break
            st.scalars[NEXT_CTA] = cluster + 1
            when = m.ramp + cluster * m.cluster * m.dispatch
            st.scalars[FULL_FROM] = max(st.scalars[FULL_FROM], when)
            start_cta(m, p, st, g, slot, cluster, 0, when)
    for g in range(m.groups):
        # nothing can happen before the group's first event, so that is when it is looked at
        if st.group[g, SIZE] > 0:
            st.group[g, WANTS_AT] = st.heap[g, 0, TIME]
    while True:
        g = st.order[0]
        group = st.group[g]
        now, a = group[WANTS_AT], group[WANTS_AGENT]
        if now == NEVER or st.scalars[STATUS] != OK:
            return
        rival = runner_up(st)
        while True:
            if a < 0:
                if group[SIZE] == 0:
                    group[WANTS_AT] = NEVER
                    break
                now, a = st.heap[g, 0, TIME], st.heap[g, 0, TARGET]
                pop(st, g)
                if a < 0:
                    st.scalars[EVENTS] += 1
                    arrive_later(m, p, st, g, a, now)
                    continue
                agent = st.agent[g, a]
                if agent[SINCE] >= 0:
                    cause = st.slices[g, a, RELEASED_BY] if len(st.traced) > 0 else im.NO_CAUSE
                    waited = p.code[agent[WAITS_IN], im.K_NAME]
                    spend(m, p, st, g, a, agent[SINCE], now, agent[REASON], waited, cause)
                    agent[SINCE] = -1
                    st.scalars[EVENTS] += 1
            if not _step(m, p, st, ms, g, a, now, rival) or st.scalars[STATUS] != OK:
                break
            a = -1
        sink_first(st)


def prepare(*, traced: bool = False) -> None:
    """Compile the engine, or load it, by running an empty grid; with ``traced`` also the one that keeps a trace."""
    machine = Machine(*(1 for _ in Machine._fields))._replace(grid=0)
    flat, table, cube = (np.zeros((0,) * n, dtype=np.int64) for n in (1, 2, 3))
    nothing = Image(
        machine, table, cube, flat, flat, table, table, flat, flat, table, flat, flat, flat, 0, (), (), (), (), (), ()
    )
    run(nothing)
    if traced:
        run(nothing, TraceWindow((), (0, 0), 1))


def run(image: Image, window: TraceWindow = NO_TRACE, memory: mem.MemoryState | None = None) -> RawResult:
    """Execute ``image``; records the trace that ``window`` selects. ``memory`` None: an empty L2.

    Raises :class:`DeadlockError` when nothing is left to do but a role has not finished, and
    :class:`ModelError` when a program keeps more events in flight than its barriers can account for.
    """
    m = image.machine
    st = new_state(image, window)
    memory = memory or mem.new_memory(image.lines, image.machine, image.slowest_line)
    _run(m, new_program(image, window), st, memory)
    if st.scalars[STATUS] == OVERFLOW:
        raise ModelError("a role starts copies or MMAs faster than its barriers can account for them (agenda overflow)")
    if st.scalars[STATUS] == BAD_LINE:
        raise beyond_tensor(image.names[st.scalars[FAULT]])
    if st.scalars[STATUS] == APART:
        raise ModelError(f"roles of a CTA are more than {DRAWN} work tiles apart; couple them by a barrier")
    ticks = int(st.scalars[LAST])
    stuck = np.argwhere(st.agent[:, :, DONE_AT] == RUNNING)
    if len(stuck):
        raise deadlock(
            image,
            [
                Blocked(
                    int(g),
                    int(a),
                    int(st.agent[g, a, BLOCKED]),
                    int(st.agent[g, a, NEEDED]),
                    int(st.barrier[g, a // m.agents, max(0, st.agent[g, a, BLOCKED]), PHASES]),
                    int(st.agent[g, a, SINCE]),
                )
                for g, a in stuck
            ],
        )
    done = st.agent[:, :, DONE_AT].reshape(m.groups, -1, m.agents)
    st.stalls[:, R_TAIL] += np.where(done >= 0, ticks - done, 0).sum(axis=(0, 1))
    return RawResult(
        ticks=ticks,
        stalls=st.stalls,
        memory=memory.scalars[mem.L2_READ : mem.L2_READ + len(mem.COUNTERS)].copy(),
        bins=st.bins,
        bin_shift=int(st.scalars[BIN_SHIFT]),
        full_from=int(st.scalars[FULL_FROM]),
        full_until=min(ticks, int(st.scalars[FULL_UNTIL])),
        events=int(st.scalars[EVENTS]),
        trace=sort_trace(st.trace[: st.scalars[TRACED]]),
        truncated=bool(st.scalars[TRUNCATED]),
    )
