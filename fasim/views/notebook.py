"""What a Run shows of itself in a notebook: a short report, its timeline, and tables for pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from fasim.analysis.compare import settings
from fasim.errors import ConfigError, did_you_mean
from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import Run
from fasim.views.common import require_trace
from fasim.views.html import run_html
from fasim.views.timeline import render_timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["run_frame", "run_html", "run_timeline"]


def run_timeline(run: Run, *, sm: int = 0, cycles: tuple[int, int] | None = None, width: int = 100) -> Text:
    """The timeline of ``sm``, see :func:`fasim.views.timeline.render_timeline`.

    Raises ConfigError where the run has no trace, or ``sm`` or ``cycles`` are not in it.
    """
    return render_timeline(require_trace(run), sm=sm, cycles=cycles, width=width)


def run_frame(run: Run, what: str = "run") -> pd.DataFrame:
    """One of the tables of ``run``, see :meth:`fasim.results.run.Run.to_frame`."""
    if what not in _TABLES:
        raise ConfigError(f"to_frame: unknown table '{what}'{did_you_mean(what, _TABLES)}")
    try:
        import pandas as pd
    except ImportError:
        raise ConfigError("to_frame needs the 'pandas' package: pip install 'fasim[frames]'") from None
    return _TABLES[what](pd, run)


def _whole(pd: Any, run: Run) -> Any:
    figures = ("cycles", "time_us", "clock_mhz", "tflops", "peak_percent", "bottleneck")
    results = {**{name: getattr(run, name) for name in figures}, **run.traffic}
    return pd.DataFrame([results | settings(run) | results])


def _utilisation(pd: Any, run: Run) -> Any:
    columns = {"run": run.utilisation, "steady": run.utilisation_steady or {}}
    return pd.DataFrame(columns, index=pd.Index(run.utilisation, name="unit"), dtype=float)


def _stalls(pd: Any, run: Run) -> Any:
    return pd.DataFrame.from_dict(run.stalls, orient="index", columns=list(REASONS)).rename_axis("role")


def _trace(pd: Any, run: Run) -> Any:
    trace = require_trace(run)
    tracks, names = np.array([*trace.tracks, ""]), np.array(trace.names)
    reasons = np.array([*REASONS, "busy"])
    return pd.DataFrame(
        {
            "sm": trace.sm,
            "slot": trace.slot,
            "track": tracks[trace.track],
            "name": names[trace.name],
            "reason": reasons[np.where(trace.kind == UNIT_SLICE, len(REASONS), trace.kind)],
            "owner": tracks[trace.owner],
            "tile": trace.tile,
            "iteration": trace.iteration,
            "cause": trace.cause,
            "start_cycles": trace.start / trace.ticks_per_cycle,
            "end_cycles": trace.end / trace.ticks_per_cycle,
        }
    )


_TABLES: dict[str, Callable[[Any, Run], Any]] = {
    "run": _whole,
    "utilisation": _utilisation,
    "stalls": _stalls,
    "trace": _trace,
}
