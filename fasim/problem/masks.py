"""Masks: which keys a query sees. This is the only place that says so.

Every mask here gives a query one interval of keys, and neither end of it moves back from one query to the next. That
holds for causal masks, sliding windows and chunks, and is all that tiles, the checker and the reference rely on.

A mask knows no lengths. It is asked by *position*: the number of the key that stands opposite the query when the last
query faces the last key (:meth:`fasim.problem.sequences.Sequences.position`), the bottom-right alignment of
FlashAttention. Positions are negative where there are more queries than keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

#: Farther than any key: on this side only the ends of the sequence limit what a query sees.
UNLIMITED = 2**40


class Mask:
    """All keys are visible. Subclasses limit them on one side or both.

    ``first`` and ``end`` take positions of any shape and return keys of that shape, which may lie outside the
    sequence. Both must not decrease with the position.
    """

    def first(self, position: IntArray) -> IntArray:
        """First key that the queries at ``position`` see; ``-UNLIMITED`` for all from the start."""
        return np.full_like(position, -UNLIMITED)

    def end(self, position: IntArray) -> IntArray:
        """One more than the last key that the queries at ``position`` see; ``UNLIMITED`` for all to the end."""
        return np.full_like(position, UNLIMITED)

    def sees(self, position: IntArray, key: IntArray) -> Bool:
        """Element by element, of arrays that broadcast: does the query at ``position`` see ``key``?"""
        return (self.first(position) <= key) & (key < self.end(position))

    def matrix(self, seqlen_q: int, seqlen_k: int) -> Bool:
        """True where the query sees the key, shape ``(seqlen_q, seqlen_k)``."""
        position = np.arange(seqlen_k - seqlen_q, seqlen_k, dtype=np.int64)
        return self.sees(position[:, None], np.arange(seqlen_k, dtype=np.int64))

    def seen_by_any(self, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
        """Keys from, to (exclusive) that at least one query sees of those at positions ``first`` to ``last``."""
        return self.first(first), self.end(last)

    def seen_by_all(self, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
        """Keys from, to (exclusive) that every query sees of those at positions ``first`` to ``last``: no mask there.

        Empty where the second number is not above the first.
        """
        return self.first(last), self.end(first)

    def visible_scores(self, seqlen_q: int, seqlen_k: int) -> int:
        """Unmasked elements of a score matrix."""
        position = np.arange(seqlen_k - seqlen_q, seqlen_k, dtype=np.int64)
        first, end = (np.clip(limit(position), 0, seqlen_k) for limit in (self.first, self.end))
        return int(np.maximum(end - first, 0).sum())

    def counted_scores(self, seqlen_q: int, seqlen_k: int) -> float:
        """Elements of a score matrix that published TFLOP/s count; the visible ones unless a convention says else."""
        return self.visible_scores(seqlen_q, seqlen_k)


class Causal(Mask):
    """Query i sees the keys up to its position. The FlashAttention papers count half of the score matrix."""

    def end(self, position: IntArray) -> IntArray:
        """One more than the position."""
        return position + 1

    def counted_scores(self, seqlen_q: int, seqlen_k: int) -> float:
        """Half of the matrix, whatever the lengths."""
        return 0.5 * seqlen_q * seqlen_k


FULL = Mask()
CAUSAL = Causal()
