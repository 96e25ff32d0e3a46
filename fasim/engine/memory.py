"""L2 and HBM as both engines see them: plain functions on integer arrays.

A *line* is what one copy moves of a tensor, 16 to 64 KiB, not the 128 bytes of hardware. The L2 holds lines in exact
LRU order up to its capacity, and writes back: HBM takes what was stored to a line when the line is displaced. Each
partition serves the SMs on its side. A line homed on the other side is copied here once a second SM reads it; the copy
takes capacity. In front of L2, coalescers merge loads of a line that SMs of their GPC ask for while the first one
waits.

Chip bandwidths are first-come first-served servers: a request reserves the next free interval. A line
that is still on its way from HBM is a hit that waits for it (a request is never sent twice). How long HBM takes to
answer differs from line to line; a copy by TMA is there when its slowest line is, while threads go on one by one. L2
sends a line to those who wait for it one after the other.

``register_jitable`` lets the same text run as Python in the reference engine and be compiled into
the other one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from fasim.engine.image import LOAD, MISS_BYTES, MISS_DRAWS, RATE_SHIFT, REDUCE, IntArray, Machine

# Indices of MemoryState.scalars: the servers' next free tick, LRU ends, and byte counters.
L2_FREE, HBM_FREE, LRU_HEAD, LRU_TAIL, USED = range(5)
L2_READ, L2_WRITE, HBM_READ, HBM_WRITE, L2_FAR, SM_READ, HITS, MISSES = range(5, 13)
SCALARS = 13
#: ``l2_far_bytes``: reads that one partition passes on to another; ``sm_read_bytes``: what arrives in SMs.
COUNTERS = (
    "l2_read_bytes",
    "l2_write_bytes",
    "hbm_read_bytes",
    "hbm_write_bytes",
    "l2_far_bytes",
    "sm_read_bytes",
    "hits",
    "misses",
)

ABSENT = -1
# MemoryState.reader where it is not the one SM group that has read the line from this side.
NOBODY, SEVERAL = -1, -2


class MemoryState(NamedTuple):
    """Arrays of shape ``(lines,)``, ``(lines, coalescers)`` and ``(lines, partitions)``, and the scalars above."""

    ready: IntArray  # tick at which the line is in L2, ABSENT when it is not resident
    sent: IntArray  # tick at which L2 has sent it to all who asked for it before it was there
    size: IntArray  # bytes, copies in other partitions included
    dirty: IntArray  # bytes stored that HBM does not have
    newer: IntArray  # LRU list towards the most recently used
    older: IntArray
    served: IntArray  # tick at which L2 has served the last load that a coalescer passed on
    reader: IntArray  # who has read the line from the side of a partition
    slowest: IntArray  # (MISS_DRAWS,) see image.Image.slowest_line
    scalars: IntArray


def new_memory(lines: int, machine: Machine, slowest: IntArray) -> MemoryState:
    """An empty L2 for ``lines`` distinct lines; ``slowest``: an image's ``slowest_line``."""
    scalars = np.zeros(SCALARS, dtype=np.int64)
    scalars[LRU_HEAD] = scalars[LRU_TAIL] = -1
    ready, sent, size, dirty, newer, older = (
        np.full(max(1, lines), x, dtype=np.int64) for x in (ABSENT, 0, 0, 0, -1, -1)
    )
    served = np.zeros((max(1, lines), machine.l2_coalescers), dtype=np.int64)
    reader = np.full((max(1, lines), machine.l2_partitions), NOBODY, dtype=np.int64)
    return MemoryState(ready, sent, size, dirty, newer, older, served, reader, slowest, scalars)


def next_launch(m: MemoryState) -> None:
    """Start a new launch on the same chip: what is in L2 stays, dirty or not; clocks and counters begin at zero."""
    m.ready[m.ready != ABSENT] = 0
    m.served[:] = 0
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
def _hbm(machine: Machine, m: MemoryState, now: int, nbytes: int, counter: int) -> int:
    """Move ``nbytes`` to or from HBM; returns the tick at which that is done."""
    s = m.scalars
    s[counter] += nbytes
    s[HBM_FREE] = max(now, s[HBM_FREE]) + ((nbytes * machine.hbm_rate) >> RATE_SHIFT)
    return int(s[HBM_FREE])


@register_jitable
def _grow(machine: Machine, m: MemoryState, now: int, line: int, nbytes: int) -> int:
    """Room for ``nbytes`` of ``line``, which is not in the LRU list; returns when HBM has taken what was displaced."""
    s = m.scalars
    taken = now
    while s[USED] + nbytes > machine.l2_bytes and s[LRU_TAIL] >= 0:
        victim = s[LRU_TAIL]
        _unlink(m, victim)
        s[USED] -= m.size[victim]
        m.ready[victim] = ABSENT
        m.size[victim] = 0
        m.reader[victim] = NOBODY
        if m.dirty[victim] > 0:
            taken = _hbm(machine, m, now, m.dirty[victim], HBM_WRITE)
            m.dirty[victim] = 0
    m.size[line] += nbytes
    s[USED] += nbytes
    return taken


@register_jitable
def slowest_line(m: MemoryState, line: int, nbytes: int) -> int:
    """Ticks by which the slowest part of a copy from HBM is later than a single load would be.

    What DRAM is busy with, nobody knows: every MISS_BYTES draw one of the measured values, by a hash.
    """
    slowest = 0
    for part in range(1 + (nbytes - 1) // MISS_BYTES):
        x = ((line * 64 + part) * 2654435761) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 2246822519) & 0xFFFFFFFF
        x ^= x >> 13
        slowest = max(slowest, m.slowest[(x * MISS_DRAWS) >> 32])
    return slowest


@register_jitable
def access(
    machine: Machine,
    m: MemoryState,
    now: int,
    line: int,
    nbytes: int,
    kind: int,
    group: int,
    receivers: int,
    tma: bool,
) -> int:
    """Serve one request of an SM group at tick ``now``; returns the tick at which L2 has sent or taken the data.

    Latencies of the way to and from the SM are the caller's. A load goes to ``receivers`` SMs; those to several are not
    merged. A load by TMA waits for its slowest line. A store makes the line dirty; one that displaces dirty lines waits
    until HBM has taken them.
    """
    s = m.scalars
    if kind == LOAD:
        s[SM_READ] += nbytes * receivers
    merges = kind == LOAD and receivers == 1 and machine.l2_coalescers > 0
    gpc = group % machine.l2_coalescers if merges else 0
    if merges and m.served[line, gpc] > now:
        return max(m.served[line, gpc], m.ready[line])
    rate = machine.reduce_rate if kind == REDUCE else machine.l2_rate
    s[L2_FREE] = max(now, s[L2_FREE]) + ((nbytes * rate) >> RATE_SHIFT)
    done = s[L2_FREE]
    resident = m.ready[line] != ABSENT
    more = 0 if resident else nbytes
    if resident:
        _unlink(m, line)
    if kind != LOAD:
        s[L2_WRITE] += nbytes
        if not resident:
            m.ready[line] = m.sent[line] = done
        m.dirty[line] = max(m.dirty[line], nbytes)
        done = max(done, _grow(machine, m, now, line, more))
        _make_newest(m, line)
        return done
    s[L2_READ] += nbytes
    if merges:
        m.served[line, gpc] = done
    if resident:
        s[HITS] += 1
        if m.ready[line] > now:
            m.sent[line] += (nbytes * rate) >> RATE_SHIFT
            done = max(done, m.sent[line])
    else:
        s[MISSES] += 1
        late = machine.miss_latency + (slowest_line(m, line, nbytes) if tma else 0)
        m.ready[line] = m.sent[line] = _hbm(machine, m, now, nbytes, HBM_READ) + late
    side = group % machine.l2_partitions
    elsewhere = nbytes - nbytes // machine.l2_partitions
    reader = m.reader[line, side]
    if reader == NOBODY:
        s[L2_FAR] += elsewhere
        m.reader[line, side] = group
    elif reader != SEVERAL and reader != group:
        m.reader[line, side] = SEVERAL
        more += elsewhere
    _grow(machine, m, now, line, more)
    _make_newest(m, line)
    return max(done, m.ready[line])
