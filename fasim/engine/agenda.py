"""Two agendas, both binary heaps in the state's arrays.

A group's own holds events by (time, serial); the other one groups by (time, group) of the global
operation they want. CTAs start in group order, so the latter begins sorted.
"""

from __future__ import annotations

from fasim.engine.cache import inline
from fasim.engine.image import IntArray
from fasim.engine.state import OVERFLOW, PUSHED, SERIAL, SIZE, STATUS, TARGET, TIME, WANTS_AT, State


@inline
def push(st: State, g: int, time: int, target: int) -> None:
    """Add an event: agent ``target`` goes on, or a copy or MMA arrives at barrier ``-1 - target``."""
    heap, group = st.heap[g], st.group[g]
    i = group[SIZE]
    if i >= heap.shape[0]:
        st.scalars[STATUS] = OVERFLOW
        return
    group[SIZE] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent, TIME] <= time:  # equal times: the older serial stays on top
            break
        move(heap, parent, i)
        i = parent
    heap[i, TIME], heap[i, SERIAL], heap[i, TARGET] = time, group[PUSHED], target
    group[PUSHED] += 1


@inline
def pop(st: State, g: int) -> None:
    """Drop the earliest event; of equal times the first pushed."""
    heap, group = st.heap[g], st.group[g]
    size = group[SIZE] - 1
    group[SIZE] = size
    if size == 0:
        return
    time, serial = heap[size, TIME], heap[size, SERIAL]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        right = child + 1
        if right < size and before(heap, right, heap[child, TIME], heap[child, SERIAL]):
            child = right
        if not before(heap, child, time, serial):
            break
        move(heap, child, i)
        i = child
    move(heap, size, i)


@inline
def before(heap: IntArray, i: int, time: int, serial: int) -> bool:
    """Whether event ``i`` comes before one of that time and serial."""
    return heap[i, TIME] < time or (heap[i, TIME] == time and heap[i, SERIAL] < serial)


@inline
def move(heap: IntArray, source: int, target: int) -> None:
    """Copy event ``source`` to place ``target``."""
    for column in range(3):
        heap[target, column] = heap[source, column]


@inline
def earlier(st: State, g: int, time: int, other: int) -> bool:
    """Whether group ``g`` wants its global operation before group ``other``, which wants one at ``time``."""
    wants_at = st.group[g, WANTS_AT]
    return wants_at < time or (wants_at == time and g < other)


@inline
def runner_up(st: State) -> int:
    """The group that comes after the first in the agenda of groups; the first itself if it is alone."""
    order = st.order
    if len(order) == 1:
        return order[0]
    if len(order) == 2 or earlier(st, order[1], st.group[order[2], WANTS_AT], order[2]):
        return order[1]
    return order[2]


@inline
def sink_first(st: State) -> None:
    """Restore the order of groups after the first one's time has grown."""
    order = st.order
    g = order[0]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= len(order):
            break
        if child + 1 < len(order) and earlier(st, order[child + 1], st.group[order[child], WANTS_AT], order[child]):
            child += 1
        if not earlier(st, order[child], st.group[g, WANTS_AT], g):
            break
        order[i] = order[child]
        i = child
    order[i] = g
