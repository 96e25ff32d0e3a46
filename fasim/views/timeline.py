"""Terminal timeline of one SM: what every role and unit does, column by column.

A sample::

    SM 0, cycles 29370 to 41570, 147 cycles per column
               |29370              |32310              |35250              |38190              |
    producer   eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee   0 %
    consumer0  iiiiiii###=##########iiiiiii###=#########iiiiiiii###=#########iiiiiiii###=#########  59 %
    consumer1  ##########iiiiiii###=#########iiiiiiii###=#########iiiiiii###=##########iiiiiii###=  59 %
    tensor     0000000000111111111..0000000001111111111.00000000001111111111.0000000000111111111..  92 %
    tma        ########.............########.............#######..............#######.............  37 %
    # work   i issue   = pipe taken   d dependency   b barrier   f wait for full   e wait for empty
    m memory   . idle, launch, tail
    tensor: 0 consumer0   1 consumer1

How to read it: a row is a warp role (top) or a unit (bottom), a column a stretch of cycles, the character
what took most of that stretch. On the tensor row it is the role whose MMA runs: unbroken ``000111000``
means the two consumers keep the tensor core busy in turns, dots are cycles lost. The number on the
right is the share of the window in which the role worked or the unit was busy.
"""

from __future__ import annotations

import string

import numpy as np
import numpy.typing as npt
from rich.text import Text

from fasim.results.reasons import REASONS
from fasim.results.run import IntArray, Trace
from fasim.views.common import Row, owners_of, rows_of, window_of

#: Character and rich style.
_Mark = tuple[str, str]

#: Character, rich style and legend text of each reason; the order is that of REASONS.
_MARKS: dict[str, tuple[str, str, str]] = {
    "work": ("#", "bold green", "work"),
    "issue": ("i", "cyan", "issue"),
    "pipe": ("=", "yellow", "pipe taken"),
    "dependency": ("d", "magenta", "dependency"),
    "barrier": ("b", "red", "barrier"),
    "full": ("f", "blue", "wait for full"),
    "empty": ("e", "blue", "wait for empty"),
    "memory": ("m", "bright_red", "memory"),
    "launch": (".", "dim", "idle, launch, tail"),
    "tail": (".", "dim", "idle, launch, tail"),
}
_OWNER_STYLES = ("bold blue", "bold yellow", "bold magenta", "bold cyan", "bold green", "bold red")
_IDLE: _Mark = (".", "dim")
_MIN_COLUMNS = 20
_RULER_STEP = 20  # columns between two cycle numbers of the ruler


def render_timeline(trace: Trace, *, sm: int = 0, cycles: tuple[int, int] | None = None, width: int = 100) -> Text:
    """The timeline of ``sm`` as rich text (``.plain`` is the string), at most ``width`` characters wide.

    ``cycles`` is the window [first, last); by default about four steady-state iterations in the middle of
    the recording. Raises ConfigError when ``sm`` or ``cycles`` is not in the trace.
    """
    rows = rows_of(trace, sm)
    first, last = window_of(trace, sm, cycles)
    label_width = max(len(row.label) for row in rows) + 2
    room = max(_MIN_COLUMNS, width - label_width - len(" 100 %"))
    per_column = -(-(last - first) // room)
    columns = -(-(last - first) // per_column)
    edges = (first + per_column * np.arange(columns + 1)) * trace.ticks_per_cycle

    text = Text(no_wrap=True, overflow="ignore")
    unit = "cycle" if per_column == 1 else "cycles"
    text.append(f"SM {sm}, cycles {first} to {last}, {per_column} {unit} per column", style="bold")
    if trace.truncated:
        text.append("\nThe recording is truncated: its buffer filled up before the run ended.", style="yellow")
    text.append("\n" + " " * label_width + _ruler(first, per_column, columns), style="dim")
    owners = _owner_marks(trace, rows)
    for row in rows:
        text.append(f"\n{row.label:<{label_width}}")
        states, marks = _states(trace, row, owners)
        share = _time_share(trace, row, states, len(marks), edges)
        for state in np.argmax(np.vstack((share, 1 - share.sum(axis=0))), axis=0):
            text.append(*([*marks, _IDLE][state]))
        busy = share[: 1 if not row.is_unit else None].sum() / columns
        text.append(f" {100 * busy:3.0f} %", style="dim")
    return text.append_text(_legend(owners, width))


def _ruler(first: int, per_column: int, columns: int) -> str:
    text = ""
    for column in range(0, columns, _RULER_STEP):
        label = f"|{first + column * per_column}"
        text += (label if column + len(label) <= columns else "|").ljust(_RULER_STEP)
    return text.rstrip()


def _owner_marks(trace: Trace, rows: list[Row]) -> dict[str, _Mark]:
    """Mark of each role that owns a tensor slice: its last digit or its initial where that is free."""
    labels = {label for row in rows if _is_tensor(trace, row) for label in owners_of(trace, row.index)[1]}
    marks: dict[str, _Mark] = {}
    for label in sorted(labels):
        wanted = label[-1] if label[-1].isdigit() else label[0]
        taken = {mark for mark, _ in marks.values()}
        mark = next((c for c in wanted + string.digits + string.ascii_letters if c not in taken), "?")
        marks[label] = (mark, _OWNER_STYLES[len(marks) % len(_OWNER_STYLES)])
    return marks


def _is_tensor(trace: Trace, row: Row) -> bool:
    return row.is_unit and trace.tracks[row.track] == "tensor"


def _states(trace: Trace, row: Row, owners: dict[str, _Mark]) -> tuple[IntArray, list[_Mark]]:
    """State of every slice of the row, shape (len(row.index),), and mark of every state."""
    if not row.is_unit:
        return trace.kind[row.index], [_MARKS[reason][:2] for reason in REASONS]
    busy = _MARKS["work"][:2]
    if not _is_tensor(trace, row):
        return np.zeros(len(row.index), dtype=np.int64), [busy]
    owner, labels = owners_of(trace, row.index)
    return np.where(owner >= 0, owner, len(labels)), [*(owners[label] for label in labels), busy]


def _time_share(trace: Trace, row: Row, states: IntArray, count: int, edges: IntArray) -> npt.NDArray[np.float64]:
    """Share of each column spent in each state, shape (count, columns)."""
    share = np.zeros((count, len(edges) - 1))
    for state in np.unique(states):
        mine = row.index[states == state]
        start, end = trace.start[mine], trace.end[mine]
        # Slices of a row do not overlap: time spent up to t is piecewise linear between their ends.
        spent = np.cumsum(end - start)
        knots = np.column_stack((start, end)).ravel()
        values = np.column_stack((spent - (end - start), spent)).ravel()
        share[state] = np.diff(np.interp(edges, knots, values)) / np.diff(edges)
    return share


def _legend(owners: dict[str, _Mark], width: int) -> Text:
    text = Text()
    states = [(mark, style, meaning) for mark, style, meaning in dict.fromkeys(_MARKS.values())]
    roles = [(mark, style, label) for label, (mark, style) in owners.items()]
    for head, entries in (("", states), ("tensor:", roles)):
        if not entries:
            continue
        text.append(f"\n{head}")
        used = len(head)
        for mark, style, meaning in entries:
            gap = "" if used == 0 else " " if used == len(head) else "   "
            if used and used + len(gap) + 2 + len(meaning) > width:
                gap, used = "\n", 0
            text.append(gap).append(mark, style=style).append(f" {meaning}")
            used += len(gap.strip("\n")) + 2 + len(meaning)
    return text
