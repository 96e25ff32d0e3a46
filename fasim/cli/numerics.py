"""The command that says what the numeric tricks of attention kernels cost in accuracy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fasim.cli.console import console_for, progress_bar, write_text
from fasim.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

#: Runnable examples, the last lines of the command's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "numerics": (
        "fasim numerics exp2",
        "fasim numerics quantise --seqlen 2048 --plot figures --format svg",
        "fasim numerics probabilities --seqlen 1024 --json numerics.json",
    ),
}


def _complete(incomplete: str) -> list[str]:
    from fasim.studies.numerics import TABLES

    return [name for name in TABLES if name.startswith(incomplete)]


def numerics(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE]...",
            help="exp2, rescale, quantise, probabilities; all unless given.",
            autocompletion=_complete,
            show_default=False,
        ),
    ] = None,
    seqlen: Annotated[int, typer.Option(help="Keys that each query attends to.")] = 8192,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw each table into this folder.")] = None,
    picture_format: Annotated[Literal["png", "svg"], typer.Option("--format", help="Of the pictures.")] = "png",
) -> None:
    """Tables of numeric errors: exp2, conditional rescale, quantisation, rounding of P.

    exp2: by method, in float32 and after rounding to BF16.

    rescale: share of rescales that a threshold avoids, and what it changes.

    quantise: FP8 and NVFP4 with scales and rotation on inputs with outliers.

    probabilities: P in one format, the rest exact.
    """
    # Before NumPy is loaded: on tiles this small, BLAS threads cost more than they gain, on a busy machine far more.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from fasim.studies.numerics import numerics as study

    with progress_bar() as progress:
        bar = progress.add_task("computing", total=None)
        data = study(tables or (), seqlen, seed, lambda done, total: progress.update(bar, completed=done, total=total))
    out = console_for(stderr=json_path == "-")
    for name, rows in data["tables"].items():
        out.print(_table(name, rows), "")
    if plot is not None:
        from fasim.views.numerics_plot import plot_numerics

        plot_numerics(data, plot, f".{picture_format}")
    if json_path is not None:
        write_text(json_path, json.dumps(data, indent=2) + "\n")


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=name, box=None, pad_edge=False, title_justify="left")
    for column, value in rows[0].items():
        heading = column.removesuffix("_percent").replace("_", " ") + (" %" if column.endswith("_percent") else "")
        table.add_column(heading, justify="left" if isinstance(value, str | bool) else "right")
    for row in rows:
        table.add_row(*(Text(_cell(column, value)) for column, value in row.items()))
    return table


def _cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if column == "gain" or column.endswith("_percent"):
        return f"{value:.2f}"
    return f"{value:g}" if column == "threshold" else f"{value:.2e}"
