"""The agenda of one SM group: a binary heap of (time, serial, target) in the state's arrays."""

from __future__ import annotations

from fasim.engine.cache import inline
from fasim.engine.state import OVERFLOW, PUSHED, SERIAL, SIZE, STATUS, TARGET, TIME, State
from fasim.image import IntArray


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
