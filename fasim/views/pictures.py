"""What the pictures have in common: colours, a figure to draw into, and its safe way into a PNG or SVG file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fasim.views.common import atomic_output, check_suffix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")

#: Okabe and Ito's palette (jfly.uni-koeln.de/color, 2008), told apart in all common forms of colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
INK = "#222222"
_GRID = "#DDDDDD"


@contextmanager
def picture(
    path: str | Path,
    size_in: tuple[float, float],
    *,
    layout: Literal["constrained"] | None = None,
    font_size: float = 10.0,
    creator: str = "",
    **texts: str,
) -> Iterator[Figure]:
    """A white figure of ``size_in`` inches; what the block has drawn is written to ``path`` at its end.

    ``creator`` and ``texts`` go into the file's metadata. The suffix picks
    the format, and an SVG of the same drawing has the same bytes. Raises ConfigError for another suffix and for a
    path that cannot be written.
    """
    path = Path(path)
    check_suffix(path, SUFFIXES, "picture")

    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metadata: dict[str, str | None] = dict(texts)
    svg = path.suffix.lower() == ".svg"
    if svg:
        metadata["Date"] = None
    if creator:
        metadata["Creator" if svg else "Software"] = creator
    with rc_context(
        {"svg.hashsalt": "fasim", "hatch.linewidth": 0.6, "font.family": "DejaVu Sans", "font.size": font_size}
    ):
        figure = Figure(figsize=size_in, facecolor="white", layout=layout)
        FigureCanvasAgg(figure)
        yield figure
        with atomic_output(path) as file:
            figure.savefig(file, format=path.suffix[1:].lower(), dpi=160, metadata=metadata)


def style(axes: Axes, grid: Literal["x", "y", "both"] = "both") -> None:
    """A pale grid behind the data, and no frame above and to the right."""
    axes.grid(axis=grid, color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
