"""On-chip storage: what a place holds, who accessed it, and in which order that must be.

Order is *happens-before*, by vector clocks: every role instance, its queue of MMAs, and its copies into a stage have a
component that counts their accesses. A clock knows of an access if its component has come as far. Two accesses of
which one writes, neither of which knows of the other, are a race, however lucky this run's timing was.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fasim.numerics.formats import Float32

IntArray = npt.NDArray[np.int64]
Clock = dict[Hashable, int]
Share = tuple[float, float]

#: Shares are sums of few binary or decimal fractions.
_EPSILON = 1e-9


def join(clock: Clock, other: Clock) -> None:
    """``clock`` learns what ``other`` knows."""
    for component, count in other.items():
        if count > clock.get(component, 0):
            clock[component] = count


@dataclass(frozen=True)
class Value:
    """A matrix and what its numbers mean.

    ``rows``, ``columns``: row numbers in global memory of the queries or keys along an axis, -1 outside the tensor.
    ``reference`` ``(rows, 1)``: row maximum the numbers are relative to, None for absolute ones; ``before``: of a
    correction, the one it starts from.
    """

    data: Float32
    rows: IntArray | None = None
    columns: IntArray | None = None
    reference: Float32 | None = None
    before: Float32 | None = None

    def part(self, axis: int, share: Share) -> Value:
        """Rows (axis 0) or columns (axis 1) from one share of their number to another."""
        size = self.data.shape[axis]
        first, last = round(share[0] * size), round(share[1] * size)
        if (first, last) == (0, size):
            return self
        cut = slice(first, last)
        if axis == 1:
            columns = None if self.columns is None else self.columns[cut]
            return replace(self, data=self.data[:, cut], columns=columns)
        return replace(
            self,
            data=self.data[cut],
            rows=None if self.rows is None else self.rows[cut],
            reference=None if self.reference is None else self.reference[cut],
            before=None if self.before is None else self.before[cut],
        )


def concatenate(values: list[Value], axis: int) -> Value:
    """Matrices side by side (axis 1) or one below the other (axis 0)."""
    if len(values) == 1:
        return values[0]
    first = values[0]

    def joined(name: str, along: int) -> Any:
        parts = [getattr(value, name) for value in values]
        return None if any(part is None for part in parts) else np.concatenate(parts) if along == axis else parts[0]

    data = np.concatenate([value.data for value in values], axis=axis)
    reference, before = joined("reference", 0), joined("before", 0)
    if first.reference is None:
        reference = before = None
    return Value(data, joined("rows", 0), joined("columns", 1), reference, before)


@dataclass(frozen=True)
class Access:
    """One access to the addresses ``lo`` to ``hi`` by ``step``, at ``count`` of its clock's ``component``."""

    lo: float
    hi: float
    component: Hashable
    count: int
    writes: bool
    step: Any
    place: str


@dataclass
class Piece:
    """A part of a stage that was written at once."""

    value: Value
    tile: int  # work tile of the writer
    loaded: bool  # by a copy
    by: str
    lo: float = 0.0
    hi: float = 0.0
    read: bool = False


PieceKey = tuple[str, int, Share]


@dataclass
class Storage:
    """An address space: shared memory (bytes) or tensor memory (columns) of a CTA, or one register tile of a role.

    ``axis``: along which a stage is cut into shares, rows 0 or columns 1.
    """

    axis: int
    accesses: list[Access] = field(default_factory=list)
    pieces: dict[PieceKey, Piece] = field(default_factory=dict)
    overwritten: dict[tuple[str, int], str] = field(default_factory=dict)

    def access(self, new: Access, clock: Clock) -> list[Access]:
        """Record ``new`` and return earlier accesses that it must not overlap with but that ``clock`` does not know."""
        unordered, kept = [], []
        for old in self.accesses:
            apart = old.hi <= new.lo or new.hi <= old.lo
            if not apart and (old.writes or new.writes) and clock.get(old.component, 0) < old.count:
                unordered.append(old)
            covered = new.lo <= old.lo and old.hi <= new.hi
            repeated = not old.writes and old.component == new.component
            if not (covered and (new.writes or repeated)):
                kept.append(old)
        self.accesses = [*kept, new]
        return unordered

    def write(self, key: PieceKey, lo: float, hi: float, new: Piece) -> bool:
        """Store ``new``; false if it replaces what a copy brought and nobody has read."""
        unread = False
        for other, old in list(self.pieces.items()):
            if old.lo < hi and lo < old.hi:
                unread = unread or (other == key and new.loaded and old.loaded and not old.read)
                del self.pieces[other]
                self.overwritten[other[:2]] = new.by
        new.lo, new.hi = lo, hi
        self.pieces[key] = new
        self.overwritten.pop(key[:2], None)
        return not unread

    def written_in(self, key: PieceKey, tile: int) -> bool:
        """Whether a place was written in a work tile."""
        return key in self.pieces and self.pieces[key].tile == tile

    def read(self, name: str, stage: int, share: Share) -> Value | None:
        """What the ``share`` of a stage holds; None where part of it holds nothing, or something else by now."""
        found, covered = [], 0.0
        for (other, number, (first, last)), piece in sorted(self.pieces.items(), key=lambda item: item[1].lo):
            lo, hi = max(first, share[0]), min(last, share[1])
            if (other, number) != (name, stage) or hi - lo <= _EPSILON:
                continue
            piece.read = True
            covered += hi - lo
            width = last - first
            found.append(piece.value.part(self.axis, ((lo - first) / width, (hi - first) / width)))
        if covered < share[1] - share[0] - _EPSILON:
            return None
        return concatenate(found, self.axis)
