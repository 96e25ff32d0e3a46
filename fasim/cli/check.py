"""The command that says whether a schedule is right."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fasim.cli.console import console_for, write_json
from fasim.cli.options import (
    ArchOption,
    BuildOption,
    JsonOption,
    KnobOption,
    ScheduleArgument,
    SetOption,
    Shape,
    given_knobs,
    load_chip,
    make_problem,
    shape_options,
)

#: Runnable examples, the last lines of the command's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "check": (
        "fasim check fa3 --arch h100",
        "fasim check fa3 --arch h100 --seqlen 333 --seqlen-k 777 --causal --knob overlap=off",
        "fasim check fa3 --arch h100 --dtype fp8 --json check.json",
        "fasim check fa2 --arch a100 --exp2-degree 3 --rescale-threshold 8 --spread 8",
    ),
}

#: What is checked unless options say otherwise: small, but with several KV blocks and query tiles.
DEFAULT_BATCH, DEFAULT_SEQLEN, DEFAULT_HEADS = 1, 1024, 2


@shape_options(batch=DEFAULT_BATCH, seqlen=DEFAULT_SEQLEN, heads=DEFAULT_HEADS)
def check(
    schedule: ScheduleArgument,
    arch: ArchOption,
    shape: Shape,
    knob: KnobOption = None,
    build: BuildOption = None,
    overrides: SetOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    spread: Annotated[float, typer.Option(help="Standard deviation of Q; 8 makes row maxima grow a lot.")] = 1.0,
    exp2_degree: Annotated[
        int | None, typer.Option(min=1, max=5, help="Exponentials by a polynomial of this degree.")
    ] = None,
    exp2_fraction: Annotated[float, typer.Option(help="Share of them, with --exp2-degree; the others by MUFU.")] = 1.0,
    rescale_threshold: Annotated[
        float | None,
        typer.Option(min=0.0, help="Maxima move, and O is rescaled, when they grow by more powers of two."),
    ] = None,
    p_format: Annotated[
        str | None, typer.Option(help="Format that P is rounded to: bf16, fp16, e4m3, nvfp4 ...")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Check SCHEDULE: budgets, deadlock, races, and the numbers it computes against float64 attention.

    The program is executed on values on a few SMs, so that buffers are used over several work tiles. Numeric choices in
    the place of the schedule's own show what they cost; the timing does not know of them.

    Exit code 1 when something is wrong.
    """
    # Before NumPy is loaded: on tiles this small, BLAS threads cost more than they gain.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    knobs = given_knobs(knob, build)

    from fasim.checker import Numerics
    from fasim.checker.check import check as study
    from fasim.numerics.exp2 import MINIMAX, Exp2
    from fasim.program.library import load_schedule
    from fasim.views.check_report import render_check

    problem = make_problem(shape)
    method = Exp2(exp2_fraction, MINIMAX[exp2_degree]) if exp2_degree else None
    numerics = Numerics(method, rescale_threshold, p_format)
    result = study(load_schedule(schedule), problem, load_chip(arch, overrides, None), knobs, seed, spread, numerics)
    console_for(stderr=json_path == "-").print(render_check(result))
    write_json(json_path, result)
    if not result["passed"]:
        raise typer.Exit(1)
