"""One run as one HTML file without network: headline, timeline, utilisation, stalls, losses, roofline, provenance.

How to read the timeline: rows, colours and hatches are those of ``fasim.views.plot``. Wheel or up and down keys zoom,
dragging or left and right keys move, pointing at a slice says what it is. A solid arrow leads to the slice from what
released it, dashed ones from it to what it released. "busy" is the share of the visible window in which the role worked
or the unit was occupied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasim.analysis.bounds import bounds
from fasim.analysis.critical_path import EventGraph
from fasim.analysis.losses import Loss
from fasim.analysis.whatif import Gain
from fasim.arch import Arch
from fasim.results.reasons import REASONS
from fasim.results.run import IntArray, Run, Trace
from fasim.views.bounds_report import bound_line
from fasim.views.common import (
    IDLE_REASONS,
    Row,
    atomic_output,
    check_suffix,
    knob_text,
    owners_of,
    provenance,
    require_trace,
    rows_of,
    window_of,
)
from fasim.views.explain_report import verdict
from fasim.views.plot import LEGEND, UNIT_COLOUR, role_colours
from fasim.views.report import HEALTHY, busiest_first, tenths, traffic_of
from fasim.views.roofline import Roofline, roofline

SUFFIXES = (".html",)

#: Slices in one file. A slice is six small numbers, about 20 bytes as text: the file stays below 3 MB.
MAX_SLICES = 100_000

_ROOF_SIZE = (620, 250)


def write_html(
    run: Run,
    path: str | Path,
    *,
    arch: Arch | None = None,
    sm: int = 0,
    cycles: tuple[int, int] | None = None,
    losses: Sequence[Loss] = (),
    gains: Sequence[Gain] = (),
) -> None:
    """Write the report of ``run`` with the timeline of ``sm`` into ``path``; the same run gives the same bytes.

    The timeline opens at the window [first, last) ``cycles``, by default at a few iterations in steady state. It
    holds everything recorded of ``sm``, or the ``MAX_SLICES`` around that window, which the page then says.
    ``arch``, the chip of the run, adds the roofline, ``losses`` (:func:`fasim.analysis.losses.losses`) the way from
    peak to achieved, ``gains`` what faster resources would bring.
    Raises ConfigError for another suffix, a run without trace, an ``sm`` or ``cycles`` outside the trace, or a path
    that cannot be written.
    """
    path = Path(path)
    check_suffix(path, SUFFIXES, "report")
    trace = require_trace(run)
    rows = rows_of(trace, sm)
    data, cut = _timeline(trace, rows, window_of(trace, sm, cycles), EventGraph(trace, sm).causes())
    text = _render(
        "report.html.j2",
        run,
        sm=sm,
        traffic=list(traffic_of(run)),
        waterfall=_waterfall(losses),
        verdict=verdict(run, losses, gains) if gains else "",
        gains=_gains(gains),
        roof=None if arch is None else _roof(roofline(run, bounds(run, arch))),
        meta={key: _meta_text(value) for key, value in sorted(run.meta.items())},
        cut=cut,
        truncated=trace.truncated,
        data=data,
    )
    with atomic_output(path) as file:
        file.write(text.encode())


def run_html(run: Run) -> str:
    """Headline, utilisation and stalls of ``run`` as a fragment of HTML, for notebooks."""
    return _render("run.html.j2", run)


def _render(template: str, run: Run, **more: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fasim.views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    return environment.get_template(template).render(
        run=run,
        origin=provenance(run),
        dtype=str(run.meta.get("problem", {}).get("dtype", "")).upper(),
        bound=bound_line(run),
        units=_units(run),
        reasons=[reason for reason in REASONS if any(shares.get(reason) for shares in run.stalls.values())],
        stalls={role: dict(zip(REASONS, tenths(shares), strict=True)) for role, shares in run.stalls.items()},
        healthy=HEALTHY,
        **more,
    )


def _timeline(
    trace: Trace, rows: Sequence[Row], window: tuple[int, int], causes: IntArray
) -> tuple[dict[str, Any], str]:
    """What the page draws, as plain data, and what it has to say when that is not all of the recording.

    ``rows[].slices`` is flat, six integers a slice: ticks since the end of the one before (of the first, since 0),
    length in ticks, reason (on a unit: position in the row's ``owners``, -1 when unknown), name, tile, iteration.
    ``rows[].causes`` is flat too, three integers for a slice with a known cause: its position in the row counted from
    the one before it in this list, row of the cause, and position there counted from the last one given in that row.
    """
    recorded = np.concatenate([row.index for row in rows])
    low, high = int(trace.start[recorded].min()), int(trace.end[recorded].max())
    cut = ""
    if len(recorded) > MAX_SLICES:
        start = np.sort(trace.start[recorded])
        middle = int(np.searchsorted(start, sum(window) * trace.ticks_per_cycle // 2))
        first = min(max(middle - MAX_SLICES // 2, 0), len(start) - MAX_SLICES)
        low, high = int(start[first]), int(start[first + MAX_SLICES - 1])
        shown, total = (f"{tick // trace.ticks_per_cycle:,}" for tick in (high, trace.end[recorded].max()))
        cut = f"Cut to cycles {low // trace.ticks_per_cycle:,} to {shown} of {total}, about {MAX_SLICES:,} of "
        cut += f"{len(recorded):,} slices; choose others with --cycles A:B."
    kept = [row.index[(trace.end[row.index] > low) & (trace.start[row.index] <= high)] for row in rows]
    shown_rows = [_row_data(trace, row, index) for row, index in zip(rows, kept, strict=True)]
    for row_data, links in zip(shown_rows, _links(kept, causes), strict=True):
        row_data["causes"] = links
    data = {
        "ticks": trace.ticks_per_cycle,
        "limits": [low // trace.ticks_per_cycle, -(-high // trace.ticks_per_cycle)],
        "window": list(window),
        "reasons": list(REASONS),
        "legend": LEGEND,
        "idle": list(IDLE_REASONS),
        "names": list(trace.names),
        "colours": role_colours([trace], [rows]),
        "unit_colour": UNIT_COLOUR,
        "rows": shown_rows,
    }
    return data, cut


def _row_data(trace: Trace, row: Row, index: IntArray) -> dict[str, Any]:
    start, end = trace.start[index], trace.end[index]
    kind, owners = owners_of(trace, index) if row.is_unit else (trace.kind[index], [])
    gap = start - np.append(0, end[:-1])[: len(start)]
    columns = (gap, end - start, kind, trace.name[index], trace.tile[index], trace.iteration[index])
    return {
        "label": row.label,
        "unit": row.is_unit,
        "owners": owners,
        "slices": np.column_stack(columns).ravel().tolist(),
    }


def _links(kept: Sequence[IntArray], causes: IntArray) -> Iterator[list[int]]:
    """For each row of trace rows ``kept`` the ``causes`` that are kept too, coded as :func:`_timeline` says."""
    row_of, place = np.full(len(causes), -1), np.zeros_like(causes)
    for number, index in enumerate(kept):
        row_of[index], place[index] = number, np.arange(len(index))
    for index in kept:
        cause = causes[index]
        later = np.flatnonzero((cause >= 0) & (row_of[cause] >= 0))
        row, position = row_of[cause[later]], place[cause[later]]
        step = np.zeros_like(position)
        for number in np.unique(row):
            step[row == number] = np.diff(position[row == number], prepend=0)
        yield np.column_stack((np.diff(later, prepend=0), row, step)).ravel().tolist()


def _units(run: Run) -> list[tuple[str, float, float | None]]:
    """Unit, its utilisation over the run and in steady state; the busiest first."""
    steady = run.utilisation_steady or {}
    return [(unit, percent, steady.get(unit)) for unit, percent in busiest_first(run)]


def _waterfall(losses: Sequence[Loss]) -> list[dict[str, Any]]:
    """Bars from the useful share up to 100 %, ``left`` and ``width`` in % of the room; a negative loss goes back."""
    if not losses:
        return []
    reached = useful = 100 - sum(loss.percent for loss in losses)
    bars = [("useful", "unmasked FLOPs at the dense peak of all SMs", useful, 0.0, useful)]
    for loss in losses:
        before, reached = reached, reached + loss.percent
        bars.append((loss.name, loss.how, loss.percent, min(before, reached), abs(loss.percent)))
    scale = 100 / max(left + width for *_, left, width in bars)
    return [
        {"name": name, "how": how, "percent": percent, "left": scale * left, "width": scale * width}
        for name, how, percent, left, width in bars
    ]


def _gains(gains: Sequence[Gain]) -> list[dict[str, Any]]:
    """Bars to both sides of zero, ``left`` and ``width`` in % of the room."""
    low = min((0.0, *(gain.tenth_percent for gain in gains)))
    scale = 100 / max(max((gain.tenth_percent for gain in gains), default=0.0) - low, 1.0)
    return [
        {
            "name": gain.resource,
            "what": gain.meaning,
            "percent": gain.tenth_percent,
            "left": scale * (min(gain.tenth_percent, 0.0) - low),
            "width": scale * abs(gain.tenth_percent),
        }
        for gain in gains
    ]


def _roof(roof: Roofline) -> dict[str, Any]:
    """Places in a picture of ``_ROOF_SIZE``, y from the top, and what is written there."""
    width, height = _ROOF_SIZE

    def place(value: float, limits: tuple[float, float]) -> float:
        return float(np.log(value / limits[0]) / np.log(limits[1] / limits[0]))

    def x(intensity: float) -> float:
        return width * place(intensity, roof.x_range)

    def y(tflops: float) -> float:
        return height * (1 - place(tflops, roof.y_range))

    def ticks(limits: tuple[float, float], where: Callable[[float], float]) -> list[tuple[float, str]]:
        powers = range(int(np.ceil(np.log10(limits[0]))), int(np.floor(np.log10(limits[1]))) + 1)
        return [(where(10.0**power), f"{10.0**power:,.10g}") for power in powers]

    left = roof.x_range[0]
    return {
        "width": width,
        "height": height,
        "slope": [(0.0, y(roof.peak_tflops * left / roof.ridge)), (x(roof.ridge), y(roof.peak_tflops))],
        "peak": (f"{roof.peak_tflops:,.0f} TFLOP/s", y(roof.peak_tflops)),
        "mufu": None if roof.mufu_tflops is None else (f"{roof.mufu_tflops:,.0f}", y(roof.mufu_tflops)),
        "places": [(name, x(intensity)) for name, intensity in roof.places.items()],
        "run": (f"{roof.tflops:,.0f}", x(roof.intensity), y(roof.tflops)),
        "intensity": roof.intensity,
        "ridge": roof.ridge,
        "x_ticks": ticks(roof.x_range, x),
        "y_ticks": ticks(roof.y_range, y),
    }


def _meta_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_meta_text(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_meta_text, value))
    return f"{value:.10g}" if isinstance(value, float) else knob_text(value)
