"""L2 and HBM as both engines see them: plain functions on integer arrays.

The L2 holds lines (one copy's worth of a tensor each) in exact LRU order up to its capacity. Chip
bandwidths are first-come first-served servers: a request reserves the next free interval. A line
that is still on its way from HBM is a hit that waits for it (a request is never sent twice).

``register_jitable`` lets the same text run as Python in the reference engine and be compiled into
the other one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from fasim.image import RATE_SHIFT, REDUCE, STORE, IntArray, Machine

# Indices of MemoryState.scalars: the servers' next free tick, LRU ends, and byte counters.
L2_FREE, HBM_FREE, LRU_HEAD, LRU_TAIL, USED = range(5)
L2_READ, L2_WRITE, HBM_READ, HBM_WRITE, HITS, MISSES = range(5, 11)
SCALARS = 11
COUNTERS = ("l2_read_bytes", "l2_write_bytes", "hbm_read_bytes", "hbm_write_bytes", "hits", "misses")

ABSENT = -1


class MemoryState(NamedTuple):
    """Arrays of shape ``(lines,)`` and the scalars above."""

    ready: IntArray  # tick at which the line is in L2, ABSENT when it is not resident
    size: IntArray  # bytes
    newer: IntArray  # LRU list towards the most recently used
    older: IntArray
    scalars: IntArray


def new_memory(lines: int) -> MemoryState:
    """An empty L2 for ``lines`` distinct lines."""
    scalars = np.zeros(SCALARS, dtype=np.int64)
    scalars[LRU_HEAD] = scalars[LRU_TAIL] = -1
    full = [np.full(max(1, lines), value, dtype=np.int64) for value in (ABSENT, 0, -1, -1)]
    return MemoryState(full[0], full[1], full[2], full[3], scalars)


def next_launch(m: MemoryState) -> None:
    """Start a new launch on the same chip: what is in L2 stays, clocks and counters begin at zero."""
    m.ready[m.ready != ABSENT] = 0
    m.scalars[[L2_FREE, HBM_FREE, *range(L2_READ, SCALARS)]] = 0


@register_jitable
def _unlink(m: MemoryState, line: int) -> None:
    newer, older = m.newer[line], m.older[line]
    if newer >= 0:
        m.older[newer] = older
    else:
        m.scalars[LRU_HEAD] = older
    if older >= 0:
        m.newer[older] = newer
    else:
        m.scalars[LRU_TAIL] = newer


@register_jitable
def _make_newest(m: MemoryState, line: int) -> None:
    head = m.scalars[LRU_HEAD]
    m.newer[line] = -1
    m.older[line] = head
    if head >= 0:
        m.newer[head] = line
    else:
        m.scalars[LRU_TAIL] = line
    m.scalars[LRU_HEAD] = line


@register_jitable
def _insert(m: MemoryState, line: int, nbytes: int, ready: int, capacity: int) -> None:
    while m.scalars[USED] + nbytes > capacity and m.scalars[LRU_TAIL] >= 0:
        victim = m.scalars[LRU_TAIL]
        _unlink(m, victim)
        m.ready[victim] = ABSENT
        m.scalars[USED] -= m.size[victim]
    m.ready[line] = ready
    m.size[line] = nbytes
    m.scalars[USED] += nbytes
    _make_newest(m, line)


@register_jitable
def access(machine: Machine, m: MemoryState, now: int, line: int, nbytes: int, kind: int) -> int:
    """Serve one request at tick ``now``; returns the tick at which L2 has sent or taken the data.

    Latencies of the way to and from the SM are the caller's. Writes take L2 bandwidth, become
    resident, and take HBM bandwidth for their write-back, which delays the writer once a whole L2 is
    waiting to be written.
    """
    s = m.scalars
    rate = machine.reduce_rate if kind == REDUCE else machine.l2_rate
    start = max(now, s[L2_FREE])
    s[L2_FREE] = start + ((nbytes * rate) >> RATE_SHIFT)
    done = s[L2_FREE]
    resident = m.ready[line] != ABSENT
    if kind in (STORE, REDUCE):
        s[L2_WRITE] += nbytes
        if resident:
            _unlink(m, line)
            _make_newest(m, line)
        else:
            s[HBM_WRITE] += nbytes
            s[HBM_FREE] = max(now, s[HBM_FREE]) + ((nbytes * machine.hbm_rate) >> RATE_SHIFT)
            _insert(m, line, nbytes, done, machine.l2_bytes)
        # L2 can hold what HBM has not taken yet, but no more than its capacity
        return max(done, s[HBM_FREE] - ((machine.l2_bytes * machine.hbm_rate) >> RATE_SHIFT))
    s[L2_READ] += nbytes
    if resident:
        s[HITS] += 1
        _unlink(m, line)
        _make_newest(m, line)
    else:
        s[MISSES] += 1
        s[HBM_READ] += nbytes
        s[HBM_FREE] = max(now, s[HBM_FREE]) + ((nbytes * machine.hbm_rate) >> RATE_SHIFT)
        _insert(m, line, nbytes, s[HBM_FREE] + machine.miss_latency, machine.l2_bytes)
    return max(done, m.ready[line])
