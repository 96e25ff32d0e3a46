"""Picture of one SM over time, several runs above one another: PNG or SVG.

Two panels look like this, in colour and with the name of the op in each slice that has room for it::

    ping-pong                        52,685 cycles   740 TFLOP/s   bottleneck tensor
     consumer0  [ QK   ]/[  ][ exp2  ][  ][ QK   ]/[  ][ exp2  ][  ]              59 %
     consumer1  exp2 ][  ][ QK   ]/[  ][ exp2  ][  ][ QK   ]/[  ][ ex              59 %
     tensor     [QK][PV][QK][PV]      [QK][PV][QK][PV]                            92 %
               0                2000                4000            cycles

How to read it: a colour is a role. Solid is work, pale is issue (with the time blocked at issue), hatched is a wait
and its hatch the reason. Slices of the tensor core have the colour of the role whose MMA runs: with ping-pong
the colours alternate without gaps, and a white gap there is time lost. "busy" is the share of the window in
which the role worked or the unit was occupied. All panels have the same scale and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fasim.analysis.compare import Comparison
from fasim.errors import ConfigError
from fasim.results.reasons import REASONS
from fasim.results.run import Run, Trace
from fasim.views.common import (
    IDLE_REASONS,
    Row,
    check_suffix,
    owners_of,
    provenance,
    require_trace,
    rows_of,
    window_of,
)
from fasim.views.pictures import INK, PALETTE, SUFFIXES, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNIT_COLOUR = "#5A5A5A"

#: Hatch of each wait; "work" is solid and "issue" a paler solid.
_HATCH = {
    "pipe": "||||",
    "dependency": "////",
    "barrier": "xxxx",
    "full": "\\\\\\\\",
    "empty": "----",
    "memory": "++++",
}
LEGEND = {
    "work": "work, busy",
    "issue": "issue",
    "pipe": "pipe taken",
    "dependency": "dependency",
    "barrier": "barrier",
    "full": "wait for full",
    "empty": "wait for empty",
    "memory": "memory",
}
_ISSUE_TINT, _WAIT_TINT = 0.55, 0.16  # share of the role's colour, the rest is white

_WIDTH_IN, _ROW_IN, _PANEL_IN, _HEAD_IN, _FOOT_IN = 12.0, 0.36, 0.62, 0.3, 1.3
_LEFT_IN, _RIGHT_IN = 1.15, 0.62
_BAR_HEIGHT = 0.78  # of a row
_LABEL_POINTS = 7.5


def plot_comparison(comparison: Comparison, path: str | Path) -> None:
    """Draw the runs of ``comparison``, see :func:`plot_timeline`."""
    titles = [f"{label}: {run.meta['schedule']} {run.meta['arch']}" for label, run in comparison.runs]
    plot_timeline(list(zip(titles, (run for _, run in comparison.runs), strict=True)), path)


def plot_timeline(
    runs: Sequence[tuple[str, Run]], path: str | Path, *, sm: int = 0, cycles: tuple[int, int] | None = None
) -> None:
    """Draw ``sm`` of each (label, run), one panel per run with a common x axis in cycles, into ``path``.

    By default every panel starts at a steady-state iteration of its own run and all are equally long;
    ``cycles`` shows the window [first, last) of every run instead. The format follows the suffix; an SVG of
    the same runs has the same bytes. Raises ConfigError for another suffix, no runs, a run without trace,
    an ``sm`` or ``cycles`` outside the trace, or a path that cannot be written.
    """
    check_suffix(Path(path), SUFFIXES, "picture")
    if not runs:
        raise ConfigError("nothing to plot: no runs were given")
    traces = [require_trace(run) for _, run in runs]
    windows = [window_of(trace, sm, cycles) for trace in traces]
    length = min(last - first for first, last in windows)
    windows = [(first, first + length) for first, _ in windows]
    rows = [rows_of(trace, sm) for trace in traces]

    heights = [len(panel) * _ROW_IN + _PANEL_IN for panel in rows]
    total = sum(heights) + _HEAD_IN + _FOOT_IN
    with picture(
        path,
        (_WIDTH_IN, total),
        creator=f"fasim {runs[0][1].meta.get('fasim_version', '')}",
        Title="fasim timeline",
        Description=_description(runs),
    ) as figure:
        colours = role_colours(traces, rows)
        top = total - _HEAD_IN
        used: set[str] = set()
        for (label, run), trace, panel, window, height in zip(runs, traces, rows, windows, heights, strict=True):
            top -= height
            place = (_LEFT_IN / _WIDTH_IN, top / total, 1 - (_LEFT_IN + _RIGHT_IN) / _WIDTH_IN)
            axes = figure.add_axes((*place, len(panel) * _ROW_IN / total))
            origin = 0 if cycles else window[0]
            _style_axes(axes, panel, (window[0] - origin, window[1] - origin))
            _titles(axes, label, run)
            for position, row in enumerate(panel):
                used |= _draw_row(axes, trace, row, position, window, origin, colours)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("cycles" if cycles else "cycles from the start of an iteration in steady state", color=INK)
        _decorate(figure, runs, sm, windows, colours, used, total)


def role_colours(traces: Sequence[Trace], rows: Sequence[Sequence[Row]]) -> dict[str, str]:
    """Colour of every role label of all runs, the same in every panel; roles that own tensor work come first."""
    owners: dict[str, None] = {}
    others: dict[str, None] = {}
    for trace, panel in zip(traces, rows, strict=True):
        for row in panel:
            if row.is_unit and trace.tracks[row.track] == "tensor":
                owners |= dict.fromkeys(owners_of(trace, row.index)[1])
            elif not row.is_unit:
                others[row.label] = None
    labels = [*sorted(owners), *(label for label in others if label not in owners)]
    return {label: PALETTE[i % len(PALETTE)] for i, label in enumerate(labels)}


def _tint(colour: str, share: float) -> tuple[float, float, float]:
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 1 - share * (1 - r), 1 - share * (1 - g), 1 - share * (1 - b)


def _style_axes(axes: Axes, panel: Sequence[Row], limits: tuple[int, int]) -> None:
    axes.set_xlim(limits)
    axes.set_ylim(len(panel) - 0.5, -0.5)
    axes.set_yticks(range(len(panel)), [row.label for row in panel])
    axes.tick_params(axis="y", length=0, labelsize=9.5, labelcolor=INK)
    axes.tick_params(axis="x", labelbottom=False, labelsize=8.5, color="#999999", labelcolor=INK)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#999999")
    roles = sum(not row.is_unit for row in panel)
    axes.axhline(roles - 0.5, color="#BBBBBB", linewidth=0.8)


def _titles(axes: Axes, label: str, run: Run) -> None:
    limit = f"bottleneck {run.bottleneck}"
    speed = f"{run.cycles:,.0f} cycles   {run.tflops:.0f} TFLOP/s   {limit}"
    axes.set_title(label, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_title(speed, loc="right", fontsize=9, color="#555555")
    axes.text(1.008, 1.0, "busy", transform=axes.transAxes, fontsize=7.5, color="#777777", va="bottom")


def _draw_row(
    axes: Axes,
    trace: Trace,
    row: Row,
    position: int,
    window: tuple[int, int],
    origin: int,
    colours: dict[str, str],
) -> set[str]:
    """Draw the slices of one row that touch ``window`` (cycles); returns the reasons that occur."""
    low, high = (cycle * trace.ticks_per_cycle for cycle in window)
    index = row.index[(trace.end[row.index] > low) & (trace.start[row.index] < high)]
    begin, end = (np.clip(column[index], low, high) / trace.ticks_per_cycle for column in (trace.start, trace.end))
    spans = np.column_stack((begin - origin, end - begin))
    if row.is_unit:
        owner, labels = owners_of(trace, index)
        looks = [("work", colours.get(labels[o], UNIT_COLOUR) if o >= 0 else UNIT_COLOUR) for o in owner]
    else:
        looks = [(REASONS[kind], colours[row.label]) for kind in trace.kind[index]]
    busy = [look[0] == "work" for look in looks]
    axes.text(
        1.008,
        position,
        f"{100 * spans[busy, 1].sum() / (window[1] - window[0]):.0f} %",
        transform=axes.get_yaxis_transform(),
        fontsize=8.5,
        color=INK,
        va="center",
    )
    for look in dict.fromkeys(looks):
        reason, colour = look
        if reason not in IDLE_REASONS:
            bars = spans[[other == look for other in looks]].tolist()
            axes.broken_barh(bars, (position - _BAR_HEIGHT / 2, _BAR_HEIGHT), **_look(reason, colour))
    _label_slices(axes, trace, index, spans, position, looks)
    return {reason for reason, _ in looks} - set(IDLE_REASONS)


def _look(reason: str, colour: str) -> dict[str, Any]:
    if reason == "work":
        return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.7}
    if reason == "issue":
        return {"facecolor": _tint(colour, _ISSUE_TINT), "edgecolor": "white", "linewidth": 0.7}
    return {
        "facecolor": _tint(colour, _WAIT_TINT),
        "edgecolor": _tint(colour, 0.6),
        "hatch": _HATCH[reason],
        "linewidth": 0.0,
    }


def _label_slices(
    axes: Axes, trace: Trace, index: Any, spans: Any, position: int, looks: Sequence[tuple[str, str]]
) -> None:
    """Write the op name into work and issue slices it fits in."""
    from matplotlib.textpath import TextPath

    left, right = axes.get_xlim()
    points = (_WIDTH_IN - _LEFT_IN - _RIGHT_IN) * 72 / (right - left)  # points per cycle
    widths: dict[str, float] = {}
    for i, (start, length), (reason, colour) in zip(index, spans, looks, strict=True):
        name = trace.names[trace.name[i]]
        if not name or reason not in ("work", "issue"):
            continue
        if name not in widths:
            widths[name] = TextPath((0, 0), name, size=_LABEL_POINTS).get_extents().width
        if widths[name] + 4 <= length * points:
            ink = "white" if reason == "work" and _is_dark(colour) else INK
            middle = start + length / 2
            axes.text(middle, position, name, ha="center", va="center_baseline", fontsize=_LABEL_POINTS, color=ink)


def _is_dark(colour: str) -> bool:
    """Whether white reads better than black on ``colour`` (ITU-R BT.601 luma below 0.55)."""
    r, g, b = _tint(colour, 1.0)
    return 0.299 * r + 0.587 * g + 0.114 * b < 0.55


def _decorate(
    figure: Figure,
    runs: Sequence[tuple[str, Run]],
    sm: int,
    windows: Sequence[tuple[int, int]],
    colours: dict[str, str],
    used: set[str],
    total: float,
) -> None:
    from matplotlib.patches import Patch

    edge = 0.12 / _WIDTH_IN
    top = 1 - 0.3 / total
    figure.text(edge, top, f"SM {sm} over time", fontsize=14, fontweight="bold", color=INK, va="center")
    figure.text(1 - edge, top, _common_provenance(runs), fontsize=9, color="#555555", ha="right", va="center")
    roles = [Patch(label=label, **_look("work", colour)) for label, colour in colours.items()]
    reasons = [Patch(label=LEGEND[reason], **_look(reason, "#777777")) for reason in REASONS if reason in used]
    for handles, height in ((roles, 0.5), (reasons, 0.26)):
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(edge, height / total),
            ncols=len(handles),
            fontsize=8,
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            columnspacing=1.2,
            handlelength=2.2,
            handleheight=1.1,
        )
    figure.text(edge, 0.12 / total, _footer(runs, windows), fontsize=7, color="#777777", va="center")


def _common_provenance(runs: Sequence[tuple[str, Run]]) -> str:
    """What all runs share; what differs is for the labels of the panels to say."""
    first, *others = (provenance(run) for _, run in runs)
    return " · ".join(part for part in first if all(part in other for other in others))


def _footer(runs: Sequence[tuple[str, Run]], windows: Sequence[tuple[int, int]]) -> str:
    version = runs[0][1].meta.get("fasim_version", "")
    shown = "; ".join(f"{label}: cycles {a} to {b}" for (label, _), (a, b) in zip(runs, windows, strict=True))
    return f"fasim {version}   {shown}"


def _description(runs: Sequence[tuple[str, Run]]) -> str:
    return "; ".join(
        f"{label}: {' · '.join(provenance(run))}, arch digest {run.meta.get('arch_digest')}" for label, run in runs
    )
