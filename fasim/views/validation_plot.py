"""Picture of a validation: predicted against measured, and the error by sequence length. PNG or SVG.

Input is the JSON form, so a saved file can be drawn as well. A colour and marker is a kernel and data type; hollow is
causal. Cycles are drawn, at the clock that each row was compared at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasim.errors import ConfigError
from fasim.views.common import check_suffix
from fasim.views.pictures import INK, PALETTE, SUFFIXES, picture, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]

_MARKERS = "os^DvPX"
_SIZE_IN = (10.0, 4.6)

#: Errors within these per cent are marked by a band: the goal for a row.
_BAND_PERCENT = 10.0


def plot_validation(data: Mapping[str, Any], path: str | Path) -> None:
    """Draw ``data``, what :meth:`fasim.results.validation.Validation.to_dict` returns.

    An SVG of the same data has the same bytes. Raises ConfigError for another suffix, for data without a predicted
    row, and for a file that cannot be written.
    """
    check_suffix(Path(path), SUFFIXES, "picture")
    rows = [row for row in data["rows"] if row["error"] is not None]
    if not rows:
        raise ConfigError(f"{path}: nothing to draw: no row was predicted")
    with picture(path, _SIZE_IN, layout="constrained", font_size=9) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _against_measured(left, rows)
        _by_length(right, rows)
        figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside right center")
        origin = f"fasim {data['fasim_version']}, {Path(data['data']).name}, {len(rows)} rows; hollow: causal"
        figure.supxlabel(origin, x=0.995, ha="right", size=7, color=INK)


def _against_measured(axes: Axes, rows: Rows) -> None:
    ends = [pick(row["measured_cycles"] for row in rows) for pick in (min, max)]
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    for name, colour, marker, mine in _series(rows):
        _points(axes, mine, "measured_cycles", "predicted_cycles", 1.0, colour, marker, name)
    axes.set(xscale="log", yscale="log", xlabel="measured, cycles", ylabel="predicted, cycles")
    style(axes)


def _by_length(axes: Axes, rows: Rows) -> None:
    lengths = sorted({_keys(row) for row in rows})
    axes.axhspan(-_BAND_PERCENT, _BAND_PERCENT, color="#F2F2F2", zorder=0)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    series = list(_series(rows))
    for i, (_, colour, marker, mine) in enumerate(series):
        shifted = [{**row, "at": _keys(row) * 1.03 ** (i - (len(series) - 1) / 2)} for row in mine]
        _points(axes, shifted, "at", "error", 100.0, colour, marker, "_")
    axes.set(xscale="log", xlabel="key tokens", ylabel="error, % of the measurement")
    shown = [n for n in lengths if n & (n - 1) == 0] or lengths
    axes.set_xticks(shown, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in shown])
    axes.set_xticks([], minor=True)
    style(axes)


def _keys(row: Mapping[str, Any]) -> int:
    return int(row.get("seqlen_k") or row["seqlen_q"])


def _points(axes: Axes, rows: Rows, x: str, y: str, scale: float, colour: str, marker: str, label: str) -> None:
    """``scale`` x ``y`` over ``x``, causal rows hollow."""
    for causal in (False, True):
        mine = [row for row in rows if bool(row["causal"]) == causal]
        xs, ys = [row[x] for row in mine], [scale * row[y] for row in mine]
        fill = "none" if causal else "full"
        named = label if not causal or len(mine) == len(rows) else "_"
        axes.plot(xs, ys, marker, color=colour, fillstyle=fill, markersize=5, label=named)


def _series(rows: Rows) -> Iterator[tuple[str, str, str, Rows]]:
    """Name, colour, marker and rows of each kernel and data type, in the order of the file."""
    names = dict.fromkeys(f"{row['kernel']} {row['dtype']}" for row in rows)
    for name, colour, marker in zip(names, cycle(PALETTE), cycle(_MARKERS), strict=False):
        yield name, colour, marker, [row for row in rows if f"{row['kernel']} {row['dtype']}" == name]
