"""What single instructions do in the compiled engine; ``compiled.py`` decides which one runs when."""

from __future__ import annotations

from fasim.engine import image as im
from fasim.engine import memory as mem
from fasim.engine.account import count, hold, holder, record, spend
from fasim.engine.agenda import push
from fasim.engine.cache import inline, jit
from fasim.engine.image import IntArray, Machine
from fasim.engine.state import (
    ABSORBED,
    ALIVE,
    APART,
    ARRIVAL_BITS,
    ARRIVED,
    AS_OF,
    BAD_LINE,
    BLOCKED,
    CLUSTER,
    COMMITS,
    COUNTS,
    DONE_AT,
    DRAWN,
    DRAWS,
    EGRESS_FREE,
    ENDS,
    FAULT,
    FREE,
    FULL_UNTIL,
    GROUP_ENDS,
    GROUP_SLICES,
    GROUPS_KEPT,
    HELD_BY,
    INGRESS_FREE,
    ITERATION,
    LAST,
    LAST_SLICE,
    LOAD_SLICE,
    LOADS_DONE,
    MMA_ENDS,
    MMA_UNTIL,
    MMAS,
    NEEDED,
    NEXT_CTA,
    NEXT_TILE,
    ON_TILE,
    OWED,
    PC,
    PHASES,
    R_DEPENDENCY,
    R_FULL,
    R_ISSUE,
    R_LAUNCH,
    R_PIPE,
    R_TAIL,
    R_WORK,
    REASON,
    RELEASED_BY,
    ROW,
    RUNNING,
    SEQUENCE,
    SINCE,
    STATUS,
    STOPPED,
    STORE_SLICE,
    STORES_DONE,
    TILES,
    TMA_FREE,
    TMA_HELD_BY,
    WAITS_IN,
    Program,
    State,
)
from fasim.results.reasons import UNIT_SLICE


@inline
def arrival(m: Machine, st: State, g: int, c: int, bar: int, cause: int) -> int:
    """Encodes "arrive at barrier ``bar`` of CTA ``c``" as an agenda target; dropped if the CTA has ended.

    ``cause``: the slice behind it.
    """
    barriers = m.cluster * m.slots * m.barriers
    place = st.slot[g, c % m.slots, CLUSTER] * barriers + c * m.barriers + bar
    return int(-1 - (((cause - im.NO_CAUSE) << ARRIVAL_BITS) + place))


@inline
def arrive(m: Machine, p: Program, st: State, g: int, c: int, bar: int, now: int, cause: int) -> None:
    """One arrival at barrier ``bar`` of CTA ``c``; a completed phase wakes its waiters in agent order."""
    barrier = st.barrier[g, c, bar]
    barrier[ARRIVED] += 1
    if barrier[ARRIVED] < p.need[bar]:
        return
    barrier[ARRIVED] = 0
    barrier[PHASES] += 1
    for a in range(c * m.agents, (c + 1) * m.agents):
        agent = st.agent[g, a]
        if agent[BLOCKED] == bar and agent[NEEDED] <= barrier[PHASES]:
            agent[BLOCKED] = FREE
            if len(st.traced) > 0:
                st.slices[g, a, RELEASED_BY] = cause
            push(st, g, now + p.code[agent[WAITS_IN], im.B_WAKE], a)


@inline
def arrive_later(m: Machine, p: Program, st: State, g: int, target: int, now: int) -> None:
    """An arrival comes due; one meant for a CTA that has ended is lost."""
    barriers = m.cluster * m.slots * m.barriers
    cause = ((-1 - target) >> ARRIVAL_BITS) + im.NO_CAUSE
    place = (-1 - target) & ((1 << ARRIVAL_BITS) - 1)
    c = place % barriers // m.barriers
    if st.slot[g, c % m.slots, CLUSTER] == place // barriers:
        arrive(m, p, st, g, c, place % m.barriers, now, cause)


@jit
def start_cta(m: Machine, p: Program, st: State, g: int, slot: int, cluster: int, now: int, when: int) -> None:
    """Put a cluster's CTAs into ``slot`` of every SM of the group; roles begin at ``when``."""
    st.slot[g, slot, CLUSTER] = cluster
    st.slot[g, slot, ALIVE] = m.cluster * m.agents
    st.slot[g, slot, DRAWS] = 0
    for rank in range(m.cluster):
        c = rank * m.slots + slot
        st.barrier[g, c] = 0
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
            if len(st.traced) > 0:
                st.slices[g, a] = im.NO_CAUSE
            push(st, g, when, a)


@inline
def next_barrier(agent: IntArray, row: IntArray) -> int:
    """The stage of its barrier that an instruction's turn falls on; counts the turn."""
    counter = COUNTS + row[im.M_COUNTER]
    bar = row[im.M_BAR] + agent[counter] % row[im.M_STAGES]
    agent[counter] += 1
    return int(bar)


@inline
def settle(m: Machine, st: State, g: int, sm: int, now: int) -> None:
    """Let the running MMA absorb debt since it was last looked at."""
    unit = st.sm[g, sm]
    absorbed = ((now - unit[AS_OF]) * unit[ABSORBED]) >> im.FRACTION_SHIFT
    ahead = (m.mma_ahead * unit[ABSORBED]) >> im.FRACTION_SHIFT
    unit[OWED] = max(-ahead, unit[OWED] - absorbed)
    unit[AS_OF] = now


@inline
def work_chunk(m: Machine, p: Program, st: State, g: int, a: int, sm: int, row: IntArray, now: int) -> int:
    """One chunk of vector work; returns when the agent can go on."""
    i = row[im.W_DEMAND]
    unit = st.sm[g, sm]
    beside = 1 if unit[MMA_UNTIL] > now else 0
    demand = p.demand[i, beside]
    end = now
    span = 0
    for pipe in range(demand.shape[0]):
        d = demand[pipe]
        if d > 0:
            unit[pipe] = max(now, unit[pipe]) + d
            end = max(end, unit[pipe])
            span = max(span, d)
    count(st, row[im.K_ACTIVITY], now, 1)
    if beside == 1 and p.mma_delay[i] > 0:
        settle(m, st, g, sm, now)
        unit[OWED] += p.mma_delay[i]
    if beside == 1:
        unit[STOPPED] += p.mma_stop[i]
    cause = im.NO_CAUSE
    if len(st.traced) > 0:
        cause = holder(unit, demand, end)
    spend(m, p, st, g, a, now, end - span, R_PIPE, row[im.K_NAME], cause)
    spend(m, p, st, g, a, end - span, end, R_WORK, row[im.K_NAME], im.NO_CAUSE)
    if len(st.traced) > 0:
        hold(unit, demand, st.slices[g, a, LAST_SLICE])
    stall = p.stall[i, beside]
    spend(m, p, st, g, a, end, end + stall, R_DEPENDENCY, row[im.K_NAME], im.NO_CAUSE)
    return end + stall


@inline
def issue_mma(m: Machine, p: Program, st: State, g: int, a: int, sm: int, row: IntArray, now: int) -> None:
    """Queue one MMA instruction on the tensor core of this SM (and of the peer, for a pair)."""
    ranks = m.cluster if row[im.M_PAIR] == 1 else 1
    start = now
    first = 0 if ranks > 1 else sm
    for r in range(first, first + ranks):
        start = max(start, st.sm[g, r, im.P_TENSOR])
    extra = 0
    for r in range(first, first + ranks):
        settle(m, st, g, r, now)
        unit = st.sm[g, r]
        extra = max(extra, max(0, unit[OWED]) + unit[STOPPED])
        unit[STOPPED] = 0
        unit[OWED] = min(0, unit[OWED]) if row[im.M_ABSORB] > 0 else 0
        unit[ABSORBED] = row[im.M_ABSORB]
    end = start + row[im.M_TICKS] + extra
    agent = st.agent[g, a]
    k = agent[MMAS] % ENDS
    if len(st.traced) > 0:
        st.mma_slices[g, a, k] = im.NO_CAUSE
    for r in range(first, first + ranks):
        st.sm[g, r, im.P_TENSOR] = st.sm[g, r, MMA_UNTIL] = end
        count(st, row[im.K_ACTIVITY], start, 1)
        if len(st.traced) > 0:
            issued = st.slices[g, a, LAST_SLICE]
            kept = record(m, p, st, g, a, m.agents, start, end, UNIT_SLICE, row[im.K_NAME], a % m.agents, r, issued)
            st.mma_slices[g, a, k, r] = st.sm[g, r, HELD_BY + im.P_TENSOR] = kept
    agent[MMA_ENDS + k] = end
    agent[MMAS] += 1


@inline
def commit_mma(m: Machine, st: State, g: int, a: int, sm: int, row: IntArray, now: int) -> None:
    """Close a group of MMA instructions and let it arrive at its barrier when it is complete."""
    agent = st.agent[g, a]
    k = agent[MMAS] - 1
    done = now
    if k >= 0:
        done = max(now, agent[MMA_ENDS + k % ENDS] + row[im.M_DRAIN])
        if len(st.traced) > 0:
            group = GROUP_SLICES + agent[COMMITS] % GROUPS_KEPT
            st.mma_slices[g, a, group, sm] = st.mma_slices[g, a, k % ENDS, sm]
    agent[GROUP_ENDS + agent[COMMITS] % GROUPS_KEPT] = done
    agent[COMMITS] += 1
    if row[im.M_BAR] < 0:
        return
    bar = next_barrier(agent, row)
    first, ranks = (0, m.cluster) if row[im.M_PAIR] == 1 else (sm, 1)
    for r in range(first, first + ranks):
        cause = im.NO_CAUSE
        if len(st.traced) > 0:
            cause = st.mma_slices[g, a, k % ENDS, r] if done > now else st.slices[g, a, LAST_SLICE]
        push(st, g, done, arrival(m, st, g, r * m.slots + a // m.agents % m.slots, bar, cause))


@jit
def issue_copy(m: Machine, p: Program, st: State, ms: mem.MemoryState, g: int, a: int, row: IntArray, now: int) -> int:
    """Issue a copy; returns when the agent can go on. Its completion is pushed or remembered."""
    agent = st.agent[g, a]
    c = a // m.agents
    sm = c // m.slots
    tensor, nbytes, kind = row[im.C_TENSOR], row[im.C_BYTES], row[im.C_KIND]
    nth = COUNTS + m.counters + tensor
    line = p.line_base[tensor] + p.tiles[agent[ROW], row[im.C_COLUMN]] + row[im.C_STEP] * agent[nth]
    agent[nth] += 1
    if line < p.line_base[tensor] or line >= p.line_end[tensor]:
        st.scalars[STATUS], st.scalars[FAULT] = BAD_LINE, row[im.K_NAME]
        return now
    start = now
    threads = row[im.C_ENGINE] == 1
    if not threads:
        start = max(now, st.sm[g, sm, TMA_FREE])
        st.sm[g, sm, TMA_FREE] = start + row[im.C_ISSUE]
    hbm_bytes = ms.scalars[mem.HBM_READ] + ms.scalars[mem.HBM_WRITE]
    receivers = m.cluster if row[im.C_MULTICAST] == 1 else 1
    done = mem.access(m, ms, start, line, nbytes, kind, g, receivers, not threads)
    hbm_bytes = ms.scalars[mem.HBM_READ] + ms.scalars[mem.HBM_WRITE] - hbm_bytes
    count(st, st.bins.shape[1] - 1, start, (hbm_bytes * m.hbm_rate) >> im.RATE_SHIFT)
    count(st, row[im.K_ACTIVITY], start, 1)
    into_sm = (nbytes * m.ingress_rate) >> im.RATE_SHIFT
    go_on = start + row[im.C_ISSUE]
    if kind != im.LOAD:
        out = max(start, st.sm[g, sm, EGRESS_FREE]) + ((nbytes * m.egress_rate) >> im.RATE_SHIFT)
        st.sm[g, sm, EGRESS_FREE] = out
        done = max(out, done) + m.store_latency
        spend_issue(m, p, st, g, a, row, now, start)
        if done > agent[STORES_DONE]:
            agent[STORES_DONE] = done
            if len(st.traced) > 0:
                st.slices[g, a, STORE_SLICE] = st.slices[g, a, LAST_SLICE]
        return go_on
    latency = m.thread_latency if threads else m.tma_latency
    first, ranks = sm, 1
    if row[im.C_MULTICAST] == 1:
        first, ranks = 0, m.cluster
        latency += m.multicast_latency
    done += into_sm
    for r in range(first, first + ranks):
        st.sm[g, r, INGRESS_FREE] = max(start, st.sm[g, r, INGRESS_FREE]) + into_sm
        done = max(done, st.sm[g, r, INGRESS_FREE])
    done += latency
    bar = next_barrier(agent, row) if row[im.M_BAR] >= 0 else -1
    for r in range(first, first + ranks):
        cause = im.NO_CAUSE
        if len(st.traced) > 0:
            until, issued = st.sm[g, r, INGRESS_FREE], st.slices[g, a, LAST_SLICE]
            cause = record(m, p, st, g, a, m.agents + 1, until - into_sm, until, UNIT_SLICE, row[im.K_NAME], a % m.agents, r, issued)  # fmt: skip  # noqa: E501
        if bar >= 0:
            push(st, g, done, arrival(m, st, g, r * m.slots + c % m.slots, bar, cause))
        elif r == sm and done > agent[LOADS_DONE]:
            agent[LOADS_DONE] = done
            if len(st.traced) > 0:
                st.slices[g, a, LOAD_SLICE] = cause
    spend_issue(m, p, st, g, a, row, now, start)
    return go_on


@inline
def spend_issue(m: Machine, p: Program, st: State, g: int, a: int, row: IntArray, now: int, start: int) -> None:
    """Charge the issue of a copy that was asked for at ``now`` and began at ``start``."""
    sm = a // m.agents // m.slots
    cause = im.NO_CAUSE
    if len(st.traced) > 0 and start > now:
        cause = st.sm[g, sm, TMA_HELD_BY]
    spend(m, p, st, g, a, now, start + row[im.C_ISSUE], R_ISSUE, row[im.K_NAME], cause)
    if len(st.traced) > 0 and row[im.C_ENGINE] == 0:
        st.sm[g, sm, TMA_HELD_BY] = st.slices[g, a, LAST_SLICE]


@jit
def take_tile(m: Machine, p: Program, st: State, g: int, a: int, row: IntArray, now: int) -> bool:
    """Take the agent's next work tile or leave the tile loop. False: it blocks on the scheduler."""
    agent = st.agent[g, a]
    c = a // m.agents
    slot = c % m.slots
    j = agent[SEQUENCE]
    drawn = st.slot[g, slot]
    cluster = drawn[CLUSTER]
    if m.mode == im.SINGLE:
        tile = cluster if j == 0 else m.cluster_tiles
    elif m.mode == im.STATIC:
        tile = cluster + j * m.grid
    else:
        if j >= drawn[DRAWS]:
            if row[im.T_DRAWS] == 0 or c // m.slots != 0:
                agent[BLOCKED] = ON_TILE
                agent[SINCE] = now
                agent[REASON] = R_FULL
                agent[WAITS_IN] = agent[PC]
                return False
            tile = cluster if j == 0 else st.scalars[NEXT_TILE]
            if j > 0:
                st.scalars[NEXT_TILE] += 1
            for other in range(m.cluster * m.slots * m.agents):
                peer = st.agent[g, other]
                in_slot = other // m.agents % m.slots == slot
                if in_slot and peer[DONE_AT] == RUNNING and peer[SEQUENCE] + DRAWN <= j:
                    st.scalars[STATUS], st.scalars[FAULT] = APART, row[im.K_NAME]
            drawn[TILES + j % DRAWN] = tile
            drawn[DRAWS] = j + 1
            for rank in range(m.cluster):
                base = (rank * m.slots + slot) * m.agents
                for other in range(base, base + m.agents):
                    if st.agent[g, other, BLOCKED] == ON_TILE:
                        st.agent[g, other, BLOCKED] = FREE
                        if len(st.traced) > 0:
                            st.slices[g, other, RELEASED_BY] = st.slices[g, a, LAST_SLICE]
                        push(st, g, now + m.named_wake, other)
        tile = drawn[TILES + j % DRAWN]
    if tile >= m.cluster_tiles:
        agent[PC] = row[im.T_EXIT]
        agent[ROW] = agent[ITERATION] = -1
    else:
        agent[PC] += 1
        agent[ROW] = tile * m.cluster + c // m.slots
        agent[SEQUENCE] = j + 1
        agent[COUNTS + m.counters :] = 0
    return True


@jit
def end_role(m: Machine, p: Program, st: State, g: int, a: int, now: int) -> None:
    """An agent reached its end; the last one of a cluster frees the slot for the next CTA."""
    st.agent[g, a, DONE_AT] = now
    slot = (a // m.agents) % m.slots
    st.slot[g, slot, ALIVE] -= 1
    st.scalars[LAST] = max(st.scalars[LAST], now)
    if st.slot[g, slot, ALIVE] > 0:
        return
    cluster = st.scalars[NEXT_CTA]
    if cluster < m.grid:
        st.scalars[NEXT_CTA] = cluster + 1
        start_cta(m, p, st, g, slot, cluster, now, now + m.turnover)
    else:
        st.slot[g, slot, CLUSTER] = -1
        st.scalars[FULL_UNTIL] = min(st.scalars[FULL_UNTIL], now)
