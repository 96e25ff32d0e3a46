"""What the trace views share: rows of an SM, the window to show, provenance, safe output files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

from fasim.errors import ConfigError
from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import IntArray, Run, Trace

#: Reasons that mean "nothing to see": the role has not started or has finished.
IDLE_REASONS = ("launch", "tail")

#: Iterations of the busiest role in the window shown when the user does not choose one.
DEFAULT_ITERATIONS = 4


@dataclass(frozen=True)
class Row:
    """One line of a picture: a role of one CTA slot, or a unit, of one SM.

    ``index`` holds the trace rows of the line, in order of start and without overlap.
    """

    label: str
    track: int
    is_unit: bool
    index: IntArray


def require_trace(run: Run) -> Trace:
    """The trace of ``run``. Raises ConfigError when it was not recorded or is empty."""
    if run.trace is None or len(run.trace) == 0:
        raise ConfigError("the run has no trace: it was simulated without one, or read back from JSON")
    return run.trace


def role_label(trace: Trace, track: int, slot: int) -> str:
    """Name of a role, with its CTA slot ("consumer0/1") when the trace has several slots."""
    name = trace.tracks[track]
    return f"{name}/{slot}" if trace.slot.max(initial=0) > 0 else name


def rows_of(trace: Trace, sm: int) -> list[Row]:
    """Rows of one SM: roles by CTA slot in the order of ``trace.tracks``, then units.

    A unit is one row for all CTA slots, or one per slot if slices of different slots overlap.
    Raises ConfigError when nothing was recorded for ``sm``.
    """
    on_sm = np.flatnonzero(trace.sm == sm)
    if len(on_sm) == 0:
        recorded = ", ".join(str(s) for s in np.unique(trace.sm))
        raise ConfigError(f"SM {sm} is not in the trace (choices: {recorded})")
    unit_slice = trace.kind[on_sm] == UNIT_SLICE
    roles: list[Row] = []
    for slot in np.unique(trace.slot[on_sm]):
        for track in range(len(trace.tracks)):
            index = on_sm[~unit_slice & (trace.slot[on_sm] == slot) & (trace.track[on_sm] == track)]
            if len(index):
                roles.append(Row(role_label(trace, track, int(slot)), track, False, index))
    units: list[Row] = []
    for track in range(len(trace.tracks)):
        index = on_sm[unit_slice & (trace.track[on_sm] == track)]
        if np.all(trace.end[index[:-1]] <= trace.start[index[1:]]):
            groups = [(trace.tracks[track], index)] if len(index) else []
        else:
            slots = np.unique(trace.slot[index])
            groups = [(role_label(trace, track, int(s)), index[trace.slot[index] == s]) for s in slots]
        units += [Row(label, track, True, group) for label, group in groups]
    return roles + units


def owners_of(trace: Trace, index: IntArray) -> tuple[IntArray, list[str]]:
    """Which role issued each unit slice of ``index``: positions in the list of labels, -1 when unknown."""
    slots = int(trace.slot.max(initial=0)) + 1
    owner = trace.owner[index]
    code = np.where(owner >= 0, owner * slots + trace.slot[index], -1)
    known = np.unique(code[code >= 0])
    labels = [role_label(trace, int(c) // slots, int(c) % slots) for c in known]
    return np.where(code >= 0, np.searchsorted(known, code), -1), labels


def window_of(trace: Trace, sm: int, cycles: tuple[int, int] | None) -> tuple[int, int]:
    """The window [first, last) in cycles to show of ``sm``.

    That is ``cycles``, or by default a few steady-state iterations around the middle of the recording.
    Raises ConfigError when ``cycles`` is empty or outside the recording.
    """
    if cycles is None:
        return _steady_window(trace, sm, rows_of(trace, sm))
    first, last = cycles
    recorded = int(trace.start.min()) // trace.ticks_per_cycle, -(-int(trace.end.max()) // trace.ticks_per_cycle)
    if first >= last or last <= recorded[0] or first >= recorded[1]:
        raise ConfigError(f"cycles {first}:{last}: choose FIRST < LAST within {recorded[0]}:{recorded[1]}")
    return first, last


def _steady_window(trace: Trace, sm: int, rows: Sequence[Row]) -> tuple[int, int]:
    roles = [row for row in rows if not row.is_unit] or list(rows)
    work = REASONS.index("work")

    def work_ticks(row: Row) -> int:
        mine = row.index[(trace.kind[row.index] == work) & (trace.iteration[row.index] >= 0)]
        return int((trace.end[mine] - trace.start[mine]).sum())

    index = max(roles, key=work_ticks).index
    index = index[trace.iteration[index] >= 0]
    step = np.column_stack((trace.tile[index], trace.iteration[index]))
    first_of_iteration = index[np.append(True, np.any(step[1:] != step[:-1], axis=1))] if len(index) else index
    begin, tile = trace.start[first_of_iteration], trace.tile[first_of_iteration]
    on_sm = trace.sm == sm
    low, high = int(trace.start[on_sm].min()), int(trace.end[on_sm].max())
    n = DEFAULT_ITERATIONS
    if len(begin) > n:
        middle = (begin[:-n] + begin[n:]) // 2
        # A window that starts a work tile or crosses into the next one shows more than steady state.
        unsteady = (tile[:-n] != tile[n:]) | np.append(True, tile[1:-n] != tile[: -n - 1])
        chosen = np.lexsort((abs(middle - (low + high) // 2), unsteady))[0]
        low, high = int(begin[chosen]), int(begin[chosen + n])
    return low // trace.ticks_per_cycle, -(-high // trace.ticks_per_cycle)


def knob_text(value: object) -> str:
    """A knob's value as it is typed on the command line."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def provenance(run: Run) -> list[str]:
    """What was run, in the order of a headline: schedule, problem, arch, overrides, knobs the user set."""
    meta = run.meta
    parts = [str(meta.get(key, "")) for key in ("schedule", "problem_text", "arch")]
    parts += [str(override) for override in meta.get("overrides", ())]
    parts += [f"{name}={knob_text(value)}" for name, value in meta.get("knobs_set", {}).items()]
    return [part for part in parts if part]


def check_suffix(path: Path, choices: Sequence[str], what: str) -> None:
    """Raise ConfigError unless the name of ``path`` ends in one of ``choices``."""
    if not path.name.lower().endswith(tuple(choices)):
        raise ConfigError(f"{path}: unknown {what} format '{path.suffix}' (choices: {', '.join(choices)})")


@contextmanager
def atomic_output(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes ``path`` only when the block ends without an error.

    Raises ConfigError naming the path and the reason when it cannot be written; an existing file
    is then left as it was.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ConfigError(f"{path}: cannot write: not a regular file")
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with partial.open("xb") as file:
            yield file
        os.replace(partial, target)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def table(*heads: str, left: Sequence[int] = (0,), gap: int = 1, **options: Any) -> Table:
    """A table without lines, its columns ``left`` aligned left and the others right, ``gap`` spaces between them."""
    made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", **options)
    for position, head in enumerate(heads):
        made.add_column(head, justify="left" if position in left else "right")
    return made


class FirstThatFits:
    """The first of several renderables that is not too wide for the terminal, else the last: no number is cut off."""

    def __init__(self, *choices: RenderableType) -> None:
        self.choices = choices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        *wider, narrowest = self.choices
        unlimited = options.update(max_width=10_000)
        fitting = (c for c in wider if console.measure(c, options=unlimited).maximum <= options.max_width)
        yield next(fitting, narrowest)
