"""The commands that compare predictions with measurements: timings, hardware counters, stamps inside a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasim.cli.console import console_for, progress_bar, write_json
from fasim.cli.options import EngineOption, JsonOption, SetOption, announced
from fasim.errors import ConfigError, ToleranceError, did_you_mean

#: Runnable examples, the last lines of each command's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "validate": (
        "fasim validate --data validation/data/h200_timing.csv --kernel fa3",
        "fasim validate --data validation/data/h200_fa3_ablations.csv --effects",
        "fasim validate --data validation/data/published_timing.csv --where grade=A",
        "fasim validate --data validation/data/h200_triton.csv --plot errors.svg",
        "fasim validate --counters validation/data/h200_counters.csv",
    ),
    "phases": (
        "fasim phases validation/data/h200_fa3_phases.csv --kernels validation/data/h200_fa3_ablations.csv",
        "fasim phases validation/data/h200_fa3_phases.csv --kernels validation/data/h200_fa3_ablations.csv"
        " --variant d128c_default --trace phases.json",
        "fasim phases validation/data/h200_triton_phases.csv --kernels validation/data/h200_triton_phases_kernels.csv",
    ),
}


#: The rows above it of the published data take several times as long as all others together.
MAX_TFLOP = 30.0


def validate(
    data: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Measured timings; columns as in validation/data.")
    ] = None,
    counters: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Hardware counters of whole launches (Nsight Compute), in their place."),
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel (repeatable).")] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=CELL", help="Only rows with this cell (repeatable).")
    ] = None,
    max_tflop: Annotated[
        float, typer.Option(min=0, help="Leave out rows of more TFLOP than this: they simulate for minutes.")
    ] = MAX_TFLOP,
    overrides: SetOption = None,
    engine: EngineOption = "compiled",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Timings simulated at a time; one per CPU unless given.")
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row.")] = False,
    effects: Annotated[
        bool, typer.Option("--effects", help="Compare each variant with the default variant of its shape.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw predicted against measured, and errors by length, as .png or .svg."),
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(metavar="PCT", help="Exit with 3 when the mean absolute error of a group is above PCT per cent."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Compare predictions with measurements, per row and per group.

    Rows without a clock are compared in time, at the clock that the architecture holds under this load.

    With --counters: utilisation and traffic of every launch, and the mean absolute error of each unit.

    Rows that cannot be predicted are listed with the reason.
    """
    if counters is not None:
        if data is not None or rows or effects or plot is not None or fail_above is not None:
            raise ConfigError("--counters: --data, --rows, --effects, --plot and --fail-above are for timings")
        _validate_counters(counters, kernel, overrides, engine, json_path)
        return
    if data is None:
        raise ConfigError("validate: give --data (timings) or --counters")

    from fasim.studies.validate.timing import validate as study
    from fasim.views.validate_report import render_validation

    with announced(engine), progress_bar("simulating") as progress:
        result = study(
            data,
            kernels=kernel or (),
            overrides=overrides or (),
            engine=engine,
            threads=jobs,
            cells=_cells(data, where),
            max_tflop=max_tflop,
            effects=effects,
            progress=progress,
        )
    console_for(stderr=json_path == "-").print(render_validation(result, rows=rows))
    if plot is not None:
        from fasim.views.validation_plot import plot_validation

        plot_validation(result.to_dict(), plot)
    write_json(json_path, result.to_dict())
    if fail_above is not None:
        failures = result.failures(fail_above / 100)
        if failures:
            raise ToleranceError(f"{data}: above {fail_above:g} %: {'; '.join(failures)}")


def _cells(data: Path, where: list[str] | None) -> dict[str, str]:
    """``--where`` as cells by column; a column that the file does not have is the caller's slip."""
    from fasim.studies.validate.timing import read_lines

    pairs = [text.partition("=") for text in where or ()]
    names = read_lines(data, ())[1] if pairs else []
    for name, equals, _ in pairs:
        if not equals or name not in names:
            raise ConfigError(f"--where {name}: column=cell is expected, of {data}{did_you_mean(name, names)}")
    return {name: cell for name, _, cell in pairs}


def _validate_counters(
    path: Path, kernels: list[str] | None, overrides: list[str] | None, engine: EngineOption, json_path: str | None
) -> None:
    from fasim.studies.validate.counters import compare_counters
    from fasim.views.counters_report import render_counters

    with announced(engine), progress_bar("simulating") as progress:
        result = compare_counters(
            path,
            kernels=kernels or (),
            overrides=overrides or (),
            engine=engine,
            progress=progress,
        )
    console_for(stderr=json_path == "-").print(render_counters(result))
    write_json(json_path, result.to_dict())


def phases(
    stamps: Annotated[Path, typer.Argument(metavar="STAMPS.csv", help="Cycle stamps, as in validation/data.")],
    kernels: Annotated[Path, typer.Option(metavar="FILE.csv", help="Timings: the shape and knobs of each variant.")],
    variant: Annotated[list[str] | None, typer.Option(help="Only this variant (repeatable).")] = None,
    overrides: SetOption = None,
    engine: EngineOption = "compiled",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write both as a Perfetto trace: .pftrace, .json or .json.gz."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Compare the phases of an iteration with cycle stamps taken inside the real kernel.

    Medians in cycles: period; issue of QK and PV; from its start to S; softmax, from S to the next start; offset of
    warpgroup 1, from a start of warpgroup 0. Stamps of your own GPU: validation/triton_phases.py.
    """
    from fasim.studies.validate.phases import compare_phases
    from fasim.views.phases_report import render_phases, write_phases

    with announced(engine), progress_bar("simulating") as progress:
        result = compare_phases(
            stamps,
            kernels,
            variants=variant or (),
            overrides=overrides or (),
            engine=engine,
            progress=progress,
        )
    console_for(stderr=json_path == "-").print(render_phases(result))
    if trace is not None:
        write_phases(result, trace)
    write_json(json_path, result.to_dict())
