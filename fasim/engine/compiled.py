"""The compiled engine: ``docs/semantics.md`` in Numba, whole grids in about a second.

SM groups (clusters) share nothing but memory and the tile counter. So each group keeps its own small
agenda and runs ahead alone until it wants a *global* operation (a copy, a tile, a new CTA), which
waits until no other group can act earlier: global operations happen in (time, group) order, exactly
as if all events had gone through one agenda ordered by (time, group, serial).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from fasim import image as im
from fasim.engine import memory as mem
from fasim.engine.cache import prepare_cache
from fasim.engine.common import NO_TRACE, SCHEDULER, Blocked, TraceWindow, deadlock, sort_trace
from fasim.errors import ModelError
from fasim.image import Image, IntArray, Machine, RawResult
from fasim.run import REASONS, UNIT_SLICE

prepare_cache()
# Without the reference-counting runtime: nothing in here allocates, and counting references to the
# two dozen state arrays at every call costs ten times the work itself.
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
_jit = numba.njit(**_OPTIONS)
_inline = numba.njit(forceinline=True, **_OPTIONS)

R_WORK, R_ISSUE, R_PIPE, R_DEPENDENCY, R_BARRIER, R_FULL, R_EMPTY, R_MEMORY, R_LAUNCH, R_TAIL = range(10)
assert len(REASONS) == 10

ENDS = 16  # completion times remembered per agent; at least the depth of the MMA queue
GROUPS_KEPT = 8  # committed MMA groups remembered per agent
DRAWN = 8  # tiles a CTA's roles may be apart

# Columns of State.agent
(
    PC, PROGRESS, ROW, SEQUENCE, MMAS, COMMITS, LOADS_DONE, STORES_DONE,
    BLOCKED, NEEDED, SINCE, REASON, WAITS_IN, DONE_AT, ITERATION, PENDING,
) = range(16)  # fmt: skip
AGENT_FIELDS = 16
FREE = -1  # BLOCKED: not blocked
ON_TILE = SCHEDULER  # BLOCKED: waits for the scheduler
NOT_STARTED = -1  # DONE_AT before the CTA's first start
RUNNING = -2

# Columns of State.debt: ticks owed, as of when, and the running MMA's M_DELAY and M_ABSORB
OWED, AS_OF, PER_FMA, ABSORBED = range(4)
DEBT_FIELDS = 4

# State.scalars
NEXT_CTA, NEXT_TILE, EVENTS, FULL_FROM, FULL_UNTIL, TRACED, TRUNCATED, BIN_SHIFT, STATUS, LAST = range(10)
OK, OVERFLOW = 0, 1
NEVER = 2**62

# Outcome of step()
PARKED, WANTS_GLOBAL = 0, 1


class State(NamedTuple):
    """Everything that changes. ``g`` group, ``a`` agent within the group, ``c`` CTA within it."""

    agent: Any  # (g, a, AGENT_FIELDS)
    left: Any  # (g, a, 4) loop trips left
    count: Any  # (g, a, counters)
    address: Any  # (g, a, tensors) copies of each tensor in this tile
    ends: Any  # (g, a, ENDS) end of the last MMA instructions
    commits: Any  # (g, a, GROUPS_KEPT) completion of the last groups
    free: Any  # (g, sm, pipes) next free tick
    mma_until: Any  # (g, sm) the tensor core runs asynchronous MMAs until here
    debt: Any  # (g, sm, DEBT_FIELDS) delay that the next MMA instruction pays
    tma_free: Any  # (g, sm)
    ingress_free: Any
    arrived: Any  # (g, c, barriers) arrivals of the current phase
    phases: Any  # (g, c, barriers) completed phases
    cta: Any  # (g, slot) cluster index, -1 when idle
    running: Any  # (g, slot) agents not yet at their end
    drawn: Any  # (g, slot, DRAWN)
    draws: Any  # (g, slot)
    heap_time: Any  # (g, capacity)
    heap_serial: Any
    heap_target: Any  # agent, or -1 - barrier
    heap_size: Any  # (g,)
    serial: Any  # (g,)
    group_time: Any  # (g,) when the group wants its next global operation
    group_agent: Any  # (g,) which agent wants it, -1 at the start
    group_heap: Any  # (g,)
    scalars: Any
    bins: Any  # (BINS, activities + 1)
    stalls: Any  # (agents per CTA, reasons)
    trace: Any
    trace_sms: Any  # (sm_count,) 0/1


class Program(NamedTuple):
    """The image's arrays."""

    code: Any
    demand: Any
    fma: Any
    entry: Any
    need: Any
    tiles: Any
    line_base: Any
    trace_from: int
    trace_until: int


@_inline
def _push(st: State, g: int, time: int, target: int) -> None:
    size = st.heap_size[g]
    if size >= st.heap_time.shape[1]:
        st.scalars[STATUS] = OVERFLOW
        return
    times, serials, targets = st.heap_time[g], st.heap_serial[g], st.heap_target[g]
    serial = st.serial[g]
    st.serial[g] = serial + 1
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if times[parent] <= time:  # equal times: the older serial stays on top
            break
        times[i], serials[i], targets[i] = times[parent], serials[parent], targets[parent]
        i = parent
    times[i], serials[i], targets[i] = time, serial, target
    st.heap_size[g] = size + 1


@_inline
def _pop(st: State, g: int) -> None:
    times, serials, targets = st.heap_time[g], st.heap_serial[g], st.heap_target[g]
    size = st.heap_size[g] - 1
    st.heap_size[g] = size
    if size == 0:
        return
    time, serial, target = times[size], serials[size], targets[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child] or (times[right] == times[child] and serials[right] < serials[child])
        ):
            child = right
        if times[child] > time or (times[child] == time and serials[child] > serial):
            break
        times[i], serials[i], targets[i] = times[child], serials[child], targets[child]
        i = child
    times[i], serials[i], targets[i] = time, serial, target


@_inline
def _count(st: State, activity: int, start: int, amount: int) -> None:
    """Add to the histogram; its bins double in width when the run outgrows it."""
    k = start >> st.scalars[BIN_SHIFT]
    while k >= im.BINS:
        half = im.BINS // 2
        for i in range(st.bins.shape[1]):
            for j in range(half):
                st.bins[j, i] = st.bins[2 * j, i] + st.bins[2 * j + 1, i]
            for j in range(half, im.BINS):
                st.bins[j, i] = 0
        st.scalars[BIN_SHIFT] += 1
        k = start >> st.scalars[BIN_SHIFT]
    st.bins[k, activity] += amount


@_jit
def _record(m: Machine, p: Program, st: State, g: int, a: int, track: int, start: int, end: int, kind: int, name: int, owner: int, sm: int) -> None:  # fmt: skip  # noqa: E501
    if end <= start or st.trace_sms[g * m.cluster + sm] == 0 or end <= p.trace_from or start >= p.trace_until:
        return
    n = st.scalars[TRACED]
    if n >= st.trace.shape[0]:
        st.scalars[TRUNCATED] = 1
        return
    row = st.trace[n]
    row[im.T_START], row[im.T_END] = start, end
    row[im.T_SM] = g * m.cluster + sm
    row[im.T_SLOT] = (a // m.agents) % m.slots
    row[im.T_TRACK], row[im.T_NAME], row[im.T_KIND] = track, name, kind
    row[im.T_TILE], row[im.T_ITER] = st.agent[g, a, ROW], st.agent[g, a, ITERATION]
    row[im.T_OWNER] = owner
    st.scalars[TRACED] = n + 1


@_inline
def _spend(m: Machine, p: Program, st: State, g: int, a: int, start: int, end: int, reason: int, name: int) -> None:
    """Charge an agent's time to a reason."""
    if end > start:
        st.stalls[a % m.agents, reason] += end - start
        if st.trace.shape[0] > 0:
            _record(m, p, st, g, a, a % m.agents, start, end, reason, name, -1, a // m.agents // m.slots)


@_inline
def _arrive(m: Machine, p: Program, st: State, g: int, c: int, bar: int, now: int) -> None:
    """One arrival at barrier ``bar`` of CTA ``c``; a completed phase wakes its waiters in agent order."""
    st.arrived[g, c, bar] += 1
    if st.arrived[g, c, bar] < p.need[bar]:
        return
    st.arrived[g, c, bar] = 0
    st.phases[g, c, bar] += 1
    for a in range(c * m.agents, (c + 1) * m.agents):
        if st.agent[g, a, BLOCKED] == bar and st.agent[g, a, NEEDED] <= st.phases[g, c, bar]:
            st.agent[g, a, BLOCKED] = FREE
            _push(st, g, now + p.code[st.agent[g, a, WAITS_IN], im.B_WAKE], a)


@_jit
def _start_cta(m: Machine, p: Program, st: State, g: int, slot: int, cluster: int, now: int, when: int) -> None:
    """Put a cluster's CTAs into ``slot`` of every SM of the group; roles begin at ``when``."""
    st.cta[g, slot] = cluster
    st.running[g, slot] = m.cluster * m.agents
    st.draws[g, slot] = 0
    for rank in range(m.cluster):
        c = rank * m.slots + slot
        st.arrived[g, c] = 0
        st.phases[g, c] = 0
        for k in range(m.agents):
            a = c * m.agents + k
            agent = st.agent[g, a]
            done = agent[DONE_AT]
            if done >= 0:
                st.stalls[k, R_TAIL] += now - done
            st.stalls[k, R_LAUNCH] += when - now
            agent[:] = 0
            agent[PC] = p.entry[k]
            agent[ROW] = agent[ITERATION] = -1
            agent[BLOCKED] = FREE
            agent[DONE_AT] = RUNNING
            agent[SINCE] = -1
            st.count[g, a] = 0
            _push(st, g, when, a)


@_inline
def _settle(st: State, g: int, sm: int, now: int) -> None:
    """Let the running MMA absorb debt since it was last looked at."""
    debt = st.debt[g, sm]
    absorbed = ((now - debt[AS_OF]) * debt[ABSORBED]) >> im.FRACTION_SHIFT
    debt[OWED] = max(0, debt[OWED] - absorbed)
    debt[AS_OF] = now


@_inline
def _work(m: Machine, p: Program, st: State, g: int, a: int, sm: int, row: IntArray, now: int) -> int:
    """One chunk of vector work; returns when the agent can go on."""
    i = row[im.W_DEMAND]
    beside = 1 if st.mma_until[g, sm] > now else 0
    free = st.free[g, sm]
    demand = p.demand[i, beside]
    end = now
    span = 0
    for pipe in range(demand.shape[0]):
        d = demand[pipe]
        if d > 0:
            free[pipe] = max(now, free[pipe]) + d
            end = max(end, free[pipe])
            span = max(span, d)
    _count(st, row[im.K_ACTIVITY], now, 1)
    if beside == 1 and p.fma[i] > 0:
        _settle(st, g, sm, now)
        st.debt[g, sm, OWED] += (p.fma[i] * st.debt[g, sm, PER_FMA]) >> im.FRACTION_SHIFT
    _spend(m, p, st, g, a, now, end - span, R_PIPE, row[im.K_NAME])
    _spend(m, p, st, g, a, end - span, end, R_WORK, row[im.K_NAME])
    return end


@_inline
def _mma(m: Machine, p: Program, st: State, g: int, a: int, sm: int, row: IntArray, now: int) -> None:
    """Queue one MMA instruction on the tensor core of this SM (and of the peer, for a pair)."""
    ranks = m.cluster if row[im.M_PAIR] == 1 else 1
    start = now
    first = 0 if ranks > 1 else sm
    for r in range(first, first + ranks):
        start = max(start, st.free[g, r, im.P_TENSOR])
    extra = 0
    for r in range(first, first + ranks):
        _settle(st, g, r, now)
        extra = max(extra, st.debt[g, r, OWED])
        st.debt[g, r, OWED] = 0
        st.debt[g, r, PER_FMA], st.debt[g, r, ABSORBED] = row[im.M_DELAY], row[im.M_ABSORB]
    end = start + row[im.M_TICKS] + extra
    for r in range(first, first + ranks):
        st.free[g, r, im.P_TENSOR] = end
        st.mma_until[g, r] = end
        _count(st, row[im.K_ACTIVITY], start, 1)
        if st.trace.shape[0] > 0:
            _record(m, p, st, g, a, m.agents, start, end, UNIT_SLICE, row[im.K_NAME], a % m.agents, r)
    k = st.agent[g, a, MMAS]
    st.ends[g, a, k % ENDS] = end
    st.agent[g, a, MMAS] = k + 1


@_jit
def _copy(m: Machine, p: Program, st: State, ms: mem.MemoryState, g: int, a: int, row: IntArray, now: int) -> int:
    """Issue a copy; returns when the agent can go on. Its completion is pushed or remembered."""
    agent = st.agent[g, a]
    c = a // m.agents
    sm = c // m.slots
    tensor, nbytes, kind = row[im.C_TENSOR], row[im.C_BYTES], row[im.C_KIND]
    line = p.line_base[tensor] + p.tiles[agent[ROW], row[im.C_COLUMN]] + row[im.C_STEP] * st.address[g, a, tensor]
    st.address[g, a, tensor] += 1
    start = now
    threads = row[im.C_ENGINE] == 1
    if not threads:
        start = max(now, st.tma_free[g, sm])
        st.tma_free[g, sm] = start + row[im.C_ISSUE]
    hbm_bytes = ms.scalars[mem.HBM_READ] + ms.scalars[mem.HBM_WRITE]
    done = mem.access(m, ms, start, line, nbytes, kind)
    hbm_bytes = ms.scalars[mem.HBM_READ] + ms.scalars[mem.HBM_WRITE] - hbm_bytes
    _count(st, st.bins.shape[1] - 1, start, (hbm_bytes * m.hbm_rate) >> im.RATE_SHIFT)
    _count(st, row[im.K_ACTIVITY], start, 1)
    into_sm = (nbytes * m.ingress_rate) >> im.RATE_SHIFT
    go_on = start + row[im.C_ISSUE]
    if kind != im.LOAD:
        agent[STORES_DONE] = max(agent[STORES_DONE], start + into_sm + m.store_latency)
        return go_on
    latency = m.thread_latency if threads else m.tma_latency
    first, ranks = sm, 1
    if row[im.C_MULTICAST] == 1:
        first, ranks = 0, m.cluster
        latency += m.multicast_latency
    for r in range(first, first + ranks):
        st.ingress_free[g, r] = max(start, st.ingress_free[g, r]) + into_sm
        done = max(done, st.ingress_free[g, r])
    done += latency
    if st.trace.shape[0] > 0:
        for r in range(first, first + ranks):
            busy_from = st.ingress_free[g, r] - into_sm
            _record(m, p, st, g, a, m.agents + 1, busy_from, busy_from + into_sm, UNIT_SLICE, row[im.K_NAME], a % m.agents, r)  # fmt: skip  # noqa: E501
    bar = row[im.M_BAR]
    if bar < 0:
        agent[LOADS_DONE] = max(agent[LOADS_DONE], done)
        return go_on
    n = st.count[g, a, row[im.M_COUNTER]]
    st.count[g, a, row[im.M_COUNTER]] = n + 1
    bar += n % row[im.M_STAGES]
    slot = c % m.slots
    for r in range(first, first + ranks):
        _push(st, g, done, -1 - ((r * m.slots + slot) * m.barriers + bar))
    return go_on


@_jit
def _tile(m: Machine, p: Program, st: State, g: int, a: int, row: IntArray, now: int) -> bool:
    """Take the agent's next work tile or leave the tile loop. False: it blocks on the scheduler."""
    agent = st.agent[g, a]
    c = a // m.agents
    slot = c % m.slots
    j = agent[SEQUENCE]
    cluster = st.cta[g, slot]
    if m.mode == im.SINGLE:
        tile = cluster if j == 0 else m.cluster_tiles
    elif m.mode == im.STATIC:
        tile = cluster + j * m.grid
    else:
        if j >= st.draws[g, slot]:
            if row[im.T_DRAWS] == 0 or c // m.slots != 0:
                agent[BLOCKED] = ON_TILE
                agent[SINCE] = now
                agent[REASON] = R_FULL
                agent[WAITS_IN] = agent[PC]
                return False
            tile = cluster if j == 0 else st.scalars[NEXT_TILE]
            if j > 0:
                st.scalars[NEXT_TILE] += 1
            st.drawn[g, slot, j % DRAWN] = tile
            st.draws[g, slot] = j + 1
            for rank in range(m.cluster):
                base = (rank * m.slots + slot) * m.agents
                for other in range(base, base + m.agents):
                    if st.agent[g, other, BLOCKED] == ON_TILE:
                        st.agent[g, other, BLOCKED] = FREE
                        _push(st, g, now + m.named_wake, other)
        tile = st.drawn[g, slot, j % DRAWN]
    if tile >= m.cluster_tiles:
        agent[PC] = row[im.T_EXIT]
        agent[ROW] = agent[ITERATION] = -1
    else:
        agent[PC] += 1
        agent[ROW] = tile * m.cluster + c // m.slots
        agent[SEQUENCE] = j + 1
        st.address[g, a] = 0
    return True


@_jit
def _end(m: Machine, p: Program, st: State, g: int, a: int, now: int) -> None:
    """An agent reached its end; the last one of a cluster frees the slot for the next CTA."""
    st.agent[g, a, DONE_AT] = now
    slot = (a // m.agents) % m.slots
    st.running[g, slot] -= 1
    st.scalars[LAST] = max(st.scalars[LAST], now)
    if st.running[g, slot] > 0:
        return
    cluster = st.scalars[NEXT_CTA]
    if cluster < m.grid:
        st.scalars[NEXT_CTA] = cluster + 1
        _start_cta(m, p, st, g, slot, cluster, now, now + m.turnover)
    else:
        st.cta[g, slot] = -1
        st.scalars[FULL_UNTIL] = min(st.scalars[FULL_UNTIL], now)


@_inline
def _step(m: Machine, p: Program, st: State, ms: mem.MemoryState, g: int, a: int, now: int, top: int, top_g: int) -> int:  # fmt: skip  # noqa: E501
    """Run agent ``a`` from ``now`` until it parks, or until it wants a global operation out of turn.

    ``(top, top_g)`` is the earliest other group. Returns PARKED, or WANTS_GLOBAL with the time left
    in the agent's PENDING field.
    """
    agent = st.agent[g, a]
    c = a // m.agents
    sm = c // m.slots
    while True:
        row = p.code[agent[PC]]
        kind = row[im.K_KIND]
        nxt = now
        reason = R_ISSUE
        if kind == im.WORK:
            if agent[PROGRESS] < row[im.W_CHUNKS]:
                agent[PROGRESS] += 1
                nxt = _work(m, p, st, g, a, sm, row, now)
                reason = -1  # charged already
            else:
                agent[PROGRESS] = 0
                agent[PC] += 1
                nxt = now + row[im.W_LATENCY]
                reason = R_DEPENDENCY
        elif kind == im.MMA:
            k = agent[MMAS]
            oldest = 0
            if k >= row[im.M_DEPTH]:
                oldest = st.ends[g, a, (k - row[im.M_DEPTH]) % ENDS] + row[im.M_DRAIN]
            if agent[PROGRESS] == row[im.M_COUNT]:
                agent[PROGRESS] = 0
                agent[PC] += 1
                done = st.ends[g, a, (k - 1) % ENDS] + row[im.M_DRAIN]
                st.commits[g, a, agent[COMMITS] % GROUPS_KEPT] = done
                agent[COMMITS] += 1
                if row[im.M_BAR] >= 0:
                    n = st.count[g, a, row[im.M_COUNTER]]
                    st.count[g, a, row[im.M_COUNTER]] = n + 1
                    bar = row[im.M_BAR] + n % row[im.M_STAGES]
                    first, ranks = (0, m.cluster) if row[im.M_PAIR] == 1 else (sm, 1)
                    for r in range(first, first + ranks):
                        _push(st, g, done, -1 - ((r * m.slots + c % m.slots) * m.barriers + bar))
            elif oldest > now:
                nxt = oldest
            else:
                _mma(m, p, st, g, a, sm, row, now)
                agent[PROGRESS] += 1
                nxt = now + row[im.M_INTERVAL]
        elif kind == im.WAIT_MMA:
            agent[PC] += 1
            reason = R_DEPENDENCY
            k = agent[COMMITS] - 1 - row[2]
            if k >= 0:
                nxt = max(now, st.commits[g, a, k % GROUPS_KEPT])
        elif kind == im.COPY or kind == im.TILE or kind == im.END:
            alone = False
            if kind == im.TILE:
                alone = m.mode != im.DYNAMIC or row[im.T_DRAWS] == 0
            elif kind == im.END:
                alone = st.running[g, c % m.slots] > 1
            if not alone and (now > top or (now == top and g > top_g)):
                agent[PENDING] = now
                return WANTS_GLOBAL
            if kind == im.COPY:
                agent[PC] += 1
                nxt = _copy(m, p, st, ms, g, a, row, now)
            elif kind == im.TILE:
                if not _tile(m, p, st, g, a, row, now):
                    return PARKED
            else:
                _end(m, p, st, g, a, now)
                return PARKED
        elif kind == im.WAIT_COPY:
            agent[PC] += 1
            reason = R_MEMORY
            nxt = max(now, agent[LOADS_DONE] if row[2] == im.LOAD else agent[STORES_DONE])
        elif kind == im.ARRIVE or kind == im.WAIT:
            agent[PC] += 1
            n = st.count[g, a, row[im.M_COUNTER]]
            st.count[g, a, row[im.M_COUNTER]] = n + 1
            bar = row[im.M_BAR] + n % row[im.M_STAGES]
            if kind == im.ARRIVE:
                if row[im.B_SCOPE] == im.SCOPE_CTA:
                    _arrive(m, p, st, g, c, bar, now)
                elif row[im.B_SCOPE] == im.SCOPE_LEADER:
                    _arrive(m, p, st, g, c % m.slots, bar, now)
                else:
                    for r in range(m.cluster):
                        _arrive(m, p, st, g, r * m.slots + c % m.slots, bar, now)
            else:
                needed = n // row[im.M_STAGES] + 1 - row[im.B_AHEAD]
                if st.phases[g, c, bar] < needed:
                    agent[BLOCKED] = bar
                    agent[NEEDED] = needed
                    agent[SINCE] = now
                    agent[REASON] = row[im.B_REASON]
                    agent[WAITS_IN] = agent[PC] - 1
                    return PARKED
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
                st.left[g, a, row[im.L_DEPTH]] = trips
                agent[ITERATION] += 1
                agent[PC] += 1
        elif kind == im.END_LOOP:
            left = st.left[g, a, row[im.L_DEPTH]] - 1
            st.left[g, a, row[im.L_DEPTH]] = left
            if left > 0:
                agent[ITERATION] += 1
                agent[PC] = row[im.L_EXIT]
            else:
                agent[PC] += 1
        else:  # END_TILE
            agent[ITERATION] = -1
            agent[PC] = row[im.T_EXIT]
        if nxt > now:
            if reason >= 0:
                _spend(m, p, st, g, a, now, nxt, reason, row[im.K_NAME])
            st.scalars[EVENTS] += 1
            if st.heap_size[g] == 0 or nxt < st.heap_time[g, 0]:
                now = nxt
            else:
                _push(st, g, nxt, a)
                return PARKED


@_inline
def _run_group(m: Machine, p: Program, st: State, ms: mem.MemoryState, g: int, resume: int, top: int, top_g: int) -> tuple[int, int]:  # fmt: skip  # noqa: E501
    """Run a group until it wants a global operation out of turn: (time, agent), or (-1, -1) at its end.

    ``resume`` is the agent whose global operation is due, -1 at the start.
    """
    while True:
        if resume >= 0:
            a = resume
            now = st.agent[g, a, PENDING]
            resume = -1
        else:
            if st.heap_size[g] == 0:
                return -1, -1
            now = st.heap_time[g, 0]
            a = st.heap_target[g, 0]
            _pop(st, g)
            if a < 0:
                st.scalars[EVENTS] += 1
                c = (-1 - a) // m.barriers
                _arrive(m, p, st, g, c, (-1 - a) % m.barriers, now)
                continue
            if st.agent[g, a, SINCE] >= 0:
                agent = st.agent[g, a]
                _spend(m, p, st, g, a, agent[SINCE], now, agent[REASON], p.code[agent[WAITS_IN], im.K_NAME])
                agent[SINCE] = -1
                st.scalars[EVENTS] += 1
        if _step(m, p, st, ms, g, a, now, top, top_g) == WANTS_GLOBAL:
            return st.agent[g, a, PENDING], a
        if st.scalars[STATUS] != OK:
            return -1, -1


@_jit
def _run(m: Machine, p: Program, st: State, ms: mem.MemoryState) -> None:
    """The outer agenda: groups by the time of the global operation they want."""
    times, agents, heap = st.group_time, st.group_agent, st.group_heap
    st.scalars[NEXT_TILE] = m.grid
    for slot in range(m.slots):
        for g in range(m.groups):
            cluster = st.scalars[NEXT_CTA]
            if cluster >= m.grid:
                break
            st.scalars[NEXT_CTA] = cluster + 1
            when = m.ramp + cluster * m.cluster * m.dispatch
            st.scalars[FULL_FROM] = max(st.scalars[FULL_FROM], when)
            _start_cta(m, p, st, g, slot, cluster, 0, when)
    for g in range(m.groups):
        # nothing can happen before the group's first event, so that is when it is looked at
        if st.heap_size[g] > 0:
            times[g] = st.heap_time[g, 0]
    # A binary heap of groups keyed (time, group). CTAs start in group order, so it begins sorted.
    size = m.groups
    while size > 0:
        g = heap[0]
        if times[g] == NEVER:
            return
        # the runner-up: the smaller child of the root
        top, top_g = NEVER, m.groups
        for child in (1, 2):
            if child < size:
                other = heap[child]
                if times[other] < top or (times[other] == top and other < top_g):
                    top, top_g = times[other], other
        time, agent = _run_group(m, p, st, ms, g, agents[g], top, top_g)
        if st.scalars[STATUS] != OK:
            return
        agents[g] = agent
        times[g] = time if time >= 0 else NEVER
        i = 0
        while True:
            child = 2 * i + 1
            if child >= size:
                break
            if child + 1 < size:
                x, y = heap[child], heap[child + 1]
                if times[y] < times[x] or (times[y] == times[x] and y < x):
                    child += 1
            x, y = heap[child], heap[i]
            if times[x] < times[y] or (times[x] == times[y] and x < y):
                heap[child], heap[i] = y, x
                i = child
            else:
                break


def run(image: Image, window: TraceWindow = NO_TRACE, memory: mem.MemoryState | None = None) -> RawResult:
    """Execute ``image``; records the trace that ``window`` selects. ``memory`` None: an empty L2.

    Raises :class:`DeadlockError` when nothing is left to do but a role has not finished, and
    :class:`ModelError` when a program keeps more events in flight than its barriers can account for.
    """
    m = image.machine
    agents = m.cluster * m.slots * m.agents
    ctas = m.cluster * m.slots
    events = agents + int(image.need.sum()) * ctas + 8 * ctas

    def zeros(*shape: int) -> IntArray:
        return np.zeros(shape, dtype=np.int64)

    st = State(
        agent=zeros(m.groups, agents, AGENT_FIELDS),
        left=zeros(m.groups, agents, 4),
        count=zeros(m.groups, agents, m.counters),
        address=zeros(m.groups, agents, m.tensors),
        ends=zeros(m.groups, agents, ENDS),
        commits=zeros(m.groups, agents, GROUPS_KEPT),
        free=zeros(m.groups, m.cluster, len(im.PIPES)),
        mma_until=zeros(m.groups, m.cluster),
        debt=zeros(m.groups, m.cluster, DEBT_FIELDS),
        tma_free=zeros(m.groups, m.cluster),
        ingress_free=zeros(m.groups, m.cluster),
        arrived=zeros(m.groups, ctas, m.barriers),
        phases=zeros(m.groups, ctas, m.barriers),
        cta=zeros(m.groups, m.slots) - 1,
        running=zeros(m.groups, m.slots),
        drawn=zeros(m.groups, m.slots, DRAWN),
        draws=zeros(m.groups, m.slots),
        heap_time=zeros(m.groups, events),
        heap_serial=zeros(m.groups, events),
        heap_target=zeros(m.groups, events),
        heap_size=zeros(m.groups),
        serial=zeros(m.groups),
        group_time=zeros(m.groups) + NEVER,
        group_agent=zeros(m.groups) - 1,
        group_heap=np.arange(m.groups, dtype=np.int64),
        scalars=zeros(10),
        bins=zeros(im.BINS, len(image.activity) + 1),
        stalls=zeros(m.agents, len(REASONS)),
        trace=zeros(window.limit, im.TRACE_COLUMNS),
        trace_sms=zeros(m.groups * m.cluster),
    )
    st.agent[:, :, DONE_AT] = NOT_STARTED
    st.scalars[FULL_UNTIL] = NEVER
    st.scalars[BIN_SHIFT] = im.FIRST_BIN_SHIFT
    for sm in window.sms:
        if sm < len(st.trace_sms):
            st.trace_sms[sm] = 1
    program = Program(
        image.code,
        image.demand,
        image.fma,
        image.entry,
        image.need,
        image.tiles,
        image.line_base,
        *window.ticks,
    )
    memory = memory or mem.new_memory(image.lines)
    _run(m, program, st, memory)
    if st.scalars[STATUS] == OVERFLOW:
        raise ModelError("a role starts copies or MMAs faster than its barriers can account for them (agenda overflow)")
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
                    int(st.phases[g, a // m.agents, max(0, st.agent[g, a, BLOCKED])]),
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
