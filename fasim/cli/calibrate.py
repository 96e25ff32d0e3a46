"""The command that turns measurements into the numbers of an architecture file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fasim.cli.console import console_for, note, progress_bar, write_text
from fasim.cli.options import ArchOption, announced
from fasim.errors import ConfigError

#: Runnable examples, the last lines of each command's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "calibrate": (
        "fasim calibrate validation/data/h200_microbench.json --arch h200",
        "fasim calibrate results.json --arch h200 -o my_h200.toml",
        "fasim calibrate --fit-kernels validation/data/h200_timing.csv --arch h100 --cross-validate 3",
    ),
}


def calibrate(
    arch: ArchOption,
    results: Annotated[
        Path | None, typer.Argument(metavar="[RESULTS.json]", help="Output of validation/microbench/run.py.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.toml", help="Write the file; only print the table unless given."),
    ] = None,
    kernels: Annotated[
        list[Path] | None,
        typer.Option(
            "--fit-kernels",
            metavar="FILE.csv",
            help="Fit what no microbenchmark gives on a half of these timings (columns as for validate). Repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws the half that --fit-kernels fits on.")] = 0,
    cross_validate: Annotated[
        int | None,
        typer.Option(min=1, metavar="SEEDS", help="Fit on either half of this many splits; report on the other half."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Simulations of --fit-kernels at a time; one per CPU.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the simulations of --fit-kernels, and use those there are."),
    ] = None,
) -> None:
    """Set the numbers of an architecture file that follow from measurements.

    Order and comments stay; each number set says in its comment where it comes from. What the file inherits from its
    base is stated only where the measurement differs. Values of the memory system are set only when measured on that
    chip; those of the SM hold for every chip with the same SMs, so H200 results also calibrate h100.toml.

    With --fit-kernels: the few numbers that only whole kernels show, by least squares; the other half of the timings
    says how well they carry over. The timings name the architecture they are simulated on.
    """
    if (results is None) == (not kernels):
        raise ConfigError("calibrate: give RESULTS.json (microbenchmarks) or --fit-kernels (timings)")
    if not kernels and cross_validate is not None:
        raise ConfigError("--cross-validate: needs --fit-kernels")
    if cross_validate is not None and output is not None:
        raise ConfigError("--cross-validate: writes no file; give --seed and -o to write one fit")
    if not kernels:
        assert results is not None
        text = _from_microbenchmarks(results, arch)
    else:
        text = _from_kernels(kernels, arch, seed, cross_validate, jobs, resume)
    if output is not None:
        write_text(str(output), text)
        note(f"{output} written")


def _from_microbenchmarks(results: Path, arch: str) -> str:
    from fasim.studies.calibrate.study import calibrate as study
    from fasim.views.calibrate_report import render_calibration

    result = study(results, arch)
    console_for().print(render_calibration(result))
    return result.text


def _from_kernels(
    kernels: Sequence[Path], arch: str, seed: int, seeds: int | None, jobs: int | None, resume: Path | None
) -> str:
    from fasim.studies.calibrate.study import with_values
    from fasim.studies.kernel_fit import KERNEL_FIT, Fitter, provenance
    from fasim.views.calibrate_report import render_fits

    with announced(), progress_bar() as progress:
        bar = progress.add_task("points simulated", total=None)
        fitter = Fitter(
            kernels,
            threads=jobs,
            resume=resume,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
        fits = fitter.cross_validate(range(seeds)) if seeds is not None else [fitter.fit_half(seed, 0)]
    console_for().print(render_fits(KERNEL_FIT, fits))
    values = zip(KERNEL_FIT.parameters, fits[0].values, strict=True)
    note_text = provenance(KERNEL_FIT, kernels, fits[0])
    return with_values(arch, [(p.key, f"{value:g}", note_text) for p, value in values])
