"""L2 and HBM by themselves: what is in L2 and what HBM has, after any sequence of requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim.engine import memory as mem
from fasim.engine.image import LOAD, MISS_DRAWS, REDUCE, STORE, Machine

LINES, CAPACITY = 9, 4000
requests = st.lists(
    st.tuples(st.integers(0, LINES - 1), st.sampled_from((LOAD, STORE, REDUCE)), st.integers(0, 5)), max_size=60
)


def bytes_of(line: int) -> int:
    return 300 + 100 * line


@given(requests, st.integers(1, 3))
def test_nothing_is_lost_and_nothing_is_held_beyond_the_capacity(sequence: list[tuple[int, int, int]], partitions: int):
    machine = Machine(*(1 for _ in Machine._fields))._replace(l2_bytes=CAPACITY, l2_partitions=partitions)
    m = mem.new_memory(LINES, machine, np.ones(MISS_DRAWS, dtype=np.int64))
    stored, dirty = 0, set[int]()
    for now, (line, kind, group) in enumerate(sequence):
        assert mem.access(machine, m, now, line, bytes_of(line), kind, group, 1, True) >= now
        dirty |= {line} if kind != LOAD else set()
        stored += bytes_of(line) if kind != LOAD else 0
        resident = [x for x in range(LINES) if m.ready[x] != mem.ABSENT]
        assert m.scalars[mem.USED] == m.size.sum() == sum(m.size[x] for x in resident) <= CAPACITY
        assert all(bytes_of(x) <= m.size[x] <= partitions * bytes_of(x) for x in resident)
        assert all(m.dirty[x] in (0, bytes_of(x) if x in resident else 0) for x in range(LINES))
        behind = int(m.dirty.sum())
        assert sum(map(bytes_of, dirty)) <= m.scalars[mem.HBM_WRITE] + behind <= stored
    everything = m.scalars[mem.HBM_WRITE] + m.dirty.sum()
    for line in set(range(LINES)) - dirty:  # reads displace, and write no line that was not stored
        mem.access(machine, m, 100, line, bytes_of(line), LOAD, 0, 1, True)
    assert m.scalars[mem.HBM_WRITE] + m.dirty.sum() == everything


def test_every_16_kib_of_a_line_draw_one_of_the_latencies():
    m = mem.new_memory(1, Machine(*(1 for _ in Machine._fields)), np.arange(MISS_DRAWS, dtype=np.int64))
    lines = 20000
    small = np.bincount([mem.slowest_line(m, line, 16384) for line in range(lines)])
    assert np.abs(small / lines - 0.1).max() < 0.01
    large = [mem.slowest_line(m, line, 65536) for line in range(lines)]  # the largest of four
    assert np.mean(large) == pytest.approx(sum(1 - (n / 10) ** 4 for n in range(1, 10)), rel=0.02)
