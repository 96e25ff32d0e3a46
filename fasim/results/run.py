"""The result of a simulation. Every view reads only this; no view simulates."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fasim.results.shown import shown

if TYPE_CHECKING:
    import pandas as pd
    from rich.text import Text

SCHEMA_VERSION = 1

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """Slices of a run, one row each, sorted by (start, sm, track).

    All arrays have shape ``(n,)``, dtype int64. ``start`` and ``end`` are ticks; divide by
    ``ticks_per_cycle``. ``track`` indexes ``tracks``, ``name`` indexes ``names``. Role tracks
    ("producer", "consumer0") hold work and stalls and tile the life of the role; unit tracks
    ("tensor", "tma") hold occupancy. Slices on one track of one SM and CTA slot do not overlap.
    """

    ticks_per_cycle: int
    tracks: tuple[str, ...]
    names: tuple[str, ...]
    start: IntArray
    end: IntArray
    sm: IntArray
    slot: IntArray  # CTA slot on the SM (0 when one CTA per SM)
    track: IntArray
    name: IntArray
    kind: IntArray  # index into REASONS on role tracks, UNIT_SLICE on unit tracks
    tile: IntArray  # work tile the slice belongs to, -1 when none
    iteration: IntArray  # iteration of the innermost loop, -1 when none
    owner: IntArray  # unit tracks: index into ``tracks`` of the role that issued the work, else -1
    #: Row of the slice that released this one (``docs/semantics.md``, section 9), -1 where there is none in this trace.
    cause: IntArray
    truncated: bool = False  # the recording buffer filled up before the run ended
    phases: tuple[str, ...] = ()  # of each of ``names`` the mark that the schedule put on it, "" for none

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Run:
    """One simulated grid.

    Percentages are in [0, 100]. ``utilisation`` is averaged over all SMs and the whole run,
    ``utilisation_steady`` over the window in which every SM had work (None where there is none).
    ``stalls[role]`` maps each of REASONS to its share of the role's time and sums to 100.
    """

    cycles: float
    time_us: float
    clock_mhz: float
    tflops: float
    peak_percent: float  # of the chip's dense tensor peak for this dtype at ``clock_mhz``
    bottleneck: str  # name of the limiting unit, or "latency" when no unit is near its limit
    utilisation: dict[str, float]
    utilisation_steady: dict[str, float] | None
    stalls: dict[str, dict[str, float]]
    #: l2_read_bytes and l2_write_bytes: what L2 serves, l2_far_bytes: reads that one of its partitions passes on to
    #: another, sm_read_bytes: what arrives in SMs (multicast in several), hbm_read_bytes, hbm_write_bytes
    traffic: dict[str, float]
    events: int  # engine events processed
    meta: dict[str, Any]
    trace: Trace | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data of everything but the trace: stable keys, versioned by ``schema_version``."""
        data = {k: v for k, v in self.__dict__.items() if k != "trace"}
        return {"schema_version": SCHEMA_VERSION, **data}

    def to_json(self) -> str:
        """JSON text of :meth:`to_dict`; the same run gives the same bytes."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        """Rebuild a run (without trace) from :meth:`to_dict` data.

        Raises ValueError when the schema version is not ours or a key is missing.
        """
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"schema_version {data.get('schema_version')!r}, expected {SCHEMA_VERSION}")
        fields = {k: v for k, v in data.items() if k != "schema_version"}
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from None

    # For notebooks; the views come from the package that holds them, see fasim.results.shown.
    def timeline(self, *, sm: int = 0, cycles: tuple[int, int] | None = None, width: int = 100) -> Text:
        """What every role and unit of ``sm`` did in the window [first, last) ``cycles``, as rich text.

        By default a few iterations in steady state. Raises ConfigError where the run has no trace, or ``sm`` or
        ``cycles`` are not in it.
        """
        text: Text = shown("run_timeline")(self, sm=sm, cycles=cycles, width=width)
        return text

    def to_frame(self, what: str = "run") -> pd.DataFrame:
        """A table of the run as a pandas DataFrame.

        ``what`` is "run" (one row: results, schedule, arch, problem and knobs, so that runs can be concatenated),
        "utilisation" (a row per unit, per cent), "stalls" (a row per role, per cent by reason) or "trace" (a row per
        slice). Raises ConfigError for another one, for "trace" without a trace, and where pandas is not installed.
        """
        frame: pd.DataFrame = shown("run_frame")(self, what)
        return frame

    def _repr_html_(self) -> str:
        return str(shown("run_html")(self))
