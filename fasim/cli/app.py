"""The ``fasim`` command: parses options, prints, and turns errors into exit codes.

Everything heavy (pydantic models, numba, matplotlib) is imported inside the commands, so that help and
completion answer at once. Exit codes: 0 ok, 1 model error, 2 usage or configuration, 3 out of tolerance.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fasim import __version__
from fasim.cli import calibrate, explain, numerics, validate
from fasim.cli import check as checking
from fasim.cli.console import (
    console_for,
    note,
    parse_integers,
    parse_window,
    write_text,
)
from fasim.cli.options import (
    ArchOption,
    BuildOption,
    ClockOption,
    EngineOption,
    IdealOption,
    JsonOption,
    KnobOption,
    ScheduleArgument,
    SetOption,
    Shape,
    announced,
    complete_arch,
    complete_schedule,
    given_knobs,
    load_chip,
    make_problem,
    shape_options,
)
from fasim.errors import FasimError

#: Runnable examples, the last lines of each command's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "fasim run fa3 --arch h100",
        "fasim run fa3 --arch h200 --seqlen 2048 --causal --knob pingpong=off",
        "fasim run fa3 --arch h100 --head-dim 64 --ideal mufu",
        "fasim run fa3 --arch h100 --seqlen 1024 --timeline --json run.json",
    ),
    **validate.EXAMPLES,
    **calibrate.EXAMPLES,
    **explain.EXAMPLES,
    **checking.EXAMPLES,
    **numerics.EXAMPLES,
    "list": ("fasim list archs", "fasim list schedules", "fasim list knobs fa3", "fasim list builds"),
    "arch": ("fasim arch check arch_models/h100.toml", "fasim arch schema > arch.schema.json"),
}


def _examples(command: str) -> str:
    return "Examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[command])


app = typer.Typer(
    name="fasim",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
list_app = typer.Typer(no_args_is_help=True, help="What there is to run, and on what.", epilog=_examples("list"))
arch_app = typer.Typer(no_args_is_help=True, help="Check architecture files.", epilog=_examples("arch"))
app.add_typer(list_app, name="list")
app.add_typer(arch_app, name="arch")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fasim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Discrete-event simulator of attention kernels on NVIDIA GPUs."""


@app.command(epilog=_examples("run"))
@shape_options()
def run(
    schedule: ScheduleArgument,
    arch: ArchOption,
    shape: Shape,
    clock: ClockOption = None,
    knob: KnobOption = None,
    build: BuildOption = None,
    overrides: SetOption = None,
    ideal: IdealOption = None,
    engine: EngineOption = "compiled",
    json_path: JsonOption = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw what each role and unit did.")] = False,
    cycles: Annotated[
        str | None, typer.Option(metavar="A:B", help="Window of the timeline, picture and trace.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the timeline as .png or .svg.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report with a timeline to zoom: .html.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Perfetto trace: .pftrace, .json or .json.gz.")
    ] = None,
    trace_sms: Annotated[str, typer.Option(metavar="A,B", help="SMs to trace.")] = "0",
    sm: Annotated[int, typer.Option(help="SM of the timeline and picture.")] = 0,
) -> None:
    """Simulate SCHEDULE on an architecture and report time, limits and stalls.

    A shape that is not given is 4 sequences of 4096 tokens with 16 heads of 128, BF16 forward.
    """
    window = parse_window(cycles)
    sms = tuple(sorted({sm, *parse_integers("--trace-sms", trace_sms)}))
    knobs = given_knobs(knob, build)

    from fasim.program.library import load_schedule
    from fasim.studies.simulate import TraceSpec, simulate
    from fasim.views.bounds_report import bound_line
    from fasim.views.report import render_report

    problem = make_problem(shape)
    traced = timeline or any(file is not None for file in (plot, html, trace))
    with announced(engine):
        chip = load_chip(arch, overrides, ideal)
        result = simulate(
            load_schedule(schedule),
            problem,
            chip,
            knobs=knobs,
            clock_mhz=clock,
            engine=engine,
            trace=TraceSpec(sms=sms, cycles=window) if traced else None,
        )
    out = console_for(stderr=json_path == "-")
    out.print(render_report(result))
    out.print(bound_line(result))
    if result.trace is not None and result.trace.truncated:
        note("the trace is incomplete: its buffer filled up; choose a window with --cycles A:B")
    if timeline and result.trace is not None:
        from fasim.views.timeline import render_timeline

        out.print(render_timeline(result.trace, sm=sm, cycles=window, width=out.width))
    if plot is not None:
        from fasim.views.plot import plot_timeline

        plot_timeline([(schedule, result)], plot, sm=sm, cycles=window)
    if html is not None:
        from fasim.views.html import write_html

        write_html(result, html, arch=chip, sm=sm, cycles=window)
    if trace is not None:
        from fasim.views.perfetto import write_trace

        write_trace(result, trace)
    if json_path is not None:
        write_text(json_path, result.to_json())


app.command(epilog=_examples("validate"))(validate.validate)
app.command(epilog=_examples("phases"))(validate.phases)
app.command(epilog=_examples("calibrate"))(calibrate.calibrate)
app.command(epilog=_examples("compare"))(explain.compare)
app.command(epilog=_examples("bounds"))(explain.bounds)
app.command(epilog=_examples("explain"))(explain.explain)
app.command(epilog=_examples("check"))(checking.check)
app.command(epilog=_examples("numerics"))(numerics.numerics)


SomeSchedule = Annotated[
    str | None,
    typer.Argument(
        metavar="[SCHEDULE]", help="A name or a .py file; all that there are.", autocompletion=complete_schedule
    ),
]


@list_app.command("archs", epilog=_examples("list"))
def list_archs() -> None:
    """The architectures that come with fasim."""
    from fasim.arch import list_archs, load_arch
    from fasim.views.lists import render_archs

    console_for().print(render_archs(map(load_arch, list_archs())))


@list_app.command("schedules", epilog=_examples("list"))
def list_schedules() -> None:
    """The schedules that come with fasim."""
    from fasim.program.library import list_schedules, load_schedule
    from fasim.views.lists import render_schedules

    schedules = map(load_schedule, list_schedules())
    console_for().print(render_schedules((s.name, s.architectures, s.summary) for s in schedules))


@list_app.command("knobs", epilog=_examples("list"))
def list_knobs(
    schedule: SomeSchedule = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            "-a",
            help="Only what exists on it: a name or a .toml file.",
            autocompletion=complete_arch,
        ),
    ] = None,
) -> None:
    """The knobs of a schedule with their defaults."""
    from fasim.arch import load_arch
    from fasim.program.library import list_schedules, load_schedule
    from fasim.views.lists import render_knobs

    chip = load_arch(arch) if arch is not None else None
    schedules = map(load_schedule, [schedule] if schedule is not None else list_schedules())
    found = ((s, k) for s in schedules for k in (s.knobs_on(chip) if chip else s.knobs).values())
    console_for().print(render_knobs((s.name, k.name, k.default, k.doc, k.choices) for s, k in found))


@list_app.command("builds", epilog=_examples("list"))
def list_builds(
    schedule: SomeSchedule = None,
) -> None:
    """The builds of a schedule: what compilers made of it. The default of an architecture has a star."""
    from fasim.program.build_files import list_builds, load_build
    from fasim.program.library import list_schedules, load_schedule
    from fasim.views.lists import render_builds

    homes = [load_schedule(name).home for name in ([schedule] if schedule is not None else list_schedules())]
    builds = [load_build(home, name) for home in homes for name in list_builds(home)]
    console_for().print(
        render_builds((b.schedule, b.name, b.default, b.architectures, b.title, b.compiler) for b in builds)
    )


@arch_app.command("check", epilog=_examples("arch"))
def check(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Architecture files.")]) -> None:
    """Load architecture files and report what looks wrong in their numbers."""
    from fasim.arch import check_arch
    from fasim.views.lists import warnings_text

    print(warnings_text({str(file): check_arch(file) for file in files}))


@arch_app.command("schema", epilog=_examples("arch"))
def schema() -> None:
    """Print the JSON schema of architecture files."""
    from fasim.arch import arch_schema

    print(json.dumps(arch_schema(), indent=2))


def main() -> NoReturn:
    """Run the command line and exit; an expected error is one message on stderr, without a traceback."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except FasimError as error:
        note(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this the flush at exit complains again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)
