"""The roofline of a chip with a run on it: TFLOP/s over FLOP per byte of HBM traffic, as PNG or SVG.

How to read it: under the slanted roof HBM is the limit, under the flat one the tensor cores. The run stands at the
traffic that was simulated, "minimal" at every tensor crossing HBM once, "naive" where S and P make their round trips.
The dashed line is what the MUFU allows at one exponential per score.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasim.analysis.bounds import Bounds
from fasim.results.run import Run
from fasim.views.common import provenance
from fasim.views.pictures import INK, picture

_ROOF, _POINT, _CEILING = "#0072B2", "#D55E00", "#009E73"


@dataclass(frozen=True)
class Roofline:
    """What a roofline picture shows: TFLOP/s over FLOP per byte, both on logarithmic axes.

    ``places`` are intensities by name, ``mufu_tflops`` the ceiling of one exponential per score (None where it is far
    above the roof or does not apply).
    """

    peak_tflops: float
    ridge: float
    mufu_tflops: float | None
    places: dict[str, float]
    intensity: float
    tflops: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]


def roofline(run: Run, bounds: Bounds) -> Roofline:
    """The roofline of ``run`` at its clock."""
    peak = 100 * run.tflops / run.peak_percent
    needed = {bound.unit: bound.needed_cycles or 0.0 for bound in bounds.units}
    places = {
        "naive": bounds.story.naive_intensity,
        "minimal": bounds.simulated_intensity * bounds.simulated_hbm_bytes / bounds.minimal_hbm_bytes,
    }
    return Roofline(
        peak_tflops=peak,
        ridge=bounds.story.ridge,
        mufu_tflops=peak * needed["tensor"] / needed["mufu"] if needed["mufu"] > 0.05 * needed["tensor"] else None,
        places=places,
        intensity=bounds.simulated_intensity,
        tflops=run.tflops,
        x_range=(
            min(8.0, *places.values()) / 2,
            4 * max(bounds.story.ridge, *places.values(), bounds.simulated_intensity),
        ),
        y_range=(peak / 400, peak * 2),
    )


def plot_roofline(run: Run, bounds: Bounds, path: str | Path) -> None:
    """Draw the roofline of ``run`` at its clock. Raises ConfigError for another suffix or an unwritable path."""
    roof = roofline(run, bounds)
    peak, ridge = roof.peak_tflops, roof.ridge
    x = np.geomspace(*roof.x_range, 200)
    with picture(path, (7.5, 4.6), creator=f"fasim {run.meta.get('fasim_version', '')}") as figure:
        axes = figure.add_axes((0.1, 0.13, 0.87, 0.74))
        axes.loglog(x, np.minimum(peak, peak * x / ridge), color=_ROOF, linewidth=2)
        axes.text(x[-1], peak * 1.05, f"tensor {peak:.0f} TFLOP/s", ha="right", va="bottom", color=_ROOF)
        axes.text(x[3], peak * x[3] / ridge * 1.25, "HBM", color=_ROOF)
        if (ceiling := roof.mufu_tflops) is not None:
            axes.axhline(ceiling, color=_CEILING, linestyle="--", linewidth=1)
            axes.text(x[3], ceiling * 1.05, f"MUFU {ceiling:.0f}", color=_CEILING, va="bottom")
        for label, intensity in roof.places.items():
            axes.axvline(intensity, color="#999999", linestyle=":", linewidth=1)
            axes.text(intensity * 1.06, peak / 300, label, color="#666666", rotation=90, va="bottom")
        axes.plot([roof.intensity], [run.tflops], "o", color=_POINT, markersize=8)
        axes.annotate(
            f"{run.tflops:.0f}", (roof.intensity, run.tflops), (0, -16), textcoords="offset points",
            ha="center", color=_POINT,
        )  # fmt: skip
        axes.set_ylim(roof.y_range)
        axes.set_xlabel("FLOP per byte of HBM traffic", color=INK)
        axes.set_ylabel("TFLOP/s", color=INK)
        figure.suptitle(" · ".join(provenance(run)), x=0.1, ha="left", fontsize=11, color=INK)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
