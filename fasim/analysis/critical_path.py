"""The critical path of one SM: which work, which hand-over, which unit the end of the run waited for.

The slices of a trace are the nodes of a graph. A slice follows the one before it on its role. One that was released
follows its recorded cause: the slice of the role that arrived last at the barrier, the MMA or the copy that completed,
the work that had the pipe. An MMA follows the one before it on a busy tensor core, else the role that issued it.
Walking from the last slice back along what each one followed gives the critical path; the time between the ends of
two neighbours on it is charged to the later one, so the path adds up to the time it spans.

The *loop-carried bound* is the longest path through one steady stretch of iterations if nobody queued: without the
edges of a busy tensor core or pipe between roles. It is the time of an iteration that more units would not shorten.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx
import numpy as np

from fasim.errors import ConfigError
from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import IntArray, Trace

_PIPE, _WORK = REASONS.index("pipe"), REASONS.index("work")


@dataclass(frozen=True)
class PathStep:
    """Time on the critical path under one label: cycles, and per cent of the path."""

    label: str
    cycles: float
    percent: float


@dataclass(frozen=True)
class HandOver:
    """``waiter`` waited at ``what`` for ``cause``, ``times`` on the path, ``cycles`` in all; ``reason``: of stalls."""

    waiter: str
    what: str
    reason: str
    cause: str
    times: int
    cycles: float


@dataclass(frozen=True)
class CriticalPath:
    """Path over ``cycles`` of one SM, largest steps first. ``iterations`` is 0 for a whole run."""

    cycles: float
    iterations: int
    steps: tuple[PathStep, ...]
    hand_overs: tuple[HandOver, ...]
    loop_carried_cycles: float  # per iteration; 0 for a whole run

    @property
    def interval_cycles(self) -> float:
        """Cycles per iteration as simulated."""
        return self.cycles / self.iterations if self.iterations else 0.0


#: A role or unit: its SM, its CTA slot (-1 for a unit) and its track.
Role = tuple[int, int, int]


def _linked(trace: Trace, sm: int) -> list[int]:
    """``sm`` and the SMs of the trace whose slices release its own, or the ones that do."""
    caused = np.flatnonzero(trace.cause >= 0)
    pairs = set(zip(trace.sm[caused].tolist(), trace.sm[trace.cause[caused]].tolist(), strict=True))
    found = [sm]
    for later in found:
        found += [earlier for other, earlier in pairs if other == later and earlier not in found]
    return found


@dataclass
class EventGraph:
    """The slices of one SM and of those that release its roles, by order of their ends, and what each of them followed.

    Raises ConfigError when nothing was recorded for ``sm``.
    """

    trace: Trace
    sm: int = 0
    index: IntArray = field(init=False)  # rows of the trace, shape (len(self),)
    start: list[int] = field(init=False)
    end: list[int] = field(init=False)
    before: dict[int, int] = field(init=False, default_factory=dict)  # the previous slice of the same role or unit
    released: list[int] = field(init=False)  # by which slice, -1: by none on this SM

    def __post_init__(self) -> None:
        t = self.trace
        if not (t.sm == self.sm).any():
            raise ConfigError(f"SM {self.sm} is not in the trace")
        keep = np.flatnonzero(np.isin(t.sm, _linked(t, self.sm)))
        self.index = keep = keep[np.argsort(t.end[keep], kind="stable")]
        self.start, self.end = t.start[keep].tolist(), t.end[keep].tolist()
        self.kind, self.name = t.kind[keep].tolist(), t.name[keep].tolist()
        self.iteration, self.tile = t.iteration[keep].tolist(), t.tile[keep].tolist()
        slot = np.where(t.kind[keep] == UNIT_SLICE, -1, t.slot[keep])
        self.role = list(zip(t.sm[keep].tolist(), slot.tolist(), t.track[keep].tolist(), strict=True))
        self.owner = list(zip(t.slot[keep].tolist(), t.owner[keep].tolist(), strict=True))
        place = np.full(len(t) + 1, -1)  # one more: the place of no cause
        place[keep] = np.arange(len(keep))
        self.released = place[t.cause[keep]].tolist()
        last: dict[Role, int] = {}
        for i, key in enumerate(self.role):
            if key in last:
                self.before[i] = last[key]
            last[key] = i

    def __len__(self) -> int:
        return len(self.start)

    def is_unit(self, i: int) -> bool:
        """Whether slice ``i`` is occupancy of a unit, not the doing of a role."""
        return bool(self.kind[i] == UNIT_SLICE)

    def label(self, i: int) -> str:
        """Track and operation, such as "tensor: QK of consumer0"; with the number of another SM."""
        sm, _, track_index = self.role[i]
        track, name = self.trace.tracks[track_index], self.trace.names[self.name[i]]
        if sm != self.sm:
            track = f"SM {sm} {track}"
        if self.is_unit(i):
            return f"{track}: {name} of {self.trace.tracks[self.owner[i][1]]}"
        return f"{track}: {name}"

    def releaser(self, i: int) -> int | None:
        """What the engine recorded as the cause of ``i``: of an MMA or copy the issue; None: nothing on this SM."""
        return None if self.released[i] < 0 else self.released[i]

    def cause(self, i: int) -> int | None:
        """What ``i`` waited for: its releaser, or the slice before it on a unit that was busy when it was issued."""
        releaser = self.releaser(i)
        if not self.is_unit(i):
            return releaser
        previous = self.before.get(i)
        at_once = releaser is not None and self.end[releaser] == self.start[i]
        queued = previous is not None and self.end[previous] == self.start[i] and not at_once
        return previous if queued else releaser

    def causes(self) -> IntArray:
        """For every row of the trace the row of :meth:`cause`, -1 where there is none; shape (len(trace),)."""
        found = np.full(len(self.trace), -1, dtype=np.int64)
        known = [(i, cause) for i in range(len(self)) if (cause := self.cause(i)) is not None]
        if known:
            later, earlier = np.array(known).T
            found[self.index[later]] = self.index[earlier]
        return found


def critical_path(s: EventGraph, *, steady: bool = True) -> CriticalPath:
    """The critical path of one SM: of one steady stretch of iterations, or of the whole recording.

    Raises ConfigError when no work tile has two iterations.
    """
    trace = s.trace
    first, last, iterations = _stretch(s) if steady else (min(s.start), max(s.end), 0)
    at = _busiest(s) if steady else next(s.role[i] for i in reversed(range(len(s))) if s.role[i][0] == s.sm)
    here = max(i for i in range(len(s)) if s.role[i] == at and s.end[i] <= last)
    spent: Counter[str] = Counter()
    waits: Counter[tuple[str, str, str, str]] = Counter()
    waited: Counter[tuple[str, str, str, str]] = Counter()
    until = s.end[here]
    for later, earlier, caused in _walk(s, here):
        # Work that had a pipe may go on longer than the wait for the pipe: only what lies before counts.
        since = max(first, min(until, s.end[earlier] if earlier is not None else s.start[later]))
        if until > since:
            spent[s.label(later)] += until - since
        until = since
        if caused and earlier is not None and not s.is_unit(later) and s.role[earlier] != s.role[later]:
            waiter, what, reason = s.label(later).partition(": ")[0], trace.names[s.name[later]], REASONS[s.kind[later]]
            key = (waiter, what, reason, s.label(earlier))
            waits[key] += 1
            waited[key] += s.end[later] - s.start[later]
        if since == first:
            break
    per_cycle = trace.ticks_per_cycle
    total = sum(spent.values())
    return CriticalPath(
        cycles=total / per_cycle,
        iterations=iterations,
        steps=tuple(PathStep(label, n / per_cycle, 100 * n / total) for label, n in spent.most_common()),
        hand_overs=tuple(HandOver(*key, waits[key], n / per_cycle) for key, n in waited.most_common()),
        loop_carried_cycles=_longest(s, first, last) / per_cycle / iterations if iterations else 0.0,
    )


def _walk(s: EventGraph, i: int) -> Iterator[tuple[int, int | None, bool]]:
    """Pairs (slice, what it followed) back from ``i``, and whether that is a cause on another track or queue."""
    while True:
        cause = s.cause(i)
        earlier = cause if cause is not None else s.before.get(i)
        yield i, earlier, cause is not None
        if earlier is None:
            return
        i = earlier


def _busiest(s: EventGraph) -> Role:
    """The role of the SM that works most."""
    busy: Counter[Role] = Counter()
    for i in range(len(s)):
        if s.kind[i] == _WORK and s.role[i][0] == s.sm:
            busy[s.role[i]] += s.end[i] - s.start[i]
    if not busy:
        raise ConfigError("the trace shows no role at work")
    return busy.most_common(1)[0][0]


def _stretch(s: EventGraph) -> tuple[int, int, int]:
    """First and last tick of the busiest role's longest work tile without its first iteration, and the iterations."""
    role = _busiest(s)
    begins: dict[int, dict[int, int]] = defaultdict(dict)
    for i in range(len(s)):
        if s.role[i] == role and s.iteration[i] >= 1:
            begins[s.tile[i]].setdefault(s.iteration[i], s.start[i])
    tile = max(begins, key=lambda tile: (len(begins[tile]), tile), default=None)
    if tile is None or len(begins[tile]) < 2:
        raise ConfigError("no work tile in the trace has two iterations after its first")
    times = sorted(begins[tile].values())
    return times[0], times[-1], len(times) - 1


def _longest(s: EventGraph, first: int, last: int) -> int:
    """Longest path in ticks through the slices of a window without queueing for units."""
    inside = [i for i in range(len(s)) if s.start[i] >= first and s.end[i] <= last]
    graph = nx.DiGraph()
    graph.add_nodes_from(inside)
    for i in inside:
        cause = None if s.kind[i] == _PIPE else s.cause(i)
        if s.is_unit(i) and cause is not None and s.is_unit(cause) and s.owner[cause] != s.owner[i]:
            cause = s.releaser(i)  # it queued behind another role's
        waits = s.kind[i] == _PIPE or cause is not None
        own = 0 if waits and not s.is_unit(i) else s.end[i] - s.start[i]
        previous = s.before.get(i)
        if previous is not None and previous in graph and not s.is_unit(i):
            graph.add_edge(previous, i, weight=own)
        if cause is not None and cause in graph:
            lag = s.end[i] - s.end[cause] if not s.is_unit(i) else own
            graph.add_edge(cause, i, weight=lag)
    return int(nx.dag_longest_path_length(graph))
