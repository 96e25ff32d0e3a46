"""Utilisation and traffic of whole launches: simulated against hardware counters (Nsight Compute).

The CSV has the columns of ``validation/data/h200_counters.csv``: a row per launched kernel, the shape as for
:func:`fasim.studies.validate.timing.validate`, then counters. Launches of one shape belong together: bytes are added,
utilisation is averaged over their cycles, and the sum is compared with the schedule's run.

A counter ``*.pct_of_peak_sustained_active`` is relative to the cycles in which an SM had work. A run's utilisation is
relative to all its cycles, so counters are scaled by ``sm__cycles_active / sm__cycles_elapsed`` (0.96 where the last
wave leaves SMs without a tile).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fasim import __version__
from fasim.errors import ConfigError, FasimError
from fasim.results.run import Run
from fasim.results.validation import SHAPE
from fasim.studies.batch import Job, Progress
from fasim.studies.validate.timing import REQUIRED, Line, check_overrides, job_of, read_lines

SCHEMA_VERSION = 1

_ACTIVE, _ELAPSED = "sm__cycles_active.sum", "sm__cycles_elapsed.sum"

#: Counters per unit, in per cent of the unit's peak while the SM is active. ``xu`` executes MUFU.
PIPES = {
    "tensor": "sm__pipe_tensor_op_hmma_type_hmma_hgmma_qgmma_cycles_active.avg.pct_of_peak_sustained_active",
    "mufu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}

#: The shared-memory port: wavefronts of loads, stores and wgmma operands, and what TMA writes, which no wavefront
#: counter sees. Only compared where every launch loads by TMA: otherwise the bytes may end in registers.
_WAVEFRONTS, _FILL_BYTES = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "l1tex__m_xbar2l1tex_read_bytes.sum"
_TMA, _PORT_BYTES_PER_CYCLE = "sm__inst_executed_pipe_tma.sum", 128

UNITS = (*PIPES, "smem")

#: Counters of traffic, by the name in ``Run.traffic``, and the bytes one count stands for (a sector is 32 bytes).
#: L2 counts reads behind the coalescers, and those that one partition passes on to another in both.
TRAFFIC = {
    "sm_read_bytes": (_FILL_BYTES, 1),
    "l2_read_bytes": ("lts__t_sectors_op_read.sum", 32),
    "hbm_read_bytes": ("dram__bytes_read.sum", 1),
    "hbm_write_bytes": ("dram__bytes_write.sum", 1),
}

_COUNTERS = (_ACTIVE, _ELAPSED, _WAVEFRONTS, _TMA, *PIPES.values(), *(c for c, _ in TRAFFIC.values()))

#: Kernel names of PyTorch's copies and fills, launched beside the attention kernel.
_AUXILIARY = "elementwise_kernel"

#: Part of a kernel name -> knob that says which build of the schedule's kernel it is.
_BUILDS = {"pytorch_flash::": ("build", "pytorch")}


@dataclass(frozen=True)
class CountedLaunch:
    """One shape: measured and simulated per cent of peak by unit, and bytes by kind of traffic.

    ``columns`` are those of the first launch. A unit that cannot be compared is missing from ``measured``.
    """

    columns: Mapping[str, str]
    problem: str
    measured: dict[str, float]
    simulated: dict[str, float]

    @property
    def name(self) -> str:
        """Kernel and shape."""
        return f"{self.columns['kernel']} {self.problem}"

    def error(self, name: str) -> float | None:
        """Simulated less measured in points for a unit, as a fraction of the measurement for bytes; None: no data."""
        if name not in self.measured:
            return None
        difference = self.simulated[name] - self.measured[name]
        return difference / self.measured[name] if name in TRAFFIC else difference

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the shape, then ``measured``, ``simulated`` and ``error`` by name."""
        shape = {name: self.columns.get(name, "") for name in (*REQUIRED, *SHAPE)}
        errors = {name: self.error(name) for name in self.measured}
        return {**shape, "measured": self.measured, "simulated": self.simulated, "error": errors}


@dataclass(frozen=True)
class Unpredicted:
    """A launched kernel that nothing is compared with, and why."""

    columns: Mapping[str, str]
    reason: str


@dataclass(frozen=True)
class CounterComparison:
    """The result of :func:`compare_counters`."""

    data: str
    data_sha256: str
    overrides: tuple[str, ...]
    launches: tuple[CountedLaunch, ...]
    unpredicted: tuple[Unpredicted, ...]

    def mean_absolute(self) -> dict[str, float]:
        """Mean absolute error by unit (points) and kind of traffic (fraction), over the launches that have it."""
        sizes: dict[str, list[float]] = {}
        for launch in self.launches:
            for name in launch.measured:
                if (error := launch.error(name)) is not None:
                    sizes.setdefault(name, []).append(abs(error))
        return {name: math.fsum(sizes[name]) / len(sizes[name]) for name in (*UNITS, *TRAFFIC) if name in sizes}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "fasim_version": __version__,
            "data": self.data,
            "data_sha256": self.data_sha256,
            "overrides": list(self.overrides),
            "error_unit": {"utilisation": "points", "bytes": "fraction"},
            "launches": [launch.to_dict() for launch in self.launches],
            "mean_absolute": self.mean_absolute(),
            "not_predicted": [
                {**{name: row.columns[name] for name in ("kernel", "direction", "kernel_name")}, "reason": row.reason}
                for row in self.unpredicted
            ],
        }


def compare_counters(
    data: str | Path,
    *,
    kernels: Sequence[str] = (),
    overrides: Sequence[str] = (),
    engine: str = "compiled",
    progress: Progress | None = None,
) -> CounterComparison:
    """Simulate every shape of the CSV ``data`` and compare utilisation and traffic with its counters.

    Raises ConfigError when the file cannot be read, lacks a column or has a cell that is no number, and for an
    unknown kernel or override.
    """
    from fasim.program.library import load_schedule

    path = Path(data)
    content, _, lines = read_lines(path, (*REQUIRED, "kernel_name", *_COUNTERS), kernels)
    check_overrides(lines, overrides)
    launches: list[CountedLaunch] = []
    unpredicted: list[Unpredicted] = []
    load = cache(load_schedule)
    groups = _groups(lines)
    for done, group in enumerate(groups, start=1):
        main = [line for line in group if _AUXILIARY not in line[1]["kernel_name"]]
        unpredicted += [Unpredicted(line[1], "auxiliary kernel of PyTorch") for line in group if line not in main]
        if main:
            outcome = _compare(path, main, job_of(f"{path}:{main[0][0]}", _knobs(main[0][1]), load, overrides, engine))
            if isinstance(outcome, CountedLaunch):
                launches.append(outcome)
            else:
                unpredicted += [Unpredicted(columns, outcome) for _, columns in main]
        if progress is not None:
            progress(done, len(groups))
    digest = hashlib.sha256(content).hexdigest()
    return CounterComparison(str(data), digest, tuple(overrides), tuple(launches), tuple(unpredicted))


def _groups(lines: Iterable[Line]) -> list[list[Line]]:
    """Launches of one shape, in the order of the file."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[1].get(name, "") for name in (*REQUIRED, *SHAPE)), []).append(line)
    return list(groups.values())


def _knobs(columns: Mapping[str, str]) -> dict[str, str]:
    return {**columns, **dict(knob for part, knob in _BUILDS.items() if part in columns["kernel_name"])}


def _compare(path: Path, lines: Sequence[Line], job: Job | str) -> CountedLaunch | str:
    """The launches of one shape and their simulation, or the reason why there is none."""
    if isinstance(job, str):
        return job
    try:
        run = job.run()
    except FasimError as error:
        return str(error)
    if len(run.meta["kernels"]) != len(lines):
        return f"{len(lines)} kernels were launched, the schedule has {len(run.meta['kernels'])}"
    return CountedLaunch(
        columns=lines[0][1],
        problem=job.problem.describe(),
        measured=_measured(lambda i, name: _number(f"{path}:{lines[i][0]}", lines[i][1], name), len(lines)),
        simulated={name: run.utilisation[name] for name in UNITS} | _traffic(run),
    )


def _traffic(run: Run) -> dict[str, float]:
    """Bytes as the counters count them: L2 counts a read that it passes on to another partition there too."""
    found = {name: run.traffic[name] for name in TRAFFIC}
    found["l2_read_bytes"] += run.traffic["l2_far_bytes"]
    return found


def _measured(value: Callable[[int, str], float], n: int) -> dict[str, float]:
    """Per cent of peak and bytes of ``n`` launches together; ``value`` reads a counter of one of them."""

    def total(name: str) -> float:
        return math.fsum(value(i, name) for i in range(n))

    elapsed = total(_ELAPSED)
    found = {
        unit: math.fsum(value(i, name) * value(i, _ACTIVE) for i in range(n)) / elapsed for unit, name in PIPES.items()
    }
    if all(value(i, _TMA) > 0 for i in range(n)):
        found["smem"] = 100 * (total(_WAVEFRONTS) + total(_FILL_BYTES) / _PORT_BYTES_PER_CYCLE) / elapsed
    return found | {kind: total(name) * size for kind, (name, size) in TRAFFIC.items()}


def _number(where: str, columns: Mapping[str, str], name: str) -> float:
    try:
        value = float(columns[name])
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}: {name}: '{columns[name]}' is not a number of at least 0")
    return value
