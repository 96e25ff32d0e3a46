"""The command that turns measurements into the numbers of an architecture file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasim.cli.console import console_for, note, write_text
from fasim.cli.options import ArchOption

#: Runnable examples, the last lines of each command's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "calibrate": (
        "fasim calibrate validation/data/h200_microbench.json --arch h200",
        "fasim calibrate results.json --arch h200 -o my_h200.toml",
    ),
}


def calibrate(
    results: Annotated[Path, typer.Argument(metavar="RESULTS.json", help="Output of validation/microbench/run.py.")],
    arch: ArchOption,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.toml", help="Write the file; only print the table unless given."),
    ] = None,
) -> None:
    """Set the numbers of an architecture file that follow from measurements.

    Order and comments stay; each number set says in its comment where it comes from. What the file inherits from its
    base is stated only where the measurement differs. Values of the memory system are set only when measured on that
    chip; those of the SM hold for every chip with the same SMs, so H200 results also calibrate h100.toml.
    """
    from fasim.studies.calibrate.study import calibrate as study
    from fasim.views.calibrate_report import render_calibration

    result = study(results, arch)
    console_for().print(render_calibration(result))
    if output is not None:
        write_text(str(output), result.text)
        note(f"{output} written")
