"""The agenda of one SM group: a binary heap of (time, serial, target) in the state's arrays."""

from __future__ import annotations

from fasim.engine.cache import inline
from fasim.engine.state import OVERFLOW, STATUS, State


@inline
def push(st: State, g: int, time: int, target: int) -> None:
    """Add an event: agent ``target`` goes on, or a copy or MMA arrives at barrier ``-1 - target``."""
    size = st.heap_size[g]
    if size >= st.heap_time.shape[1]:
        st.scalars[STATUS] = OVERFLOW
        return
    times, serials, targets = st.heap_time[g], st.heap_serial[g], st.heap_target[g]
    serial = st.serial[g]
    st.serial[g] = serial + 1
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if times[parent] <= time:  # equal times: the older serial stays on top
            break
        times[i], serials[i], targets[i] = times[parent], serials[parent], targets[parent]
        i = parent
    times[i], serials[i], targets[i] = time, serial, target
    st.heap_size[g] = size + 1


@inline
def pop(st: State, g: int) -> None:
    """Drop the earliest event; of equal times the first pushed."""
    times, serials, targets = st.heap_time[g], st.heap_serial[g], st.heap_target[g]
    size = st.heap_size[g] - 1
    st.heap_size[g] = size
    if size == 0:
        return
    time, serial, target = times[size], serials[size], targets[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child] or (times[right] == times[child] and serials[right] < serials[child])
        ):
            child = right
        if times[child] > time or (times[child] == time and serials[child] > serial):
            break
        times[i], serials[i], targets[i] = times[child], serials[child], targets[child]
        i = child
    times[i], serials[i], targets[i] = time, serial, target
