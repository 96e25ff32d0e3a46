"""Global memory: named matrices that copies read and write by memory line."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fasim.numerics.formats import Float32
from fasim.program.effects import ArrayRegion, Layout


class Arrays:
    """Named arrays ``(rows, columns)`` in float32; what nothing has been written to is NaN."""

    def __init__(self, given: Mapping[str, Float32]) -> None:
        self.data: dict[str, Float32] = dict(given)
        self._written: dict[str, np.ndarray[tuple[int, int], np.dtype[np.bool_]]] = {}

    def read(self, name: str, region: ArrayRegion) -> Float32:
        """Rows of ``region``; a row outside the tensor is zero, as a TMA copy fills it. Raises KeyError.

        What has been read may be written again.
        """
        found = self.data[name][region.rows, region.columns]
        if name in self._written:
            self._written[name][region.rows[region.rows >= 0], region.columns] = False
        return np.where((region.rows >= 0)[:, None], found, np.float32(0))

    def write(self, name: str, layout: Layout, columns: int, region: ArrayRegion, data: Float32) -> bool:
        """Write rows inside the tensor; false where one of them was written before, and not read since."""
        if name not in self.data:
            self.data[name] = np.full((layout.rows, columns), np.nan, np.float32)
        written = self._written.setdefault(name, np.zeros(self.data[name].shape, bool))
        inside = region.rows >= 0
        rows = region.rows[inside]
        again = bool(written[rows, region.columns].any())
        self.data[name][rows, region.columns] = data[inside]
        written[rows, region.columns] = True
        return not again
