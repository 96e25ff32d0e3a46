"""What the compiled engine writes down as it goes: the busy histogram, stall times and trace slices."""

from __future__ import annotations

from fasim.engine import image as im
from fasim.engine.cache import inline, jit
from fasim.engine.image import IntArray, Machine
from fasim.engine.state import BIN_SHIFT, HELD_BY, ITERATION, LAST_SLICE, ROW, TRACED, TRUNCATED, Program, State


@inline
def count(st: State, activity: int, start: int, amount: int) -> None:
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


@inline
def record(m: Machine, p: Program, st: State, g: int, a: int, track: int, start: int, end: int, kind: int, name: int, owner: int, sm: int, cause: int) -> int:  # fmt: skip  # noqa: E501
    """Keep a slice of one track, if the trace window wants it. Returns its row, NO_CAUSE if it is not kept."""
    if st.trace_sms[g * m.cluster + sm] == 1 and end > start and end > p.trace_from and start < p.trace_until:
        return _keep(m, st, g, a, track, start, end, kind, name, owner, sm, cause)
    return im.NO_CAUSE


@jit
def _keep(m: Machine, st: State, g: int, a: int, track: int, start: int, end: int, kind: int, name: int, owner: int, sm: int, cause: int) -> int:  # fmt: skip  # noqa: E501
    n = st.scalars[TRACED]
    if n >= st.trace.shape[0]:
        st.scalars[TRUNCATED] = 1
        return im.NO_CAUSE
    row = st.trace[n]
    row[im.T_START], row[im.T_END] = start, end
    row[im.T_SM] = g * m.cluster + sm
    row[im.T_SLOT] = (a // m.agents) % m.slots
    row[im.T_TRACK], row[im.T_NAME], row[im.T_KIND] = track, name, kind
    row[im.T_TILE], row[im.T_ITER] = st.agent[g, a, ROW], st.agent[g, a, ITERATION]
    row[im.T_OWNER], row[im.T_CAUSE] = owner, cause
    st.scalars[TRACED] = n + 1
    return int(n)


@inline
def spend(m: Machine, p: Program, st: State, g: int, a: int, start: int, end: int, reason: int, name: int, cause: int) -> None:  # fmt: skip  # noqa: E501
    """Charge an agent's time to a reason; ``cause`` is the slice that ended it."""
    if end > start:
        st.stalls[a % m.agents, reason] += end - start
        if len(st.traced) > 0:
            sm = a // m.agents // m.slots
            st.slices[g, a, LAST_SLICE] = record(m, p, st, g, a, a % m.agents, start, end, reason, name, -1, sm, cause)


@jit
def holder(unit: IntArray, demand: IntArray, end: int) -> int:
    """The slice that had the pipe which let a chunk end at ``end``."""
    for pipe in range(demand.shape[0]):
        if demand[pipe] > 0 and unit[pipe] == end:
            return int(unit[HELD_BY + pipe])
    return im.NO_CAUSE


@jit
def hold(unit: IntArray, demand: IntArray, held_by: int) -> None:
    """Note which slice has the pipes of a chunk."""
    for pipe in range(demand.shape[0]):
        if demand[pipe] > 0:
            unit[HELD_BY + pipe] = held_by
