"""As long as schedules have their numbers in Python, they are those of the builds."""

from __future__ import annotations

import itertools
import sys

import pytest

from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.program.builds import Build, load_build
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


@pytest.mark.parametrize("release", ["2026", "2024"])
def test_fa3(release):
    build = load_build("fa3", release)
    grid, parts, producer, top = (module("fa3", n) for n in ("_fa3_grid", "_fa3_parts", "_fa3_producer", "fa3"))
    for d, dv, causal, dtype in itertools.product(
        range(16, 272, 16), range(16, 272, 16), (False, True), ("bf16", "fp8", "fp16")
    ):
        problem = Problem(head_dim=d, head_dim_v=dv, causal=causal, dtype=dtype)
        try:
            expected = grid.tile(problem, release == "2024")
        except ConfigError:
            with pytest.raises(ConfigError):
                build.tile(problem)
            continue
        row = build.tile(problem)
        assert (row.tile_m, row.tile_n, row.p_in_registers, row.stages) == expected
    for warpgroups, (producing, consuming, launch) in top.REGISTERS.items():
        assert build.row("registers", warpgroups=warpgroups) == {
            "launch": launch,
            "producer": producing,
            "consumer": consuming,
        }
    assert (build.cost("combine_warps"), build.cost("combine_stages")) == (grid.COMBINE_WARPS, grid.COMBINE_STAGES)
    assert build.cost("l2_section") == grid.L2_SECTION_BYTES
    for kind in ("16 bit", "fp8"):
        assert build.cost("setup", kind) == parts.SETUP_CYCLES[kind]
        assert build.cost("draw", kind) == parts.DRAW_CYCLES[kind]
        assert build.mix("loads", kind) == producer.LOADS[kind]
    assert (build.cost("fetch", "before"), build.cost("fetch", "after")) == parts.FETCH_CYCLES
    assert build.cost("fence_o") == parts.FENCE_O_CYCLES
    assert build.cost("fence_p") == parts.FENCE_P_CYCLES
    assert build.cost("loop") == parts.LOOP_CYCLES
    assert build.cost("slots_per_wgmma") == parts.SLOTS_PER_WGMMA
    assert build.cost("fmul_behind_first") == parts.FMUL_BEHIND_FIRST
    assert build.cost("transpose_wavefronts") == producer.TRANSPOSE_WAVEFRONTS
    assert build.cost("round_latencies") == producer.ROUND_LATENCIES
    slots = build.cost("transpose_slots", "block"), build.cost("transpose_slots", "move")
    assert slots == producer.TRANSPOSE_SLOTS
    order = module("fa3", "_fa3_order")
    for region, table in (
        ("overlapped", order.OVERLAPPED),
        ("overlapped_p_in_smem", order.P_IN_SMEM),
        ("overlapped_fp8", order.FP8),
        ("serial", order.SERIAL),
    ):
        for width in range(16, 272, 16):
            head = min((head for head in table if head >= width), default=max(table))
            same_order(build, region, table[head], head_dim=width)
    assert len(build.loops) == sum(len(t) for t in (order.OVERLAPPED, order.P_IN_SMEM, order.FP8, order.SERIAL))


def test_fa4_on_hopper():
    build = load_build("fa4", "sm90")
    hopper, order = module("fa4", "_fa4_hopper"), module("fa4", "_fa3_order")
    parts, producer, grid = (module("fa4", n) for n in ("_fa3_parts", "_fa3_producer", "_fa4_grid"))
    for (d, dv), shapes in hopper.SHAPES.items():
        for causal in (False, True):
            row = build.tile(Problem(head_dim=d, head_dim_v=dv, causal=causal))
            assert hopper.Shape(row.tile_m, row.tile_n, not row.p_in_registers) == shapes[causal]
            assert row.stages == hopper.STAGES
            table = order.FA4_CAUSAL if causal else order.FA4
            same_order(build, "overlapped", table[d, dv], head_dim=d, head_dim_v=dv, causal=causal)
    for warpgroups, (producing, consuming, launch) in hopper.REGISTERS.items():
        assert build.row("registers", warpgroups=warpgroups) == {
            "launch": launch,
            "producer": producing,
            "consumer": consuming,
        }
    assert build.mix("scale") == hopper.SCALE
    assert build.mix("loads") == producer.LOADS["fa4"]
    assert build.cost("setup") == parts.SETUP_CYCLES["16 bit"]
    assert (build.cost("fetch", "before"), build.cost("fetch", "after")) == parts.FETCH_CYCLES
    assert build.cost("fence_o") == parts.FENCE_O_CYCLES
    assert build.cost("fence_p") == parts.FENCE_P_CYCLES
    assert build.cost("loop") == parts.LOOP_CYCLES
    assert build.cost("slots_per_wgmma") == parts.SLOTS_PER_WGMMA
    assert build.cost("fmul_behind_first") == parts.FMUL_BEHIND_FIRST
    assert build.cost("l2_section") == grid.L2_SECTION_BYTES
