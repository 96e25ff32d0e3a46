"""The lowered image: a program and a machine as flat integers, all an engine knows.

``docs/semantics.md`` says what each instruction does. Times are ticks, ``TICKS`` to an SM cycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Ticks per SM cycle. Fine enough for tenths of a cycle (4.4, 10.7) without rounding drift.
TICKS = 64

IntArray = npt.NDArray[np.int64]

# Servers of one SM. WORK reserves them; TENSOR and SMEM are also charged by MMA.
PIPES: tuple[str, ...] = ("issue", "fma", "alu", "mufu", "lsu", "smem", "tmem", "port", "tensor")
P_ISSUE, P_FMA, P_ALU, P_MUFU, P_LSU, P_SMEM, P_TMEM, P_PORT, P_TENSOR = range(len(PIPES))

# Instruction kinds; operands are columns of ``Image.code`` named below.
WORK, MMA, WAIT_MMA, COPY, WAIT_COPY, ARRIVE, WAIT, DELAY, LOOP, END_LOOP, TILE, END_TILE, END = range(13)

# code[pc] = [kind, name, operands...]
K_KIND, K_NAME = 0, 1
# WORK: chunks of one demand row, then an exposed latency (without, with an MMA beside it)
W_DEMAND, W_CHUNKS, W_LATENCY, W_LATENCY_BESIDE = 2, 3, 4, 5
# MMA
M_TICKS, M_COUNT, M_INTERVAL, M_DEPTH, M_DRAIN, M_PAIR, M_ABSORB = range(2, 9)
M_BAR, M_STAGES, M_COUNTER = 10, 11, 12
# COPY (M_BAR, M_STAGES, M_COUNTER too: the barrier a load completes at, -1 for none)
C_TENSOR, C_BYTES, C_KIND, C_ISSUE, C_MULTICAST, C_COLUMN, C_STEP, C_ENGINE = range(2, 10)
LOAD, STORE, REDUCE = 0, 1, 2
# WAIT_MMA / WAIT_COPY: operand 2 is the number of pending groups / the copy kind
# ARRIVE, WAIT: M_BAR, M_STAGES, M_COUNTER and
B_SCOPE = 2
SCOPE_CTA, SCOPE_CLUSTER, SCOPE_LEADER = 0, 1, 2
B_AHEAD, B_REASON, B_TRY, B_WAKE = 2, 3, 4, 5
# DELAY
D_TICKS, D_REASON = 2, 3
# LOOP, END_LOOP, TILE, END_TILE
L_COLUMN, L_TRIPS, L_EXIT, L_DEPTH = 2, 3, 4, 5
T_EXIT, T_DRAWS = 2, 3
# WORK, MMA, COPY: row of ``Image.activity`` that one chunk, instruction or copy adds to the histogram
K_ACTIVITY = 13
CODE_WIDTH = 14

SINGLE, STATIC, DYNAMIC = 0, 1, 2


#: Equally likely latencies of the slowest line of a copy from HBM, and the bytes of it that draw one together.
MISS_DRAWS, MISS_BYTES = 10, 16384


class Machine(NamedTuple):
    """Scalars of the machine and the grid, in ticks and bytes."""

    groups: int  # clusters' homes: groups of `cluster` SMs that share nothing with each other but memory
    cluster: int  # CTAs per cluster = SMs per group
    slots: int  # CTAs per SM
    agents: int  # role instances per CTA
    barriers: int  # per CTA
    counters: int  # ring counters per agent
    tensors: int
    mode: int  # SINGLE, STATIC or DYNAMIC
    grid: int  # clusters launched
    cluster_tiles: int  # work tiles / cluster
    ramp: int  # launch to the first CTA
    dispatch: int  # between two CTAs of the distributor
    turnover: int  # end of a CTA to the start of the next in its slot
    remote_latency: int  # an arrival at a barrier of another CTA of the cluster
    named_wake: int  # waking a role that waits for a drawn tile
    tma_latency: int  # L2 hit, size term apart
    thread_latency: int  # the same for copies issued by threads (cp.async, ld.global)
    store_latency: int
    multicast_latency: int
    miss_latency: int  # what an L2 miss adds
    ingress_rate: int  # ticks per 2**20 bytes into one SM
    egress_rate: int  # the same out of it (TMA stores)
    l2_rate: int  # ticks per 2**20 bytes, chip
    reduce_rate: int
    hbm_rate: int
    l2_bytes: int  # capacity
    l2_partitions: int  # an SM group is on the side of one of them
    l2_coalescers: int  # an SM group loads through one of them, if there are any
    mma_ahead: int  # an MMA stream can have absorbed in advance what it absorbs in this time


RATE_SHIFT = 20
#: The MMA operand M_ABSORB is in units of 2**-FRACTION_SHIFT.
FRACTION_SHIFT = 10


@dataclass(frozen=True)
class Image:
    """A program lowered onto a machine.

    ``demand[i, s, p]``: ticks that one chunk of demand ``i`` takes on pipe ``p``, with (s=1) and
    without (s=0) an MMA running beside it; ``mma_delay[i]``: ticks by which it
    delays that MMA where nothing is absorbed, ``mma_stop[i]``: ticks that no MMA absorbs;
    ``stall[i, s]``: ticks a role loses to result latencies in a chunk, during which others may use the pipes.
    ``activity[i, u]``: ticks unit ``u`` works for one occurrence of activity ``i``.
    ``entry[a]`` is the first instruction of agent ``a``, ``need[b]`` the arrivals per phase of
    barrier ``b``. ``tiles[row, column]``: trip counts and first lines of a work tile.
    ``line_base[t]`` and ``line_end[t]``: first L2 line of tensor ``t``, and one past its last.
    ``slowest_line``: ticks by which the slowest line of MISS_BYTES by TMA is later; MISS_DRAWS equally likely values.
    """

    machine: Machine
    code: IntArray
    demand: IntArray
    mma_delay: IntArray
    mma_stop: IntArray
    stall: IntArray
    activity: IntArray
    entry: IntArray
    need: IntArray
    tiles: IntArray
    line_base: IntArray
    line_end: IntArray
    slowest_line: IntArray
    lines: int
    names: tuple[str, ...]
    phases: tuple[str, ...]  # of each name, "" for none
    agents: tuple[str, ...]  # track names, "consumer0"
    agent_role: tuple[str, ...]
    barriers: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass
class RawResult:
    """What an engine returns; integers only, so that two engines can be compared exactly.

    ``bins[k, i]``: occurrences of activity ``i`` that start in time bin ``k`` of width
    ``2**bin_shift`` ticks, summed over SMs; the last column is ticks of HBM. ``stalls[a, r]``: ticks agent ``a`` spent
    in reason ``r``, summed over its instances in the grid. ``memory``: see ``engine.memory.COUNTERS``.
    ``trace[n, TRACE_COLUMNS]``, sorted; T_CAUSE is the row of the slice that released this one.
    """

    ticks: int
    stalls: IntArray
    memory: IntArray
    bins: IntArray
    bin_shift: int
    full_from: int  # ticks: the last first-CTA has started
    full_until: int  # ticks: the first CTA slot ran out of work
    events: int
    trace: IntArray
    truncated: bool


T_START, T_END, T_SM, T_SLOT, T_TRACK, T_NAME, T_KIND, T_TILE, T_ITER, T_OWNER, T_CAUSE = range(11)
TRACE_COLUMNS = 11
#: T_CAUSE: no slice released this one, or it was not kept.
NO_CAUSE = -1

# Units of the busy histogram: the pipes, then these.
U_TMA, U_L2, U_HBM = len(PIPES), len(PIPES) + 1, len(PIPES) + 2
UNIT_COUNT = len(PIPES) + 3
#: Bins of the busy histogram; its width doubles when a run outgrows it.
BINS = 256
FIRST_BIN_SHIFT = 14
