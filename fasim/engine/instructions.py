"""What single instructions do in the compiled engine; ``compiled.py`` decides which one runs when."""

from __future__ import annotations

from fasim import image as im
from fasim.engine import memory as mem
from fasim.engine.account import count, record, spend
from fasim.engine.agenda import push
from fasim.engine.cache import inline, jit
from fasim.engine.state import (
    ABSORBED,
    AS_OF,
    BLOCKED,
    DONE_AT,
    DRAWN,
    ENDS,
    FREE,
    FULL_UNTIL,
    ITERATION,
    LAST,
    LOADS_DONE,
    MMAS,
    NEEDED,
    NEXT_CTA,
    NEXT_TILE,
    ON_TILE,
    OWED,
    PC,
    R_DEPENDENCY,
    R_FULL,
    R_LAUNCH,
    R_PIPE,
    R_TAIL,
    R_WORK,
    REASON,
    ROW,
    RUNNING,
    SEQUENCE,
    SINCE,
    STORES_DONE,
    WAITS_IN,
    Program,
    State,
)
from fasim.image import IntArray, Machine
from fasim.run import UNIT_SLICE


@inline
def arrive(m: Machine, p: Program, st: State, g: int, c: int, bar: int, now: int) -> None:
    """One arrival at barrier ``bar`` of CTA ``c``; a completed phase wakes its waiters in agent order."""
    st.arrived[g, c, bar] += 1
    if st.arrived[g, c, bar] < p.need[bar]:
        return
    st.arrived[g, c, bar] = 0
    st.phases[g, c, bar] += 1
    for a in range(c * m.agents, (c + 1) * m.agents):
        if st.agent[g, a, BLOCKED] == bar and st.agent[g, a, NEEDED] <= st.phases[g, c, bar]:
            st.agent[g, a, BLOCKED] = FREE
            push(st, g, now + p.code[st.agent[g, a, WAITS_IN], im.B_WAKE], a)


@jit
def start_cta(m: Machine, p: Program, st: State, g: int, slot: int, cluster: int, now: int, when: int) -> None:
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
            push(st, g, when, a)


@inline
def settle(m: Machine, st: State, g: int, sm: int, now: int) -> None:
    """Let the running MMA absorb debt since it was last looked at."""
    debt = st.debt[g, sm]
    absorbed = ((now - debt[AS_OF]) * debt[ABSORBED]) >> im.FRACTION_SHIFT
    debt[OWED] = max(-m.mma_credit, debt[OWED] - absorbed)
    debt[AS_OF] = now


@inline
def work_chunk(m: Machine, p: Program, st: State, g: int, a: int, sm: int, row: IntArray, now: int) -> int:
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
    count(st, row[im.K_ACTIVITY], now, 1)
    if beside == 1 and p.mma_delay[i] > 0:
        settle(m, st, g, sm, now)
        st.debt[g, sm, OWED] += p.mma_delay[i]
    spend(m, p, st, g, a, now, end - span, R_PIPE, row[im.K_NAME])
    spend(m, p, st, g, a, end - span, end, R_WORK, row[im.K_NAME])
    stall = p.stall[i, beside]
    spend(m, p, st, g, a, end, end + stall, R_DEPENDENCY, row[im.K_NAME])
    return end + stall


@inline
def issue_mma(m: Machine, p: Program, st: State, g: int, a: int, sm: int, row: IntArray, now: int) -> None:
    """Queue one MMA instruction on the tensor core of this SM (and of the peer, for a pair)."""
    ranks = m.cluster if row[im.M_PAIR] == 1 else 1
    start = now
    first = 0 if ranks > 1 else sm
    for r in range(first, first + ranks):
        start = max(start, st.free[g, r, im.P_TENSOR])
    extra = 0
    for r in range(first, first + ranks):
        settle(m, st, g, r, now)
        extra = max(extra, st.debt[g, r, OWED])
        st.debt[g, r, OWED] = min(0, st.debt[g, r, OWED])
        st.debt[g, r, ABSORBED] = row[im.M_ABSORB]
    end = start + row[im.M_TICKS] + extra
    for r in range(first, first + ranks):
        st.free[g, r, im.P_TENSOR] = end
        st.mma_until[g, r] = end
        count(st, row[im.K_ACTIVITY], start, 1)
        if st.trace.shape[0] > 0:
            record(m, p, st, g, a, m.agents, start, end, UNIT_SLICE, row[im.K_NAME], a % m.agents, r)
    k = st.agent[g, a, MMAS]
    st.ends[g, a, k % ENDS] = end
    st.agent[g, a, MMAS] = k + 1


@jit
def issue_copy(m: Machine, p: Program, st: State, ms: mem.MemoryState, g: int, a: int, row: IntArray, now: int) -> int:
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
    count(st, st.bins.shape[1] - 1, start, (hbm_bytes * m.hbm_rate) >> im.RATE_SHIFT)
    count(st, row[im.K_ACTIVITY], start, 1)
    into_sm = (nbytes * m.ingress_rate) >> im.RATE_SHIFT
    go_on = start + row[im.C_ISSUE]
    if kind != im.LOAD:
        out = (nbytes * m.egress_rate) >> im.RATE_SHIFT
        agent[STORES_DONE] = max(agent[STORES_DONE], start + out + m.store_latency)
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
            record(m, p, st, g, a, m.agents + 1, busy_from, busy_from + into_sm, UNIT_SLICE, row[im.K_NAME], a % m.agents, r)  # fmt: skip  # noqa: E501
    bar = row[im.M_BAR]
    if bar < 0:
        agent[LOADS_DONE] = max(agent[LOADS_DONE], done)
        return go_on
    n = st.count[g, a, row[im.M_COUNTER]]
    st.count[g, a, row[im.M_COUNTER]] = n + 1
    bar += n % row[im.M_STAGES]
    slot = c % m.slots
    for r in range(first, first + ranks):
        push(st, g, done, -1 - ((r * m.slots + slot) * m.barriers + bar))
    return go_on


@jit
def take_tile(m: Machine, p: Program, st: State, g: int, a: int, row: IntArray, now: int) -> bool:
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
                        push(st, g, now + m.named_wake, other)
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


@jit
def end_role(m: Machine, p: Program, st: State, g: int, a: int, now: int) -> None:
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
        start_cta(m, p, st, g, slot, cluster, now, now + m.turnover)
    else:
        st.cta[g, slot] = -1
        st.scalars[FULL_UNTIL] = min(st.scalars[FULL_UNTIL], now)
