"""What both engines share at their edges: trace selection, trace order, the deadlock report."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fasim.engine import image as im
from fasim.engine.image import Image, IntArray
from fasim.errors import DeadlockError, ModelError

_FOREVER = int(np.iinfo(np.int64).max)


class TraceWindow(NamedTuple):
    """Which slices to keep: SMs, a window of ticks, and at most ``limit`` of them."""

    sms: tuple[int, ...]
    ticks: tuple[int, int]
    limit: int


#: In place of a barrier index: the role waits for the tile scheduler.
SCHEDULER = -2

NO_TRACE = TraceWindow((), (0, _FOREVER), 0)


class Blocked(NamedTuple):
    """An unfinished agent. ``barrier`` indexes ``Image.barriers``; negative: the tile scheduler."""

    group: int
    agent: int
    barrier: int
    needed: int
    completed: int
    since: int


def sort_trace(trace: IntArray) -> IntArray:
    """Rows in a total order that does not depend on which SM an engine looked at first.

    T_CAUSE holds rows of ``trace`` as it was recorded and becomes rows of the result.
    """
    columns = (im.T_END, im.T_NAME, im.T_KIND, im.T_OWNER, im.T_TRACK, im.T_SLOT, im.T_SM, im.T_START)
    order = np.lexsort([trace[:, c] for c in columns])
    ranked = np.ascontiguousarray(trace[order])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    caused = ranked[:, im.T_CAUSE] != im.NO_CAUSE
    ranked[caused, im.T_CAUSE] = place[ranked[caused, im.T_CAUSE]]
    return ranked


def beyond_tensor(operation: str) -> ModelError:
    """The error for a copy whose line does not belong to its tensor."""
    return ModelError(f"operation '{operation}': copies beyond the lines of its tensor (start column, step or lines)")


def deadlock(image: Image, blocked: list[Blocked]) -> DeadlockError:
    """The error for a run that stopped with unfinished roles: one SM's story, each role once."""
    m = image.machine
    first = blocked[0].group
    lines = []
    for item in blocked:
        if item.group != first:
            continue
        sm = first * m.cluster + item.agent // m.agents // m.slots
        role = image.agents[item.agent % m.agents]
        if item.barrier < 0:
            what = "the tile scheduler"
        else:
            what = f"phase {item.needed} of barrier '{image.barriers[item.barrier]}' ({item.completed} complete)"
        lines.append(f"  SM {sm} {role}: waits for {what} since cycle {item.since / im.TICKS:.0f}")
    others = len({item.group for item in blocked}) - 1
    tail = f"\n  and the same on {others} more SM groups" if others else ""
    return DeadlockError(
        "deadlock: nothing is left to do but these roles have not finished\n"
        + "\n".join([*lines, *_chain(image, [item for item in blocked if item.group == first])])
        + tail
    )


def _chain(image: Image, blocked: list[Blocked]) -> list[str]:
    """Who waits for whom: from the first blocked role to one that cannot be helped, or round to one named before.

    Of several roles that a barrier waits for, the one that has been blocked longest is followed.
    """
    m = image.machine
    waits = {item.agent: item for item in blocked}
    current, seen, text = blocked[0].agent, list[int](), []
    while current in waits and current not in seen:
        seen.append(current)
        barrier = waits[current].barrier
        if barrier < 0:
            return []  # the scheduler's own role is among the blocked
        who = image.agents[current % m.agents]
        base = current - current % m.agents
        others = [base + kind for kind in _arrivers(image, barrier) if base + kind != current]
        names = ", ".join(image.agents[other % m.agents] for other in others)
        if not others:
            text.append(f"{who} waits for '{image.barriers[barrier]}', at which no other role of its CTA arrives")
            break
        current = min(others, key=lambda other: waits[other].since if other in waits else _FOREVER)
        ended = "" if current in waits else ", which has ended"
        text.append(f"{who} waits for '{image.barriers[barrier]}' of {names}{ended}")
    return ["  who waits for whom: " + "; ".join(text)]


def _arrivers(image: Image, barrier: int) -> list[int]:
    """Agents of a CTA whose code has an instruction that arrives at ``barrier``."""
    ends = [*image.entry[1:].tolist(), len(image.code)]
    found = []
    for kind, (first, last) in enumerate(zip(image.entry.tolist(), ends, strict=True)):
        code = image.code[first:last]
        arriving = np.isin(code[:, im.K_KIND], (im.ARRIVE, im.MMA, im.COPY))
        bar, stages = code[arriving, im.M_BAR], code[arriving, im.M_STAGES]
        if ((bar >= 0) & (bar <= barrier) & (barrier < bar + stages)).any():
            found.append(kind)
    return found
