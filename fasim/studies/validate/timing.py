"""Predicted against measured: every row of a CSV of timings, simulated and compared.

The CSV has the columns of ``validation/data/h200_timing.csv``: ``arch`` picks the chip, ``kernel`` the schedule,
``sm_clock_mhz`` the measured clock. Where it is known, cycles are compared; where it is empty, the architecture file's
clock under this load is used, at most ``clock_limit_mhz`` (a locked clock, which a power limit can undercut), and the
error is one of time. A column named after a knob of the schedule sets that knob
(empty: its default). Other columns are carried through. A row that cannot be predicted keeps its reason.

Errors are signed fractions of the measurement: ``predicted / measured - 1``, so -0.05 is 5 % too fast.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fasim.errors import ConfigError, FasimError, did_you_mean
from fasim.results.validation import RESULT, SHAPE, SHORT_US, Row, SwitchEffect, Validation
from fasim.studies.batch import Job, Progress, spread

if TYPE_CHECKING:
    from fasim.program.library import Schedule

#: Kernels whose schedule has another name, with the knobs that make it that kernel. As in FlashAttention-3's
#: ``num_splits``, 0 lets its heuristic choose.
ALIASES: dict[str, tuple[str, dict[str, object]]] = {
    "fa4sm90": ("fa4", {}),
    "fa3split": ("fa3", {"splits": 0}),
    "eager": ("naive", {"framework": "pytorch"}),
    "math": ("naive", {"framework": "sdpa"}),
}

REQUIRED = ("arch", "kernel", "dtype", "direction", "causal", "batch", "seqlen_q", "heads_q", "head_dim")
_MEASURED = ("ms", "sm_clock_mhz", "cycles")
_CONTRACT = frozenset((*REQUIRED, *SHAPE, *_MEASURED))

Line = tuple[int, dict[str, str]]  # number in the file, cells


class Outcome(NamedTuple):
    """What one simulation contributes to a row."""

    cycles: float
    clock_mhz: float
    bottleneck: str


def validate(
    data: str | Path,
    *,
    kernels: Sequence[str] = (),
    cells: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    engine: str = "compiled",
    threads: int | None = None,
    max_tflop: float | None = None,
    effects: bool = False,
    progress: Progress | None = None,
) -> Validation:
    """Simulate the rows of the CSV ``data`` and compare.

    Args:
        data: CSV file.
        kernels: only rows of these kernels; all when empty.
        cells: only rows with these cells, by column.
        overrides: ``path=value`` changes of every architecture.
        engine: ``compiled`` or ``reference``.
        threads: simulations at a time, one per CPU by default.
        max_tflop: problems of more TFLOP are not simulated, which their rows say.
        effects: also compare each ``variant`` with the ``*_default`` variant of the same shape.
        progress: called with the number of finished simulations and of all.

    Raises:
        ConfigError: the file cannot be read, lacks a column or has a cell that is no number; an unknown kernel or
            override was asked for; ``effects`` without a ``variant`` column.
    """
    from fasim.program.library import load_schedule

    path = Path(data)
    content, names, lines = read_lines(path, (*REQUIRED, *(("variant",) if effects else ())), kernels)
    if not {"ms", "cycles"} & set(names):
        raise ConfigError(f"{path}: neither 'ms' nor 'cycles' is a column{did_you_mean('ms', names)}")
    lines = [line for line in lines if all(line[1].get(name) == text for name, text in (cells or {}).items())]
    check_overrides(lines, overrides)
    load = cache(load_schedule)
    jobs = [job_of(f"{path}:{number}", columns, load, overrides, engine) for number, columns in lines]
    jobs = [_within(job, max_tflop) for job in jobs]
    outcomes = _simulate([job for job in jobs if isinstance(job, Job)], threads, progress)
    rows = tuple(
        _compare(f"{path}:{number}", columns, outcomes[job] if isinstance(job, Job) else job)
        for (number, columns), job in zip(lines, jobs, strict=True)
    )
    knobs = {name for job in jobs if isinstance(job, Job) for name, _ in job.knobs}
    return Validation(
        data=str(data),
        data_sha256=hashlib.sha256(content).hexdigest(),
        engine=engine,
        overrides=tuple(overrides),
        rows=rows,
        effects=tuple(_effects(rows)) if effects else None,
        knob_columns=tuple(name for name in names if name in knobs),
        carried_columns=tuple(name for name in names if name not in knobs and name not in _CONTRACT),
    )


def read_lines(path: Path, required: Sequence[str], kernels: Sequence[str] = ()) -> tuple[bytes, list[str], list[Line]]:
    """The bytes of a CSV file, its columns, and its rows of the wanted kernels (all when empty) with line numbers.

    Raises ConfigError for what is no CSV file with the ``required`` columns, and for an unknown kernel.
    """
    try:
        content = path.read_bytes()
        text = io.StringIO(content.decode("utf-8-sig"), newline="")
        reader = csv.DictReader(text, strict=True, restval="", restkey="")
        names = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        lines = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not a CSV file: {error}") from None
    for name in required:
        if name not in names:
            raise ConfigError(f"{path}: column '{name}' is missing{did_you_mean(name, names)}")
    for name in names:
        if name in RESULT or names.count(name) > 1:
            raise ConfigError(f"{path}: column '{name}' is {'reserved' if name in RESULT else 'there twice'}")
    for number, row in lines:
        if "" in row:
            raise ConfigError(f"{path}:{number}: more cells than columns")
    known = {row["kernel"] for _, row in lines} if kernels else set()
    for kernel in kernels:
        if kernel not in known:
            raise ConfigError(f"--kernel: {path} has no '{kernel}'{did_you_mean(kernel, known)}")
    return content, names, [line for line in lines if not kernels or line[1]["kernel"] in kernels]


def job_of(
    where: str, columns: Mapping[str, str], load: Callable[[str], Schedule], overrides: Sequence[str], engine: str
) -> Job | str:
    """The simulation of a row, or the reason why there is none. ``where`` is the file and line."""
    from fasim.problem import Problem
    from fasim.program.library import list_schedules

    shape = {name: _integer(where, columns, name) for name in SHAPE}
    clock_mhz = _positive(where, columns, "sm_clock_mhz")
    causal = {"0": False, "false": False, "1": True, "true": True}.get(columns["causal"].lower())
    if causal is None:
        raise ConfigError(f"{where}: causal: '{columns['causal']}' is neither 0 nor 1")
    name, preset = ALIASES.get(columns["kernel"], (columns["kernel"], {}))
    if name not in list_schedules() and not name.endswith(".py"):
        return f"no schedule for kernel '{columns['kernel']}'"
    try:
        schedule = load(name)
        given: dict[str, Any] = {key: value for key, value in shape.items() if value is not None}
        problem = Problem(causal=causal, dtype=columns["dtype"], direction=columns["direction"], **given)
    except FasimError as error:
        return str(error)
    cells = {key: text for key, text in columns.items() if text and key in schedule.knobs and key not in _CONTRACT}
    return Job(
        schedule=name,
        problem=problem,
        arch=_arch_name(columns),
        overrides=tuple(overrides),
        knobs=tuple(sorted({**preset, **cells}.items())),
        clock_mhz=clock_mhz,
        engine=engine,
    )


def _within(job: Job | str, max_tflop: float | None) -> Job | str:
    """``job``, or why it is not simulated."""
    if max_tflop is None or isinstance(job, str) or job.problem.flops() <= 1e12 * max_tflop:
        return job
    return f"{job.problem.flops() / 1e12:.2g} TFLOP: above --max-tflop {max_tflop:g}"


def _arch_name(columns: Mapping[str, str]) -> str:
    name = columns["arch"]
    return name if name.endswith(".toml") else name.replace("-", "_")


def check_overrides(lines: Iterable[Line], overrides: Sequence[str]) -> None:
    """Raise for an override that is wrong for an arch: a slip of the caller's, not of a row."""
    from fasim.arch import load_arch

    for name in dict.fromkeys(_arch_name(columns) for _, columns in lines):
        try:
            load_arch(name)
        except FasimError:
            continue  # its rows say so
        load_arch(name, overrides)


def _simulate(jobs: Iterable[Job], threads: int | None, progress: Progress | None) -> dict[Job, Outcome | str]:
    """Equal rows share a simulation; largest first, so that no thread is left alone with a long run at the end."""
    unique = sorted(dict.fromkeys(jobs), key=lambda job: -job.problem.flops())
    if any(job.engine == "compiled" for job in unique):
        from fasim.engine.compiled import prepare

        prepare()
    return dict(zip(unique, spread(_outcome, unique, threads, progress), strict=True))


def _outcome(job: Job) -> Outcome | str:
    """Simulate; an expected failure is returned as its message."""
    try:
        run = job.run()
    except FasimError as error:
        return str(error)
    return Outcome(run.cycles, run.clock_mhz, run.bottleneck)


def _compare(where: str, columns: Mapping[str, str], outcome: Outcome | str) -> Row:
    ms, clock_mhz, cycles = (_positive(where, columns, name) for name in ("ms", "sm_clock_mhz", "cycles"))
    limit = _positive(where, columns, "clock_limit_mhz")
    in_time = clock_mhz is None and ms is not None
    if isinstance(outcome, Outcome):
        clock_mhz = outcome.clock_mhz if limit is None else min(limit, outcome.clock_mhz)
    if ms is not None and clock_mhz is not None and (cycles is None or in_time):
        cycles = 1e3 * ms * clock_mhz
    elif ms is None and cycles is not None and clock_mhz is not None:
        ms = cycles / (1e3 * clock_mhz)
    row = partial(Row, columns, ms is not None and 1e3 * ms < SHORT_US, measured_cycles=cycles, clock_mhz=clock_mhz)
    if not isinstance(outcome, Outcome):
        return row(reason=outcome)
    if cycles is None:
        return row(reason="no measurement: 'ms' and 'cycles' are empty", predicted_cycles=outcome.cycles)
    return row(
        predicted_cycles=outcome.cycles,
        error=outcome.cycles / cycles - 1,
        compared="time" if in_time else "cycles",
        bottleneck=outcome.bottleneck,
    )


def _effects(rows: Iterable[Row]) -> Iterator[SwitchEffect]:
    """Each predicted variant against the predicted ``<family>_default`` of its shape."""

    def shape(row: Row) -> tuple[str, ...]:
        family = row.columns["variant"].partition("_")[0]
        return (family, *(row.columns.get(name, "") for name in (*REQUIRED, *SHAPE)))

    predicted = [row for row in rows if row.error is not None]
    defaults = {shape(row): row for row in predicted if row.columns["variant"].endswith("_default")}
    for row in predicted:
        default = defaults.get(shape(row))
        if default is not None and default is not row:
            yield SwitchEffect(
                row.columns["variant"],
                row,
                measured=_ratio(row.measured_cycles, default.measured_cycles) - 1,
                predicted=_ratio(row.predicted_cycles, default.predicted_cycles) - 1,
            )


def _ratio(value: float | None, base: float | None) -> float:
    assert value is not None and base is not None  # only rows with an error are compared
    return value / base


def _integer(where: str, columns: Mapping[str, str], name: str) -> int | None:
    text = columns.get(name, "")
    if not text and name not in REQUIRED:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{where}: {name}: '{text}' is not a whole number") from None


def _positive(where: str, columns: Mapping[str, str], name: str) -> float | None:
    text = columns.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{where}: {name}: '{text}' is not a positive number")
    return value
