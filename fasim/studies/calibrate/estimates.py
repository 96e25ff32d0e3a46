"""Numbers from measurements: a mean or median of like ones, or a least-squares fit with bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fasim.studies.calibrate.microbench import FloatArray

How = Literal["measured", "fitted"]

#: Lanes of a full-rate pipe per SM and cycle, so ``LANES / lanes`` is cycles of a sub-core per warp instruction.
LANES = 128


@dataclass(frozen=True)
class Estimate:
    """A number before rounding, in the unit of its key; a list of numbers where the key has one."""

    value: float | tuple[float, ...]
    residual: float
    """Root mean square of what the ``count`` measurements deviate from it; in their unit for a fit."""
    count: int
    how: How = "measured"


def centre(values: FloatArray, typical: Callable[[FloatArray], np.floating] = np.median) -> Estimate:
    """A median or mean, and the root mean square of what the values deviate from it."""
    value = float(typical(values))
    return Estimate(value, float(np.sqrt(np.mean((values - value) ** 2))), len(values))


def fit(
    model: Callable[[FloatArray], FloatArray], measured: FloatArray, start: Sequence[float], highest: Sequence[float]
) -> tuple[FloatArray, float]:
    """Parameters in [0, highest] with the least squares of ``model(parameters) - measured``, and the residual."""
    from scipy.optimize import least_squares

    found = least_squares(lambda p: model(p) - measured, start, bounds=(np.zeros(len(start)), highest))
    return found.x, float(np.sqrt(np.mean(found.fun**2)))


def line(x: FloatArray, y: FloatArray) -> tuple[Estimate, Estimate]:
    """Intercept and slope of ``y`` over ``x``, neither below 0."""
    (first, slope), residual = fit(lambda p: p[0] + p[1] * x, y, (1.0, 1.0), (np.inf, np.inf))
    return Estimate(float(first), residual, len(x), "fitted"), Estimate(float(slope), residual, len(x), "fitted")


def plus(estimate: Estimate, constant: float) -> Estimate:
    """The estimate of a single number, moved."""
    assert isinstance(estimate.value, float)
    return Estimate(estimate.value + constant, estimate.residual, estimate.count, estimate.how)
