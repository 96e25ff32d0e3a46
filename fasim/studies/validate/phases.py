"""Phases inside a kernel: cycle stamps of its warpgroups, measured and simulated.

The CSV has the columns of ``validation/data/h200_fa3_phases.csv``: per variant, warpgroup, work tile and iteration the
cycles of three stamps. A simulated iteration has the same stamps, read off the trace of SM 0. In FlashAttention-3::

    issue_start    issue_end  s_ready                     issue_start of the next iteration
    |- issue ------|- wait QK-|- softmax ------------------|
       QK(n), PV(n+1) are issued; issuing blocks while the tensor core's queue is full

A kernel that issues QK alone and waits for it (Triton's, ``validation/triton_phases.py``) leaves ``issue_end`` empty.

The kernels are those of an ablation file (``validation/data/h200_fa3_ablations.csv``): one whose name is not there is
its family's default with the change of each part of its name, ``d128_nocluster_nopp`` = ``d128_default`` with what
``d128_nocluster`` and ``d128_nopp`` change. Writing the stamps changes the measured kernel by -2 to +5 % in cycles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fasim import __version__
from fasim.errors import ConfigError, did_you_mean
from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import IntArray, Trace
from fasim.studies.batch import Progress
from fasim.studies.validate.timing import REQUIRED, check_overrides, job_of, read_lines

SCHEMA_VERSION = 1

#: What is compared, all in cycles: start to start; to the end of issue; to S; from S to the next start; and from a
#: start of warpgroup 0 to the next start of warpgroup 1.
PHASES = ("period", "issue", "to s_ready", "softmax", "offset")

#: Batch and tokens the stamps were taken at (``validation/data/README.md``).
_SHAPE = {"batch": "4", "seqlen_q": "4096"}

_TICKS = 64  # per cycle, of a trace made of stamps


@dataclass(frozen=True)
class Stamps:
    """One entry per iteration, sorted by warpgroup, tile and iteration. Arrays of shape ``(n,)``; stamps in cycles."""

    warpgroup: IntArray
    tile: IntArray  # counts the work tiles of the CTA
    iteration: IntArray  # counts from 1: the first block of a tile has no PV before it
    issue_start: npt.NDArray[np.float64]
    issue_end: npt.NDArray[np.float64]  # NaN where it was not recorded
    s_ready: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> Stamps:
        """From rows in the order of the fields, sorted here."""
        table = np.array(sorted((tuple(row) for row in rows), key=lambda row: row[:3]), dtype=np.float64)
        table = table.reshape(-1, 6).T
        return cls(*(column.astype(np.int64) for column in table[:3]), *table[3:])

    def followed(self) -> npt.NDArray[np.bool_]:
        """Shape ``(n - 1,)``: whether entry i + 1 is the next iteration of the same warpgroup and tile."""
        same = (np.diff(self.warpgroup) == 0) & (np.diff(self.tile) == 0)
        return np.asarray(same & (np.diff(self.iteration) == 1))

    def medians(self) -> dict[str, float]:
        """Median of each of PHASES in cycles over all warpgroups; what has no sample is left out."""
        followed = self.followed()
        samples = {
            "period": np.diff(self.issue_start)[followed],
            "issue": self.issue_end - self.issue_start,
            "to s_ready": self.s_ready - self.issue_start,
            "softmax": (self.issue_start[1:] - self.s_ready[:-1])[followed],
            "offset": self._offsets(),
        }
        known = {phase: sample[~np.isnan(sample)] for phase, sample in samples.items()}
        return {phase: float(np.median(known[phase])) for phase in PHASES if len(known[phase])}

    @property
    def overlapped(self) -> bool:
        """Whether PV of another block is issued before QK is waited for, as ``issue_end`` says."""
        return not bool(np.isnan(self.issue_end).all())

    def _offsets(self) -> npt.NDArray[np.float64]:
        """From the last start of warpgroup 0 to each start of warpgroup 1 within a tile."""
        found = []
        for tile in np.unique(self.tile):
            first, second = (self.issue_start[(self.tile == tile) & (self.warpgroup == w)] for w in (0, 1))
            last = np.searchsorted(first, second, side="right") - 1
            found.append((second - first[last])[last >= 0] if len(first) else second[:0])
        return np.concatenate(found) if found else np.zeros(0)


def simulated_stamps(trace: Trace, overlapped: bool = True) -> Stamps:
    """The stamps of SM 0's first CTA slot, of the roles that issue QK: one, or its instances in their order.

    What is QK, PV and the wait for QK, the schedule says by marks (``Role.phase``). An iteration starts with the issue
    of "QK". With ``overlapped`` it counts when "PV" is issued before the wait "wait QK"; otherwise each counts, without
    issue_end. Its s_ready is the end of that wait, or of issue where there was nothing to wait for.
    """
    rows = []
    marks = np.array(trace.phases)[trace.name]
    workers = np.unique(trace.track[(marks == "QK") & (trace.kind != UNIT_SLICE)]).tolist()
    for warpgroup, track in enumerate(workers):
        mine = (trace.track == track) & (trace.kind != UNIT_SLICE) & (trace.sm == 0) & (trace.slot == 0)
        slices = [
            (str(marks[i]), REASONS[trace.kind[i]], int(trace.tile[i]), trace.start[i], trace.end[i])
            for i in np.flatnonzero(mine)
        ]
        found = _iterations(slices, trace.ticks_per_cycle, overlapped)
        tiles = {tile: n for n, tile in enumerate(dict.fromkeys(tile for tile, *_ in found))}
        counts: dict[int, int] = {}
        for tile, *stamps in found:
            counts[tile] = counts.get(tile, 0) + 1
            rows.append((warpgroup, tiles[tile], counts[tile], *stamps))
    return Stamps.of(rows)


def _iterations(
    slices: Iterable[tuple[str, str, int, int, int]], ticks: int, overlapped: bool
) -> list[tuple[int, float, float, float]]:
    """(tile, issue_start, issue_end, s_ready) of each iteration of one consumer.

    ``slices``: mark, reason, tile, first and last tick, in order of time.
    """
    found: list[tuple[int, float, float, float]] = []
    start: int | None = None  # of an iteration that has not come to its softmax
    end = ready = 0
    before = ""
    for mark, reason, tile, first, last in slices:
        if mark == "QK" and before != "QK" and (start is None or end):
            start, end = first, 0 if overlapped else last
        elif mark == ("PV" if overlapped else "QK") and start is not None:
            end = ready = last
        elif mark == "wait QK" and end:
            ready = last
        elif mark == "wait QK":
            start = None
        elif reason == "work" and start is not None and end:
            found.append((tile, start / ticks, end / ticks if overlapped else np.nan, ready / ticks))
            start = None
        before = mark
    return found


def stamps_trace(stamps: Stamps) -> Trace:
    """A trace of SM 0 with a track per consumer, on which the three phases of an iteration follow each other.

    Time counts from the first stamp, so that measured and simulated ones line up. The softmax of a tile's last
    iteration has no end and is left out.
    """
    until = np.append(np.where(stamps.followed(), stamps.issue_start[1:], stamps.s_ready[:-1]), stamps.s_ready[-1:])
    issued = np.where(np.isnan(stamps.issue_end), stamps.s_ready, stamps.issue_end)
    edges = np.array([stamps.issue_start, issued, stamps.s_ready, until])
    edges -= edges.min(initial=np.inf)
    starts, ends = (np.rint(_TICKS * part).astype(np.int64).ravel() for part in (edges[:-1], edges[1:]))
    n = len(stamps.tile)
    phase = np.repeat(np.arange(3), n)
    kinds = np.array([REASONS.index(reason) for reason in ("issue", "dependency", "work")])
    track, tile, iteration = (np.tile(column, 3) for column in (stamps.warpgroup, stamps.tile, stamps.iteration))
    order = np.lexsort((track, starts))
    order = order[ends[order] > starts[order]]
    nothing = np.zeros_like(order)
    return Trace(
        ticks_per_cycle=_TICKS,
        tracks=tuple(f"consumer{i}" for i in range(int(stamps.warpgroup.max(initial=-1)) + 1)),
        names=("QK, PV", "wait QK", "softmax"),
        start=starts[order],
        end=ends[order],
        sm=nothing,
        slot=nothing,
        track=track[order],
        name=phase[order],
        kind=kinds[phase[order]],
        tile=tile[order],
        iteration=iteration[order],
        owner=nothing - 1,
        cause=nothing - 1,
    )


@dataclass(frozen=True)
class Variant:
    """One kernel: its stamps measured and simulated, and the knobs it was simulated with."""

    name: str
    knobs: dict[str, object]
    measured: Stamps
    simulated: Stamps

    def rows(self) -> dict[str, tuple[float, float, float]]:
        """Per phase the medians measured and simulated in cycles, and the error as a fraction."""
        measured, simulated = self.measured.medians(), self.simulated.medians()
        return {
            phase: (measured[phase], simulated[phase], simulated[phase] / measured[phase] - 1)
            for phase in PHASES
            if phase in measured and phase in simulated
        }


@dataclass(frozen=True)
class PhaseComparison:
    """The result of :func:`compare_phases`."""

    data: str
    data_sha256: str
    overrides: tuple[str, ...]
    variants: tuple[Variant, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: medians in cycles, errors as fractions."""
        names = ("measured", "simulated", "error")
        return {
            "schema_version": SCHEMA_VERSION,
            "fasim_version": __version__,
            "data": self.data,
            "data_sha256": self.data_sha256,
            "overrides": list(self.overrides),
            "error_unit": "fraction",
            "variants": [
                {
                    "variant": variant.name,
                    "knobs": variant.knobs,
                    "phases": {phase: dict(zip(names, row, strict=True)) for phase, row in variant.rows().items()},
                }
                for variant in self.variants
            ],
        }


def compare_phases(
    data: str | Path,
    kernels: str | Path,
    *,
    variants: Sequence[str] = (),
    overrides: Sequence[str] = (),
    engine: str = "compiled",
    progress: Progress | None = None,
) -> PhaseComparison:
    """Simulate each variant of the stamps in ``data``; ``kernels`` is the ablation file that says what they are.

    ``variants``: only these; all when empty. Raises ConfigError for a file that cannot be read, lacks a column or has
    a cell that is no number, for an unknown variant or override, and what a simulation raises.
    """
    from fasim.program.library import load_schedule

    path, table = Path(data), Path(kernels)
    digest, measured = _read_stamps(path)
    for name in variants:
        if name not in measured:
            raise ConfigError(f"--variant: {path} has no '{name}'{did_you_mean(name, measured)}")
    _, _, lines = read_lines(table, (*REQUIRED, "variant"))
    check_overrides(lines, overrides)
    known = {row["variant"]: row for _, row in lines if all(row[key] == text for key, text in _SHAPE.items())}
    found = []
    wanted = variants or list(measured)
    for done, name in enumerate(wanted, start=1):
        job = job_of(str(table), _columns(name, known, table), load_schedule, overrides, engine)
        if isinstance(job, str):
            raise ConfigError(f"{table}: {name}: {job}")
        trace = replace(job, traced=True).run().trace
        assert trace is not None
        found.append(Variant(name, dict(job.knobs), measured[name], simulated_stamps(trace, measured[name].overlapped)))
        if progress is not None:
            progress(done, len(wanted))
    return PhaseComparison(str(data), digest, tuple(overrides), tuple(found))


def _columns(name: str, known: Mapping[str, Mapping[str, str]], table: Path) -> Mapping[str, str]:
    """The row of a variant: its own, or its family's default with the changes of each part of its name."""
    if name in known:
        return known[name]
    family, *parts = name.split("_")
    needed = [f"{family}_default", *(f"{family}_{part}" for part in parts)]
    for part in needed:
        if part not in known:
            raise ConfigError(f"{table}: no variant '{part}' for '{name}'{did_you_mean(part, known)}")
    default = known[needed[0]]
    measured = {"variant", "ms", "cycles", "sm_clock_mhz"}
    changes = [
        {key: text for key, text in known[part].items() if text != default[key] and key not in measured}
        for part in needed[1:]
    ]
    return {**default, **{key: text for change in changes for key, text in change.items()}}


def _read_stamps(path: Path) -> tuple[str, dict[str, Stamps]]:
    """SHA-256 of the file, and the stamps by variant in the order of the file."""
    names = [field.name for field in fields(Stamps)]
    content, _, lines = read_lines(path, ("variant", *names))
    rows: dict[str, list[tuple[float, ...]]] = {}
    for number, row in lines:
        rows.setdefault(row["variant"], []).append(tuple(_stamp(f"{path}:{number}", row, name) for name in names))
    return hashlib.sha256(content).hexdigest(), {name: Stamps.of(part) for name, part in rows.items()}


def _stamp(where: str, row: Mapping[str, str], name: str) -> float:
    if name == "issue_end" and not row[name]:
        return np.nan
    try:
        return int(row[name])
    except ValueError:
        raise ConfigError(f"{where}: {name}: '{row[name]}' is not a whole number") from None
