"""What the compiled engine works on: its state and an image's arrays, as tuples of integer arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fasim.engine import image as im
from fasim.engine.common import SCHEDULER, TraceWindow
from fasim.engine.image import Image, IntArray
from fasim.results.reasons import REASONS

R_WORK, R_ISSUE, R_PIPE, R_DEPENDENCY, R_BARRIER, R_FULL, R_EMPTY, R_MEMORY, R_LAUNCH, R_TAIL = range(10)
assert len(REASONS) == 10

ENDS = 32  # completion times remembered per agent; at least the depth of the MMA queue
GROUPS_KEPT = 8  # committed MMA groups remembered per agent
LOOPS = 4  # nested at most
DRAWN = 8  # tiles a CTA's roles may be apart

# Columns of State.agent
(
    PC, PROGRESS, ROW, SEQUENCE, MMAS, COMMITS, LOADS_DONE, STORES_DONE,
    BLOCKED, NEEDED, SINCE, REASON, WAITS_IN, DONE_AT, ITERATION,
) = range(15)  # fmt: skip
LEFT = 15  # + loop depth: trips left
MMA_ENDS = LEFT + LOOPS  # + k % ENDS: end of MMA instruction k
GROUP_ENDS = MMA_ENDS + ENDS  # + k % GROUPS_KEPT: completion of MMA group k
COUNTS = GROUP_ENDS + GROUPS_KEPT  # + ring counter
# then, from COUNTS + Machine.counters, the copies of each tensor in this tile

# Columns of State.slices: rows of the trace, NO_CAUSE where they are not kept: the agent's last slice; the load done at
# LOADS_DONE; the issue of the store done at STORES_DONE; what ended the agent's wait
LAST_SLICE, LOAD_SLICE, STORE_SLICE, RELEASED_BY = range(4)
# Rows of State.mma_slices: k % ENDS for MMA instruction k, and GROUP_SLICES + k % GROUPS_KEPT for the last of group k
GROUP_SLICES = ENDS

FREE = -1  # BLOCKED: not blocked
ON_TILE = SCHEDULER  # BLOCKED: waits for the scheduler
NOT_STARTED = -1  # DONE_AT before the CTA's first start
RUNNING = -2

# Columns of State.sm: the next free tick of each pipe, then until when the tensor core runs asynchronous
# MMAs, the delay that the next MMA instruction pays (ticks owed, negative: absorbed in advance; as of
# when; the running MMA's M_ABSORB; and what nothing absorbs), and the next free tick of the TMA and of the ways
# into and out of shared memory.
(
    MMA_UNTIL, OWED, AS_OF, ABSORBED, STOPPED, TMA_FREE, INGRESS_FREE, EGRESS_FREE,
) = range(len(im.PIPES), len(im.PIPES) + 8)  # fmt: skip
SM_FIELDS = len(im.PIPES) + 8
# and, where a trace is kept, the slice that holds each pipe and the one in which the TMA was given its last copy
HELD_BY = SM_FIELDS
TMA_HELD_BY = HELD_BY + len(im.PIPES)
TRACED_SM_FIELDS = TMA_HELD_BY + 1

# Columns of State.barrier: arrivals in the current phase, completed phases
ARRIVED, PHASES = range(2)

# Columns of State.slot: the cluster in it (-1: idle), agents not yet at their end, tiles drawn and, at
# TILES + j % DRAWN, the last of them
CLUSTER, ALIVE, DRAWS, TILES = range(4)

# Columns of State.heap; the target is an agent or, as a negative number, an arrival (:func:`instructions.arrival`)
TIME, SERIAL, TARGET = range(3)

# Columns of State.group: events in its heap, events ever pushed; when and which agent wants a global
# operation (NEVER: the group is done; agent -1: it has not begun)
SIZE, PUSHED, WANTS_AT, WANTS_AGENT = range(4)
NEVER = 2**62

# State.scalars
NEXT_CTA, NEXT_TILE, EVENTS, FULL_FROM, FULL_UNTIL, TRACED, TRUNCATED, BIN_SHIFT, STATUS, LAST, FAULT = range(11)
# STATUS; FAULT is the name of the instruction that a status other than OK is about
OK, OVERFLOW, BAD_LINE, APART = range(4)


#: Bits of an arrival's barrier in a target; above them is the slice behind the arrival, one of at most MOST_SLICES.
ARRIVAL_BITS = 36
MOST_SLICES = 2**26


class State(NamedTuple):
    """Everything that changes, in few arrays: each one costs time to compile and registers to pass.

    ``g`` is a group, ``a`` an agent within it, ``c`` a CTA within it.
    """

    agent: Any  # (g, a, COUNTS + counters + tensors)
    sm: Any  # (g, SM of the group, SM_FIELDS or TRACED_SM_FIELDS)
    barrier: Any  # (g, c, barriers, 2)
    slot: Any  # (g, CTA slot, TILES + DRAWN)
    heap: Any  # (g, capacity, 3) agenda of the group
    group: Any  # (g, 4)
    order: Any  # (g,) agenda of groups
    scalars: Any
    bins: Any  # (BINS, activities + 1)
    stalls: Any  # (agents per CTA, reasons)
    #: () or (1,), and so a part of the type: an engine that keeps no trace is compiled without the code for one.
    traced: Any
    trace: Any  # (slices kept, TRACE_COLUMNS)
    trace_sms: Any  # (sm_count,) 0/1
    slices: Any  # (g, a, 4) where traced
    mma_slices: Any  # (g, a, ENDS + GROUPS_KEPT, SM of the group) where traced


class Program(NamedTuple):
    """The image's arrays."""

    code: Any
    demand: Any
    mma_delay: Any
    mma_stop: Any
    stall: Any
    entry: Any
    need: Any
    tiles: Any
    line_base: Any
    line_end: Any
    trace_from: int
    trace_until: int


def new_state(image: Image, window: TraceWindow) -> State:
    """Idle SMs at tick zero, and room for the slices that ``window`` keeps."""
    m = image.machine
    agents = m.cluster * m.slots * m.agents
    ctas = m.cluster * m.slots
    traced = window.limit > 0
    events = agents + int(image.need.sum()) * ctas + 8 * ctas

    def zeros(*shape: int) -> IntArray:
        return np.zeros(shape, dtype=np.int64)

    st = State(
        agent=zeros(m.groups, agents, COUNTS + m.counters + m.tensors),
        sm=zeros(m.groups, m.cluster, TRACED_SM_FIELDS if traced else SM_FIELDS),
        barrier=zeros(m.groups, ctas, m.barriers, 2),
        slot=zeros(m.groups, m.slots, TILES + DRAWN),
        heap=zeros(m.groups, events, 3),
        group=zeros(m.groups, 4),
        order=np.arange(m.groups, dtype=np.int64),
        scalars=zeros(11),
        bins=zeros(im.BINS, len(image.activity) + 1),
        stalls=zeros(m.agents, len(REASONS)),
        traced=(1,) if traced else (),
        trace=zeros(min(window.limit, MOST_SLICES), im.TRACE_COLUMNS),
        trace_sms=zeros(m.groups * m.cluster),
        slices=zeros(m.groups, agents if traced else 0, 4),
        mma_slices=zeros(m.groups, agents if traced else 0, ENDS + GROUPS_KEPT, m.cluster),
    )
    st.sm[:, :, SM_FIELDS:] = im.NO_CAUSE
    st.agent[:, :, DONE_AT] = NOT_STARTED
    st.slot[:, :, CLUSTER] = -1
    st.group[:, WANTS_AT] = NEVER
    st.group[:, WANTS_AGENT] = -1
    st.scalars[FULL_UNTIL] = NEVER
    st.scalars[BIN_SHIFT] = im.FIRST_BIN_SHIFT
    for sm in window.sms:
        if sm < len(st.trace_sms):
            st.trace_sms[sm] = 1
    return st


def new_program(image: Image, window: TraceWindow) -> Program:
    """The arrays of ``image``, and the ticks that ``window`` keeps."""
    return Program(
        image.code,
        image.demand,
        image.mma_delay,
        image.mma_stop,
        image.stall,
        image.entry,
        image.need,
        image.tiles,
        image.line_base,
        image.line_end,
        *window.ticks,
    )
