"""As long as schedules have their numbers in Python, they are those of the builds."""

from __future__ import annotations

import itertools
import sys

import pytest

from fasim.problem import Problem
from fasim.program.build_files import load_build
from fasim.program.builds import Build
from fasim.program.library import load_schedule


def module(schedule: str, name: str):
    load_schedule(schedule)
    return next(m for n, m in sys.modules.items() if n.startswith("fasim_schedules") and n.endswith(f".{name}"))


def same_order(build: Build, region: str, order, **facts: object) -> None:
    loop = build.loop(region, **facts)
    assert loop.rows_first == order.rows
    for runs, stretches in zip(loop.split("wait PV"), (order.early, order.late), strict=True):
        assert [run.label for run in runs] == [stretch.label for stretch in stretches]
        for run, stretch in zip(runs, stretches, strict=True):
            classes = ("fmnmx", "ffma", "ex2", "fadd", "f2fp", "fmul")
            assert {c: run.shares.get(c, 0.0) for c in classes} == {c: getattr(stretch, c) for c in classes}
            assert set(run.shares) <= set(classes)


def counts(*parts) -> dict[str, float]:
    """Sum of (mix, factor), without what is zero."""
    total: dict[str, float] = {}
    for mix, factor in parts:
        for name, count in mix.items():
            total[name] = total.get(name, 0.0) + factor * count
    return {name: pytest.approx(count) for name, count in total.items() if count}


def test_fa4_on_blackwell():
    build = load_build("fa4", "sm100")
    top, parts, grid = module("fa4", "fa4"), module("fa4", "_fa4_parts"), module("fa4", "_fa4_grid")
    for d, dtype, causal, pair, packed, slow in itertools.product(
        [*range(16, 144, 16), 192, 256], ("bf16", "fp16", "fp8", "fp4"), *[(False, True)] * 4
    ):
        if (pair and causal) or (d == 256 and dtype in ("fp8", "fp4")):
            continue
        problem = Problem(head_dim=d, causal=causal, dtype=dtype)
        expected = vars(top._tuning(problem, pair, packed, slow))
        assert build.row("tuning", problem, two_cta=pair, packed=packed, slow_exp2=slow) == expected
    assert build.cost("l2_section") == grid.L2_SECTION_BYTES
    assert build.cost("smem") == top.SMEM_BYTES
    assert build.cost("narrow_rescale_rate") == top.NARROW_RESCALE_RATE
    assert build.cost("fragment") == parts.FRAGMENT
    assert build.cost("prologue") == parts.PROLOGUE_CYCLES
    assert build.cost("fetch") == parts.FETCH_CYCLES
    assert build.cost("slots_per_mma") == parts.SLOTS_PER_MMA
    assert build.cost("rescale_waits", 128) == parts.RESCALE_WAITS
    assert build.cost("rescale_waits", 256) == parts.RESCALE_WAITS / 2
