"""The commands that put runs side by side and say why they take as long as they do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasim.cli.console import console_for, note, parse_assignments, progress_bar, write_json
from fasim.cli.options import (
    NO_SHAPE,
    ArchOption,
    BuildOption,
    ClockOption,
    JsonOption,
    KnobOption,
    ScheduleArgument,
    SetOption,
    Shape,
    announced,
    complete_arch,
    complete_schedule,
    given_knobs,
    make_problem,
    shape_options,
)
from fasim.errors import ConfigError, ToleranceError

if TYPE_CHECKING:
    from fasim.problem import Problem
    from fasim.results.run import Run

#: Runnable examples, the last lines of each command's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "compare": (
        "fasim compare fa3 fa3 --arch h100 --knob-b pingpong=off --plot both.png",
        "fasim compare fa3 fa3 --arch-a h200 --arch-b h100 --seqlen 2048 --fail-above 5",
        "fasim compare fa3 fa3 --arch h100 --set-b sm.mufu.ops_per_cycle=32",
    ),
    "bounds": (
        "fasim bounds fa3 --arch h100 --seqlen 8192 --plot roofline.svg",
        "fasim bounds fa3 --arch h200 --head-dim 64 --causal",
    ),
    "explain": (
        "fasim explain fa3 --arch h100",
        "fasim explain fa3 --arch h200 --seqlen 2048 --head-dim 64 --infinite",
        "fasim explain fa4 --arch b200 --seqlen 2048 --html why.html",
    ),
}

_LABELS = "ABCDEFGH"


def _knobs_of(which: str) -> object:
    return typer.Option(f"--knob-{which.lower()}", metavar="KNOB=VALUE", help=f"Set a knob of {which} (repeatable).")


def _sets_of(which: str) -> object:
    return typer.Option(f"--set-{which.lower()}", metavar="PATH=VALUE", help=f"Override a number of {which}'s arch.")


def _arch_of(which: str) -> object:
    return typer.Option(f"--arch-{which.lower()}", help=f"Architecture of {which}.", autocompletion=complete_arch)


@shape_options()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C...]",
            help="Schedules run now, or .json files written by 'fasim run --json'.",
            autocompletion=complete_schedule,
        ),
    ],
    arch: Annotated[
        str | None,
        typer.Option("--arch", "-a", help="Architecture of all: a name or a .toml file.", autocompletion=complete_arch),
    ] = None,
    arch_a: Annotated[str | None, _arch_of("A")] = None,
    arch_b: Annotated[str | None, _arch_of("B")] = None,
    shape: Shape = NO_SHAPE,
    clock: ClockOption = None,
    knob: KnobOption = None,
    build: BuildOption = None,
    knob_a: Annotated[list[str] | None, _knobs_of("A")] = None,
    knob_b: Annotated[list[str] | None, _knobs_of("B")] = None,
    overrides: SetOption = None,
    set_a: Annotated[list[str] | None, _sets_of("A")] = None,
    set_b: Annotated[list[str] | None, _sets_of("B")] = None,
    json_path: JsonOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the timelines under each other as .png or .svg.")
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(metavar="PCT", help="Exit with 3 when a run takes more time than A by more than PCT per cent."),
    ] = None,
) -> None:
    """Compare runs with the first of them: schedules, knobs, chips, or saved results.

    --knob, --set and the shape hold for all runs made now, options that end in -a and -b for A and B alone.
    """
    problem = make_problem(shape)
    if not 2 <= len(runs) <= len(_LABELS):
        raise ConfigError(f"compare: give 2 to {len(_LABELS)} runs, not {len(runs)}")

    from fasim.analysis.compare import compare as compare_runs
    from fasim.views.compare_report import render_comparison

    own = [(arch_a, knob_a, set_a), (arch_b, knob_b, set_b), *[(None, None, None)] * (len(runs) - 2)]
    labelled: list[tuple[str, Run]] = []
    for label, name, (own_arch, own_knobs, own_sets) in zip(_LABELS, runs, own, strict=False):
        if name.endswith(".json"):
            labelled.append((label, _saved(label, name, own_arch or own_knobs or own_sets, plot)))
            continue
        chosen = own_arch or arch
        if chosen is None:
            raise ConfigError(f"compare: no architecture for {label}: give --arch")
        knobs = {**given_knobs(knob, build), **parse_assignments(f"--knob-{label.lower()}", own_knobs)}
        sets = (*(overrides or ()), *(own_sets or ()))
        labelled.append((label, _simulate(name, problem, chosen, sets, knobs, clock, plot is not None)))
    comparison = compare_runs(labelled)
    if not comparison.same_problem:
        note("the runs solve different problems")
    console_for(stderr=json_path == "-").print(render_comparison(comparison))
    if plot is not None:
        from fasim.views.plot import plot_comparison

        plot_comparison(comparison, plot)
    write_json(json_path, comparison.to_dict(), sort_keys=True)
    if fail_above is not None and (slower := comparison.slower_than(fail_above)):
        found = ", ".join(f"{change.label} is {change.time_percent:.1f} % slower than A" for change in slower)
        raise ToleranceError(f"compare: {found} (allowed: {fail_above:g} %)")


def _saved(label: str, name: str, changed: object, plot: Path | None) -> Run:
    from fasim.analysis.compare import load_run

    if changed:
        raise ConfigError(f"compare: {label} is the saved run {name}; its arch and knobs cannot be changed")
    if plot is not None:
        raise ConfigError(f"{name}: a saved run has no timeline; --plot needs runs made now")
    return load_run(name)


def _simulate(
    schedule: str,
    problem: Problem,
    arch: str,
    overrides: Sequence[str],
    knobs: dict[str, object],
    clock: float | None,
    traced: bool,
) -> Run:
    from fasim.arch import load_arch
    from fasim.program.library import load_schedule
    from fasim.studies.simulate import TraceSpec, simulate

    spec = TraceSpec() if traced else None
    with announced():
        chip = load_arch(arch, overrides)
        return simulate(load_schedule(schedule), problem, chip, knobs=knobs, clock_mhz=clock, trace=spec)


@shape_options()
def bounds(
    schedule: ScheduleArgument,
    arch: ArchOption,
    shape: Shape,
    clock: ClockOption = None,
    knob: KnobOption = None,
    build: BuildOption = None,
    overrides: SetOption = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model, for the memory kept for backward.")] = 80,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the roofline as .png or .svg.")] = None,
) -> None:
    """Show what each unit needs at least, and the arithmetic of naive against fused attention."""
    problem = make_problem(shape)

    from fasim.analysis.bounds import bounds as bounds_of
    from fasim.arch import load_arch
    from fasim.views.bounds_report import render_bounds

    sets = tuple(overrides or ())
    run = _simulate(schedule, problem, arch, sets, given_knobs(knob, build), clock, traced=False)
    found = bounds_of(run, load_arch(arch, sets))
    shown = render_bounds(run, found, layers=layers)
    console_for(stderr=json_path == "-").print(shown)
    if plot is not None:
        from fasim.views.roofline import plot_roofline

        plot_roofline(run, found, plot)
    write_json(json_path, {**found.to_dict(), "meta": run.meta}, sort_keys=True)


@shape_options()
def explain(
    schedule: ScheduleArgument,
    arch: ArchOption,
    shape: Shape,
    clock: ClockOption = None,
    knob: KnobOption = None,
    build: BuildOption = None,
    overrides: SetOption = None,
    infinite: Annotated[bool, typer.Option("--infinite", help="Also with each resource infinitely fast.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Simulations at a time; one per CPU unless given.")] = None,
    json_path: JsonOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report with losses and a timeline to zoom: .html.")
    ] = None,
) -> None:
    """Say why SCHEDULE takes as long as it does.

    Losses from peak to achieved, gains by faster resources, and the critical path.
    """
    problem = make_problem(shape)
    knobs = tuple(given_knobs(knob, build).items())
    if html is not None:
        from fasim.views.common import check_suffix
        from fasim.views.html import SUFFIXES

        check_suffix(html, SUFFIXES, "report")

    from fasim.engine.compiled import prepare
    from fasim.studies.batch import Job
    from fasim.studies.explain import explain as study
    from fasim.views.explain_report import render_explanation

    with announced():
        prepare(traced=True)  # before the progress bar, which a message would break
    with progress_bar("simulating") as progress:
        found = study(
            Job(schedule, problem, arch, tuple(overrides or ()), knobs, clock),
            infinite=infinite,
            threads=jobs,
            progress=progress,
        )
    console_for(stderr=json_path == "-").print(render_explanation(found))
    if html is not None:
        from fasim.arch import load_arch
        from fasim.views.html import write_html

        chip = load_arch(arch, overrides or ())
        write_html(found.run, html, arch=chip, losses=found.losses, gains=found.gains)
    write_json(json_path, found.to_dict(), sort_keys=True)
