"""The command that says whether a schedule is right."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from fasim.console import console_for, parse_assignments, write_text
from fasim.options import (
    ArchOption,
    Batch,
    Causal,
    Direction,
    Dtype,
    HeadDim,
    HeadDimV,
    Heads,
    JsonOption,
    KnobOption,
    KvHeads,
    ScheduleArgument,
    Seqlen,
    SeqlenK,
    SetOption,
    load_chip,
    make_problem,
)

#: Runnable examples, the last lines of the command's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "check": (
        "fasim check fa3 --arch h100",
        "fasim check fa3 --arch h100 --seqlen 333 --seqlen-k 777 --causal --knob overlap=off",
        "fasim check fa3 --arch h100 --dtype fp8 --json check.json",
    ),
}

#: What is checked unless options say otherwise: small, but with several KV blocks and query tiles.
DEFAULT_BATCH, DEFAULT_SEQLEN, DEFAULT_HEADS = 1, 1024, 2


def check(
    schedule: ScheduleArgument,
    arch: ArchOption,
    direction: Direction = None,
    batch: Batch = DEFAULT_BATCH,
    seqlen: Seqlen = DEFAULT_SEQLEN,
    seqlen_k: SeqlenK = None,
    heads: Heads = DEFAULT_HEADS,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    causal: Causal = None,
    dtype: Dtype = None,
    knob: KnobOption = None,
    overrides: SetOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    spread: Annotated[float, typer.Option(help="Standard deviation of Q; 8 makes row maxima grow a lot.")] = 1.0,
    json_path: JsonOption = None,
) -> None:
    """Check SCHEDULE: budgets, deadlock, races, and the numbers it computes against float64 attention.

    The program is executed on values on a few SMs, so that buffers are used over several work tiles.

    Exit code 1 when something is wrong.
    """
    # Before NumPy is loaded: on tiles this small, BLAS threads cost more than they gain.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    knobs = parse_assignments("--knob", knob)

    from fasim.library import load_schedule
    from fasim.studies.check import check as study
    from fasim.views.check_report import render_check

    problem = make_problem(
        direction=direction,
        batch=batch,
        seqlen=seqlen,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        dtype=dtype,
    )
    result = study(load_schedule(schedule), problem, load_chip(arch, overrides, None), knobs, seed, spread)
    console_for(stderr=json_path == "-").print(render_check(result))
    if json_path is not None:
        write_text(json_path, json.dumps(result, indent=2) + "\n")
    if not result["passed"]:
        raise typer.Exit(1)
