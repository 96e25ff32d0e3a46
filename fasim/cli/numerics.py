"""The command that says what the numeric tricks of attention kernels cost in accuracy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from fasim.cli.console import console_for, progress_bar, write_json
from fasim.cli.options import JsonOption

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
    from fasim.views.numerics_report import render_numerics

    with progress_bar("computing") as progress:
        data = study(tables or (), seqlen, seed, progress)
    console_for(stderr=json_path == "-").print(render_numerics(data))
    if plot is not None:
        from fasim.views.numerics_plot import plot_numerics

        plot_numerics(data, plot, f".{picture_format}")
    write_json(json_path, data)
