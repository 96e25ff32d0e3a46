"""Parameters that microbenchmarks leave open, fitted on timings of whole kernels, and what the fit is worth.

A seeded half of a kernel's rows is the training set, the other half is held out. Errors of all rows are simulated on a
grid of parameter values, once for all fits. A small change shifts which warpgroup comes first, and with it the error of
a row by up to a few per cent either way, so the fit does not go below the grid's steps: the point with the least mean
squared error of the training rows, moved along each parameter to the vertex of the parabola through it and its two
neighbours. The errors reported are those of simulations with the values, rounded as they would be written.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasim import __version__
from fasim.errors import ConfigError
from fasim.results.run import IntArray
from fasim.results.validation import Row, Summary
from fasim.studies.batch import Progress
from fasim.studies.calibrate.microbench import FloatArray
from fasim.studies.validate.timing import read_lines, validate

Point = tuple[float, ...]


@dataclass(frozen=True)
class Parameter:
    """A number of an architecture that is fitted: where it can lie, and how finely it is known."""

    key: str
    lowest: float
    highest: float
    points: int
    """Values simulated, evenly spaced from ``lowest`` to ``highest``."""
    grain: float = 1.0
    """Rounding step of the fitted value."""

    def grid(self) -> FloatArray:
        """The values simulated, shape ``(points,)``."""
        return np.linspace(self.lowest, self.highest, self.points)

    def rounded(self, value: float) -> float:
        """The value as the file states it."""
        return float(f"{round(value / self.grain) * self.grain:.12g}")


@dataclass(frozen=True)
class KernelFit:
    """What is fitted on which rows: those with these cells, of these kernels where they are not short."""

    parameters: tuple[Parameter, ...]
    kernels: tuple[str, ...]
    cells: Mapping[str, str]


#: What FMUL between exponentials, and FFMA, take from a running wgmma is measured (microbenchmark ``softmax_parts``),
#: but as a range, 0 to 1.5 and 0 to 1.3 cycles: it depends on the registers that the compiler picks.
KERNEL_FIT = KernelFit(
    parameters=(
        Parameter("sm.interference.fmul_stop_cycles", 0.0, 1.2, 3, 0.1),
        Parameter("sm.interference.ffma_delay_cycles", 0.3, 0.9, 3, 0.1),
    ),
    kernels=("fa3", "fa4sm90"),
    cells={"dtype": "bf16", "direction": "fwd"},
)


@dataclass(frozen=True)
class FitResult:
    """Values fitted on a half of the rows, with the errors of both halves."""

    seed: int
    half: int
    """0 or 1: which half of the seed's split was the training set."""
    values: Point
    """One for each parameter."""
    fitted: Summary
    held_out: Summary


class Fitter:
    """Simulates timing files at points of the parameter space, each point once.

    ``resume`` names a file of results by point, JSON lines: what it has of the same data, architecture, schedules and
    version is not simulated again, and new points are appended as they are finished.
    """

    def __init__(
        self,
        data: Sequence[Path],
        fit: KernelFit = KERNEL_FIT,
        *,
        threads: int | None = None,
        resume: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.data, self.fit, self.threads, self.resume, self.progress = data, fit, threads, resume, progress
        self._origin = _origin(data, fit)
        self._errors: dict[Point, FloatArray] = _stored(resume, self._origin) if resume else {}

    def grid_points(self) -> list[Point]:
        """The points of the grid, the last parameter fastest."""
        return [tuple(map(float, p)) for p in itertools.product(*(part.grid() for part in self.fit.parameters))]

    def errors(self, points: Sequence[Point]) -> FloatArray:
        """Signed relative errors of the rows at each point, shape ``(points, rows)``. Raises as ``validate`` does."""
        wanted = [point for point in dict.fromkeys(points) if point not in self._errors]
        for done, point in enumerate(wanted):
            if self.progress is not None:
                self.progress(done, len(wanted))
            keys = (parameter.key for parameter in self.fit.parameters)
            overrides = [f"{key}={value!r}" for key, value in zip(keys, point, strict=True)]
            self._errors[point] = np.concatenate([self._of_file(path, overrides) for path in self.data])
            if self.resume is not None:
                _append(self.resume, self._origin, point, self._errors[point])
        return np.array([self._errors[point] for point in points])

    def _of_file(self, path: Path, overrides: Sequence[str]) -> FloatArray:
        there = {line["kernel"] for _, line in read_lines(path, ("kernel",))[2]}
        kernels = tuple(kernel for kernel in self.fit.kernels if kernel in there) or self.fit.kernels
        rows = validate(path, kernels=kernels, cells=self.fit.cells, overrides=overrides, threads=self.threads).rows
        return _long_errors(path, rows)

    def fit_half(self, seed: int, half: int) -> FitResult:
        """Fit on one half of the rows, drawn with ``seed``."""
        parameters = self.fit.parameters
        table = self.errors(self.grid_points())
        train, test = split(table.shape[1], seed, half)
        squared = np.mean(table[:, train] ** 2, axis=1).reshape([p.points for p in parameters])
        best = np.unravel_index(int(np.argmin(squared)), squared.shape)
        values = tuple(
            p.rounded(_vertex(p.grid(), np.moveaxis(squared, axis, -1)[(*best[:axis], *best[axis + 1 :])]))
            for axis, p in enumerate(parameters)
        )
        (errors,) = self.errors([values])
        return FitResult(seed, half, values, Summary.of_errors(errors[train]), Summary.of_errors(errors[test]))

    def cross_validate(self, seeds: Iterable[int]) -> list[FitResult]:
        """Both directions of each split."""
        return [self.fit_half(seed, half) for seed in seeds for half in (0, 1)]


def _vertex(x: FloatArray, y: FloatArray) -> float:
    """Where the parabola through the least of the values ``y`` at ``x`` and its neighbours is least; or the end."""
    i = int(np.argmin(y))
    if not 0 < i < len(x) - 1:
        return float(x[i])
    a, b, _ = np.polyfit(x[i - 1 : i + 2], y[i - 1 : i + 2], 2)
    return float(-b / (2 * a)) if a > 0 else float(x[i])


def split(rows: int, seed: int, half: int) -> tuple[IntArray, IntArray]:
    """Indices of the rows fitted on and of those held out; ``half`` 0 or 1 says which half of the split is which."""
    order = np.random.default_rng(seed).permutation(rows)
    first, second = (np.sort(part) for part in np.array_split(order, 2))
    return (second, first) if half else (first, second)


def provenance(fit: KernelFit, data: Sequence[Path], result: FitResult) -> str:
    """What was fitted on what, for a comment."""
    fitted, other = result.fitted, result.held_out
    rows = " ".join((*fit.kernels, *fit.cells.values()))
    files = " and ".join(path.name for path in data)
    return (
        f"fitted on {fitted.n} of {fitted.n + other.n} {rows} rows of {files} (seed {result.seed}): "
        f"mean error {100 * fitted.mape:.1f} %, held out {100 * other.mape:.1f} %"
    )


def _long_errors(data: Path, rows: Iterable[Row]) -> FloatArray:
    """Errors of the rows that are not short. Raises ConfigError where one has no prediction, or there are too few."""
    found = []
    for row in rows:
        if row.error is None:
            raise ConfigError(f"{data}: a row to fit on has no prediction: {row.reason}")
        if not row.short:
            found.append(row.error)
    if len(found) < 4:
        raise ConfigError(f"{data}: {len(found)} rows to fit on; a half of 4 is the least")
    return np.array(found)


def _origin(data: Sequence[Path], fit: KernelFit) -> str:
    """Digest of all that the errors depend on: data, architectures, schedules, builds, version."""
    from fasim.arch import list_archs, load_arch
    from fasim.program.library import schedule_folder

    digest = hashlib.sha256(f"{__version__} {fit.kernels} {sorted(fit.cells.items())}".encode())
    digest.update(repr([parameter.key for parameter in fit.parameters]).encode())
    digest.update("".join(load_arch(name).digest for name in list_archs()).encode())
    try:
        for path in (*data, *sorted(schedule_folder().rglob("*.py")), *sorted(schedule_folder().rglob("*.toml"))):
            digest.update(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot read: {error.strerror}") from None
    return digest.hexdigest()


def _stored(path: Path, origin: str) -> dict[Point, FloatArray]:
    """Errors by point in a file of results; a last line that was cut off is ignored."""
    found: dict[Point, FloatArray] = {}
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            if entry["origin"] == origin:
                found[tuple(entry["point"])] = np.array(entry["errors"])
        except (ValueError, KeyError, TypeError):
            if not text.endswith(line):
                raise ConfigError(f"{path}: not a file of results: {line[:40]!r}") from None
    return found


def _append(path: Path, origin: str, point: Point, errors: FloatArray) -> None:
    entry = json.dumps({"origin": origin, "point": point, "errors": errors.tolist()})
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"{entry}\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None
