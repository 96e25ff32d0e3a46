"""What the compiled engine works on: its state and an image's arrays, as tuples of integer arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fasim import image as im
from fasim.engine.common import SCHEDULER, TraceWindow
from fasim.image import Image, IntArray
from fasim.run import REASONS

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

# Columns of State.debt: ticks owed (negative: absorbed in advance), as of when, the running MMA's M_ABSORB
OWED, AS_OF, ABSORBED = range(3)
DEBT_FIELDS = 3

# State.scalars
NEXT_CTA, NEXT_TILE, EVENTS, FULL_FROM, FULL_UNTIL, TRACED, TRUNCATED, BIN_SHIFT, STATUS, LAST = range(10)
OK, OVERFLOW = 0, 1
NEVER = 2**62


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
    mma_delay: Any
    stall: Any
    entry: Any
    need: Any
    tiles: Any
    line_base: Any
    trace_from: int
    trace_until: int


def new_state(image: Image, window: TraceWindow) -> State:
    """Idle SMs at tick zero, and room for the slices that ``window`` keeps."""
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
    return st


def new_program(image: Image, window: TraceWindow) -> Program:
    """The arrays of ``image``, and the ticks that ``window`` keeps."""
    return Program(
        image.code, image.demand, image.mma_delay, image.stall, image.entry, image.need, image.tiles, image.line_base, *window.ticks
    )
