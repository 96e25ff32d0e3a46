"""Pictures of the tables of ``fasim numerics``, one file each: PNG or SVG.

Input is the JSON form, so a saved file can be drawn as well. Errors are dots on a logarithmic axis, one line per
method or format, with rings where a paper has published a value; skipped rescales are curves over the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasim.errors import ConfigError
from fasim.views.common import atomic_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito's, as in the timeline
_INK, _GRID = "#222222", "#DDDDDD"
_WIDTH_IN, _ROW_IN, _MARGIN_IN, _CURVES_IN = 8.0, 0.32, 1.6, 4.0


def plot_numerics(data: Mapping[str, Any], folder: str | Path, suffix: str = ".png") -> list[Path]:
    """Draw every table of ``data`` into ``folder`` as NAME + ``suffix`` (".png" or ".svg"); the paths written.

    ``data`` is what :func:`fasim.studies.numerics.numerics` returns. An SVG of the same data has the same bytes.
    Raises ConfigError when the folder or a file cannot be written.
    """
    from matplotlib import rc_context

    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot make the folder: {error.strerror}") from None
    origin = f"fasim {data['fasim_version']}, {data['seqlen']} keys, seed {data['seed']}"
    metadata = {"Date": None} if suffix == ".svg" else {}
    paths = []
    with rc_context({"svg.hashsalt": "fasim", "font.family": "DejaVu Sans", "font.size": 9}):
        for name, rows in data["tables"].items():
            figure = _PICTURES[name](rows)
            figure.supxlabel(origin, x=0.995, ha="right", size=7, color=_INK)
            paths.append(folder / f"{name}{suffix}")
            with atomic_output(paths[-1]) as file:
                figure.savefig(file, format=suffix[1:], dpi=160, metadata=metadata)
    return paths


def _exp2(rows: Rows) -> Figure:
    labels = [row["method"] for row in rows]
    series = {
        "float32": [row["max_error_fp32"] for row in rows],
        "after rounding to BF16": [row["max_error_bf16"] for row in rows],
    }
    published = [[row["published_fp32"] for row in rows], [row["published_bf16"] for row in rows]]
    return _dots("Error of exp2", "largest relative error", labels, series, published, "FlashAttention-4, table 2")


def _quantise(rows: Rows) -> Figure:
    words = {"none": "", "tensor": "tensor scales", "block": "block scales", "own": "scales of 16"}
    labels = [
        ", ".join(filter(None, (row["format"], words[row["scales"]], "rotated" if row["rotated"] else "")))
        for row in rows
    ]
    series = {"RMSE": [row["rmse"] for row in rows]}
    published = [[row["published_rmse"] for row in rows]]
    title = "Attention with Q, K, V and P in one format, outlier-laden inputs"
    return _dots(title, "RMSE of the output", labels, series, published, "FlashAttention-3, table 3")


def _probabilities(rows: Rows) -> Figure:
    labels, series = [row["format"] for row in rows], {"RMSE": [row["rmse"] for row in rows]}
    return _dots("Attention with P in one format", "RMSE of the output", labels, series)


def _rescale(rows: Rows) -> Figure:
    figure = _figure(_CURVES_IN)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, who in zip(panels, ("rows", "warps"), strict=True):
        for colour, inputs in zip(_PALETTE, dict.fromkeys(row["inputs"] for row in rows), strict=True):
            mine = [row for row in rows if row["inputs"] == inputs]
            thresholds = [row["threshold"] for row in mine]
            axes.plot(thresholds, [row[f"{who}_skipped_percent"] for row in mine], "o-", color=colour, label=inputs)
        axes.axvline(8.0, color=_INK, linewidth=0.8, linestyle=":")
        axes.set(title=f"by {who}", xlabel="threshold, log2 units", ylim=(0, 102))
        _style(axes, "both")
    panels[0].set_ylabel("skipped rescales, % of tiles")
    panels[1].legend(frameon=False, loc="lower right")
    figure.suptitle("Skipped rescales (dotted: FlashAttention-4's threshold)")
    return figure


#: One picture for each table.
_PICTURES: dict[str, Callable[[Rows], Figure]] = {
    "exp2": _exp2,
    "rescale": _rescale,
    "quantise": _quantise,
    "probabilities": _probabilities,
}


def _dots(
    title: str,
    quantity: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    published: Sequence[Sequence[float | None]] = (),
    source: str = "",
) -> Figure:
    """One line per label, one colour per series; rings for the ``published`` values of each series that are known."""
    figure = _figure(len(labels) * _ROW_IN + _MARGIN_IN)
    axes = figure.add_subplot()
    places = range(len(labels))
    for colour, (name, values) in zip(_PALETTE, series.items(), strict=False):
        axes.plot(values, places, "o", color=colour, label=name)
    label = source
    for colour, found in zip(_PALETTE, published, strict=False):
        known = [(value, place) for value, place in zip(found, places, strict=True) if value is not None]
        xs, ys = zip(*known, strict=True) if known else ((), ())
        axes.plot(xs, ys, "o", color=colour, markersize=11, fillstyle="none", label=label)
        label = "_"  # one line in the legend is enough
    axes.set(title=title, xlabel=quantity, xscale="log", yticks=places, yticklabels=labels)
    axes.invert_yaxis()
    _style(axes, "x")
    if len(axes.lines) > 1:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _figure(height_in: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, height_in), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, color=_GRID)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
