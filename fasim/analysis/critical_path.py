"""The critical path of one SM: which work, which hand-over, which unit the end of the run waited for.

The slices of a trace are the nodes of a graph. A slice follows the one before it on its role; a wait follows what ended
it: the slice of another role, the MMA or the copy whose end lies exactly one hand-over latency of the chip before the
end of the wait; an MMA follows the one before it on a busy tensor core, else the role that issued it. Walking from the
last slice back along what each one followed gives the critical path; the time between the ends of two neighbours on it
is charged to the later one, so the path adds up to the time it spans.

The *loop-carried bound* is the longest path through one steady stretch of iterations if nobody queued: without the
edges of a busy tensor core or pipe between roles. It is the time of an iteration that more units would not shorten.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import networkx as nx
import numpy as np

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import IntArray, Trace

#: Reasons that end with something another role or unit did.
_WAITS = tuple(REASONS.index(reason) for reason in ("dependency", "barrier", "full", "empty", "memory"))
_PIPE, _ISSUE, _WORK = (REASONS.index(reason) for reason in ("pipe", "issue", "work"))


@dataclass(frozen=True)
class Step:
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
    steps: tuple[Step, ...]
    hand_overs: tuple[HandOver, ...]
    loop_carried_cycles: float  # per iteration; 0 for a whole run

    @property
    def interval_cycles(self) -> float:
        """Cycles per iteration as simulated."""
        return self.cycles / self.iterations if self.iterations else 0.0


@dataclass
class EventGraph:
    """The slices of one SM, by order of their ends, and what each of them followed.

    Raises ConfigError when nothing was recorded for ``sm``.
    """

    trace: Trace
    arch: Arch
    sm: int = 0
    index: IntArray = field(init=False)  # rows of the trace, shape (len(self),)
    start: list[int] = field(init=False)
    end: list[int] = field(init=False)
    before: dict[int, int] = field(init=False, default_factory=dict)  # the previous slice of the same role or unit
    ending: dict[int, list[int]] = field(init=False)  # tick -> slices that end there

    def __post_init__(self) -> None:
        t = self.trace
        keep = np.flatnonzero(t.sm == self.sm)
        if not len(keep):
            raise ConfigError(f"SM {self.sm} is not in the trace")
        self.index = keep = keep[np.argsort(t.end[keep], kind="stable")]
        self.start, self.end = t.start[keep].tolist(), t.end[keep].tolist()
        self.kind, self.name = t.kind[keep].tolist(), t.name[keep].tolist()
        self.iteration, self.tile = t.iteration[keep].tolist(), t.tile[keep].tolist()
        slot, track, owner = t.slot[keep].tolist(), t.track[keep].tolist(), t.owner[keep].tolist()
        self.role = [(-1, tr) if k == UNIT_SLICE else (s, tr) for s, tr, k in zip(slot, track, self.kind, strict=True)]
        self.owner = list(zip(slot, owner, strict=True))
        self.ending = defaultdict(list)
        last: dict[tuple[int, int], int] = {}
        for i, key in enumerate(self.role):
            self.ending[self.end[i]].append(i)
            if key in last:
                self.before[i] = last[key]
            last[key] = i
        self.lags = _lags(self.arch, t.ticks_per_cycle)

    def __len__(self) -> int:
        return len(self.start)

    def is_unit(self, i: int) -> bool:
        """Whether slice ``i`` is occupancy of a unit, not the doing of a role."""
        return bool(self.kind[i] == UNIT_SLICE)

    def label(self, i: int) -> str:
        """Track and operation, such as "tensor: QK of consumer0"."""
        track, name = self.trace.tracks[self.role[i][1]], self.trace.names[self.name[i]]
        if self.is_unit(i):
            return f"{track}: {name} of {self.trace.tracks[self.owner[i][1]]}"
        return f"{track}: {name}"

    def cause(self, i: int) -> int | None:
        """What ended wait, block or MMA ``i``; None: nothing but the slice before it on its own track."""
        if self.is_unit(i):
            previous = self.before.get(i)
            if previous is not None and self.end[previous] == self.start[i]:
                return previous
            return self.issuer(i)
        if self.kind[i] == _PIPE:
            return self.last_work(i)
        if self.kind[i] in _WAITS or self.kind[i] == _ISSUE:
            return self.hand_over(i)
        return None

    def causes(self) -> IntArray:
        """For every row of the trace the row that released it, -1 where that is not known; shape (len(trace),)."""
        found = np.full(len(self.trace), -1, dtype=np.int64)
        known = [(i, cause) for i in range(len(self)) if (cause := self.cause(i)) is not None]
        if known:
            later, earlier = np.array(known).T
            found[self.index[later]] = self.index[earlier]
        return found

    def issuer(self, i: int) -> int | None:
        """The slice of its owner that ended when MMA or copy ``i`` was queued, or during which that happened."""
        mine = [j for j in self.ending[self.start[i]] if self.role[j] == self.owner[i]]
        return mine[-1] if mine else None

    def hand_over(self, i: int) -> int | None:
        """What ended exactly one hand-over latency of the chip before wait or block ``i`` did."""
        blocked = self.kind[i] == _ISSUE
        for lag in self.lags[REASONS[self.kind[i]]]:
            for j in reversed(self.ending.get(self.end[i] - lag, ())):
                if self.end[j] <= self.start[i]:
                    continue
                if self.is_unit(j) if blocked else self.role[j] != self.role[i]:
                    if (blocked or self.kind[i] == _WAITS[0]) and self.owner[j] != self.role[i]:
                        continue
                    return j
        return None

    def last_work(self, i: int) -> int | None:
        """The work of another role that ended last while ``i`` waited for its pipe."""
        j = i
        while (j := j - 1) >= 0 and self.end[j] > self.start[i]:
            if self.kind[j] == _WORK and self.role[j] != self.role[i]:
                return j
        return None


def _lags(arch: Arch, ticks: int) -> dict[str, list[int]]:
    """Latencies from the end of a cause to the end of the wait it ends, in ticks, by stall reason."""
    sync, tensor, tma = arch.sm.sync, arch.sm.tensor.async_mma, arch.sm.tma
    wakes = [sync.named_barrier_cycles, sync.mbarrier_wake_cycles]
    drains = [tensor.completion_cycles, tensor.two_cta_completion_cycles or 0.0] if tensor else []
    copies = [arch.l2.latency_cycles + arch.sm.cp_async.latency_extra_cycles]
    if tma:
        copies += [tma.latency_cycles, tma.latency_cycles + tma.multicast_extra_cycles]
    # A completion is quoted with the wake-up of the role that waits for it in it.
    handed = [*wakes, *drains, *(first + wakes[1] for first in (*copies, sync.remote_arrive_cycles))]
    lags = {
        "dependency": handed,
        "issue": drains,
        "memory": [*copies, *handed],
        **dict.fromkeys(("barrier", "full", "empty"), handed),
    }
    return {reason: [lag for cycles in values if (lag := round(cycles * ticks))] for reason, values in lags.items()}


def critical_path(s: EventGraph, *, steady: bool = True) -> CriticalPath:
    """The critical path of one SM: of one steady stretch of iterations, or of the whole recording.

    Raises ConfigError when no work tile has two iterations.
    """
    trace = s.trace
    first, last, iterations = _stretch(s) if steady else (min(s.start), max(s.end), 0)
    at = _busiest(s, range(len(s))) if steady else s.role[-1]
    here = max(i for i in range(len(s)) if s.role[i] == at and s.end[i] <= last)
    spent: Counter[str] = Counter()
    waits: Counter[tuple[str, str, str, str]] = Counter()
    waited: Counter[tuple[str, str, str, str]] = Counter()
    for later, earlier, caused in _walk(s, here):
        since = max(first, s.end[earlier] if earlier is not None else s.start[later])
        if s.end[later] > since:
            spent[s.label(later)] += s.end[later] - since
        if caused and earlier is not None and not s.is_unit(later) and s.role[earlier] != s.role[later]:
            waiter, what, reason = trace.tracks[s.role[later][1]], trace.names[s.name[later]], REASONS[s.kind[later]]
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
        steps=tuple(Step(label, n / per_cycle, 100 * n / total) for label, n in spent.most_common()),
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


def _busiest(s: EventGraph, indices: Iterable[int]) -> tuple[int, int]:
    """The role that works most inside of loops."""
    busy: Counter[tuple[int, int]] = Counter()
    for i in indices:
        if s.kind[i] == _WORK:
            busy[s.role[i]] += s.end[i] - s.start[i]
    if not busy:
        raise ConfigError("the trace shows no role at work")
    return busy.most_common(1)[0][0]


def _stretch(s: EventGraph) -> tuple[int, int, int]:
    """First and last tick of the busiest role's longest work tile without its first iteration, and the iterations."""
    role = _busiest(s, range(len(s)))
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
    graph = nx.DiGraph()
    for i in range(len(s)):
        if s.start[i] < first or s.end[i] > last:
            continue
        cause = None if s.kind[i] == _PIPE else s.cause(i)
        if s.is_unit(i) and cause is not None and s.is_unit(cause) and s.owner[cause] != s.owner[i]:
            cause = s.issuer(i)  # it queued behind another role's
        waits = s.kind[i] == _PIPE or cause is not None
        own = 0 if waits and not s.is_unit(i) else s.end[i] - s.start[i]
        graph.add_node(i)
        previous = s.before.get(i)
        if previous is not None and previous in graph and not s.is_unit(i):
            graph.add_edge(previous, i, weight=own)
        if cause is not None and cause in graph:
            lag = s.end[i] - s.end[cause] if not s.is_unit(i) else own
            graph.add_edge(cause, i, weight=lag)
    return int(nx.dag_longest_path_length(graph))
