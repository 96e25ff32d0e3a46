"""Pictures of the tables of ``fasim numerics``, one file each: PNG or SVG.

Input is the JSON form, so a saved file can be drawn as well. Errors are dots on a logarithmic axis, one line per
method or format, with rings where a paper has published a value; skipped rescales are curves over the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasim.errors import ConfigError
from fasim.views.pictures import INK, PALETTE, picture, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

_SIZE_IN = (8.0, 4.0)
_ROW_IN, _MARGIN_IN = 0.32, 1.6  # of a table of dots, which is as high as it has rows


def plot_numerics(data: Mapping[str, Any], folder: str | Path, suffix: str = ".png") -> list[Path]:
    """Draw every table of ``data`` into ``folder`` as NAME + ``suffix`` (".png" or ".svg"); the paths written.

    ``data`` is what :func:`fasim.studies.numerics.numerics` returns. An SVG of the same data has the same bytes.
    Raises ConfigError when the folder or a file cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot make the folder: {error.strerror}") from None
    origin = f"fasim {data['fasim_version']}, {data['seqlen']} keys, seed {data['seed']}"
    paths = []
    for name, rows in data["tables"].items():
        paths.append(folder / f"{name}{suffix}")
        with picture(paths[-1], _SIZE_IN, layout="constrained", font_size=9) as figure:
            _PICTURES[name](figure, rows)
            figure.supxlabel(origin, x=0.995, ha="right", size=7, color=INK)
    return paths


def _exp2(figure: Figure, rows: Rows) -> None:
    labels = [row["method"] for row in rows]
    series = {
        "float32": [row["max_error_fp32"] for row in rows],
        "after rounding to BF16": [row["max_error_bf16"] for row in rows],
    }
    published = [[row["published_fp32"] for row in rows], [row["published_bf16"] for row in rows]]
    _dots(figure, "Error of exp2", "largest relative error", labels, series, published, "FlashAttention-4, table 2")


def _quantise(figure: Figure, rows: Rows) -> None:
    words = {"none": "", "tensor": "tensor scales", "block": "block scales", "own": "scales of 16"}
    labels = [
        ", ".join(filter(None, (row["format"], words[row["scales"]], "rotated" if row["rotated"] else "")))
        for row in rows
    ]
    series = {"RMSE": [row["rmse"] for row in rows]}
    published = [[row["published_rmse"] for row in rows]]
    title = "Attention with Q, K, V and P in one format, outlier-laden inputs"
    _dots(figure, title, "RMSE of the output", labels, series, published, "FlashAttention-3, table 3")


def _probabilities(figure: Figure, rows: Rows) -> None:
    labels, series = [row["format"] for row in rows], {"RMSE": [row["rmse"] for row in rows]}
    _dots(figure, "Attention with P in one format", "RMSE of the output", labels, series)


def _rescale(figure: Figure, rows: Rows) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, who in zip(panels, ("rows", "warps"), strict=True):
        for colour, inputs in zip(PALETTE, dict.fromkeys(row["inputs"] for row in rows), strict=False):
            mine = [row for row in rows if row["inputs"] == inputs]
            thresholds = [row["threshold"] for row in mine]
            axes.plot(thresholds, [row[f"{who}_skipped_percent"] for row in mine], "o-", color=colour, label=inputs)
        axes.axvline(8.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set(title=f"by {who}", xlabel="threshold, log2 units", ylim=(0, 102))
        style(axes)
    panels[0].set_ylabel("skipped rescales, % of tiles")
    panels[1].legend(frameon=False, loc="lower right")
    figure.suptitle("Skipped rescales (dotted: FlashAttention-4's threshold)")


#: One picture for each table.
_PICTURES: dict[str, Callable[[Figure, Rows], None]] = {
    "exp2": _exp2,
    "rescale": _rescale,
    "quantise": _quantise,
    "probabilities": _probabilities,
}


def _dots(
    figure: Figure,
    title: str,
    quantity: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    published: Sequence[Sequence[float | None]] = (),
    source: str = "",
) -> None:
    """One line per label, one colour per series; rings for the ``published`` values of each series that are known."""
    figure.set_figheight(len(labels) * _ROW_IN + _MARGIN_IN)
    axes = figure.add_subplot()
    places = range(len(labels))
    for colour, (name, values) in zip(PALETTE, series.items(), strict=False):
        axes.plot(values, places, "o", color=colour, label=name)
    label = source
    for colour, found in zip(PALETTE, published, strict=False):
        known = [(value, place) for value, place in zip(found, places, strict=True) if value is not None]
        xs, ys = zip(*known, strict=True) if known else ((), ())
        axes.plot(xs, ys, "o", color=colour, markersize=11, fillstyle="none", label=label)
        label = "_"  # one line in the legend is enough
    axes.set(title=title, xlabel=quantity, xscale="log", yticks=places, yticklabels=labels)
    axes.invert_yaxis()
    style(axes, "x")
    if len(axes.lines) > 1:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
