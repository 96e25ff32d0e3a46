"""Bounds and the arithmetic of FlashAttention, what-ifs, and the loss breakdown of every schedule on every chip."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fasim.analysis.bounds import bounds, story
from fasim.analysis.losses import STEPS, machines
from fasim.analysis.whatif import RESOURCES, faster, has
from fasim.arch import list_archs, load_arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.program.library import list_schedules, load_schedule
from fasim.results.run import Run
from fasim.studies.batch import Job
from fasim.studies.explain import explain
from fasim.studies.simulate import simulate

HEAD_8K = Problem(batch=1, seqlen_q=8192, heads_q=1, head_dim=128)


def cases() -> list[tuple[str, str]]:
    """Every schedule on every chip it exists for."""
    architectures = {chip: load_arch(chip).architecture for chip in list_archs()}
    return [
        (name, chip)
        for name in list_schedules()
        for chip in architectures
        if architectures[chip] in load_schedule(name).architectures
    ]


def small(name: str, chip: str, head_dim: int = 128) -> Job:
    direction = load_schedule(name).directions[0]
    problem = Problem(batch=1, seqlen_q=1024, heads_q=2, head_dim=head_dim, direction=direction)
    return Job(name, problem, chip, ("chip.sm_count=4",))


@cache
def h100(*overrides: str, **shape: object) -> Run:
    problem = Problem(**{"batch": 1, "seqlen_q": 1024, "heads_q": 2, **shape})  # type: ignore[arg-type]
    return simulate("fa3", problem, load_arch("h100", ("chip.sm_count=4", *overrides)))


# --- the arithmetic, by hand ---------------------------------------------------------------------------------------
def test_naive_intensity_is_half_the_head_dim():
    # 4 N^2 d FLOP over 4 passes x 2 byte x N^2
    assert story(HEAD_8K, load_arch("h100"), 1830).naive_intensity == 64
    assert story(replace_dim(HEAD_8K, 64), load_arch("h100"), 1830).naive_intensity == 32


def replace_dim(problem: Problem, head_dim: int) -> Problem:
    return Problem(**{**vars(problem), "head_dim": head_dim, "head_dim_v": head_dim})


def test_fused_intensity_is_half_the_sequence():
    # 4 N^2 d FLOP over 4 tensors x 2 byte x N d
    assert story(HEAD_8K, load_arch("h100"), 1830).fused_intensity == 4096


def test_tile_of_128_at_d128_is_160_kb():
    # Q, K and V 3 x 128 x 128 x 2 byte = 96 KiB, scores 128 x 128 x 4 byte = 64 KiB
    told = story(HEAD_8K, load_arch("h100"), 1830)
    assert told.tile_bytes == 160 * 1024
    assert told.smem_bytes == 227 * 1024


def test_memory_kept_for_backward():
    told = story(HEAD_8K, load_arch("h100"), 1830)
    assert told.naive_kept_bytes == 5 * 8192**2  # 336 MB
    assert told.fused_kept_bytes == 8192 * (128 * 2 + 4)  # 2.1 MB
    assert 64 * 80 * told.naive_kept_bytes == pytest.approx(1.7e12, rel=0.02)
    assert 64 * 80 * told.fused_kept_bytes == pytest.approx(11e9, rel=0.02)


def test_naive_round_trips_take_several_times_the_arithmetic_on_h100():
    told = story(HEAD_8K, load_arch("h100"), 1830)
    assert told.arithmetic_s == pytest.approx(4 * 8192**2 * 128 / 989e12, rel=0.01)  # 34.7 us
    assert told.naive_traffic_s == pytest.approx(8 * 8192**2 / 3.02e12, rel=0.01)  # 178 us
    assert told.ridge / told.naive_intensity == pytest.approx(told.naive_traffic_s / told.arithmetic_s)
    once = told.naive_kept_bytes / 3.35e12  # what is kept, moved once at the data sheet's bandwidth
    assert once / told.arithmetic_s == pytest.approx(3, rel=0.05)


def test_backward_has_two_and_a_half_times_the_flops():
    backward = Problem(**{**vars(HEAD_8K), "direction": "bwd"})
    assert backward.flops() / HEAD_8K.flops() == story(HEAD_8K, load_arch("h100"), 1830).backward_flops_ratio


# --- bounds of runs --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "chip"), cases())
def test_no_run_is_faster_than_its_bounds(name: str, chip: str):
    job = small(name, chip)
    found = bounds(job.run(), load_arch(chip, job.overrides))
    assert found.limit.executed_cycles <= found.cycles
    assert found.needed_cycles <= found.cycles
    for bound in found.units:
        assert 0 <= bound.executed_cycles <= found.limit.executed_cycles
    tensor = next(bound for bound in found.units if bound.unit == "tensor")
    assert tensor.executed_cycles >= 0.999 * tensor.needed_cycles


def test_needed_work_by_hand():
    run = h100()
    needed = {bound.unit: bound.needed_cycles for bound in bounds(run, load_arch("h100", ("chip.sm_count=4",))).units}
    assert needed["tensor"] == 4 * 2 * 1024**2 * 128 / (4096 * 4)
    assert needed["mufu"] == 2 * 1024**2 / (16 * 4)
    hbm = 4 * 2 * 1024 * 128 * 2 + 4 * 2 * 1024  # Q, K, V, O and the log-sum-exp
    assert needed["hbm"] == pytest.approx(hbm / 3.02e12 * run.clock_mhz * 1e6)


def test_a_memory_bound_problem_is_bound_by_hbm():
    overrides = ("chip.sm_count=4", "hbm.achieved_bytes_per_second=1e10")
    found = bounds(h100(overrides[1]), load_arch("h100", overrides))
    assert found.limit.unit == "hbm"
    assert found.simulated_intensity < found.story.ridge
    assert found.needed_cycles > 0.5 * found.cycles


# --- what-ifs ------------------------------------------------------------------------------------------------------
def test_every_path_exists_on_some_chip():
    chips = [load_arch(name).model_dump() for name in list_archs()]

    def has_path(node: object, path: str) -> bool:
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node is not None

    for resource in RESOURCES.values():
        for path in (*resource.rates, *resource.times):
            assert any(has_path(chip, path) for chip in chips), path


def test_faster_multiplies_rates_and_divides_times():
    arch = load_arch("h100")
    twice = load_arch("h100", faster(arch, "mufu", 2))
    assert twice.sm.mufu.ops_per_cycle == 2 * arch.sm.mufu.ops_per_cycle
    assert twice.sm.interference.mufu_cycles == arch.sm.interference.mufu_cycles / 2
    barriers = load_arch("h100", faster(arch, "barriers", 4))
    assert barriers.sm.sync.mbarrier_wake_cycles == arch.sm.sync.mbarrier_wake_cycles / 4
    assert barriers.sm.mufu == arch.sm.mufu


def test_only_chips_with_tensor_memory_have_tmem():
    assert has(load_arch("b200"), "tmem") and not has(load_arch("h100"), "tmem")


def test_unknown_resource():
    with pytest.raises(ConfigError, match=r"unknown resource 'mufo'; did you mean 'mufu'\?"):
        faster(load_arch("h100"), "mufo")


def test_issue_slots_follow_the_schedulers():
    assert h100(*faster(load_arch("h100"), "issue", 2)).utilisation["issue"] < 0.6 * h100().utilisation["issue"]


# --- losses --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "chip"), cases())
def test_losses_and_useful_work_add_up(name: str, chip: str):
    found = explain(small(name, chip), threads=1)
    assert found.useful_percent + sum(loss.percent for loss in found.losses) == pytest.approx(100)
    assert found.useful_percent == pytest.approx(found.run.peak_percent, rel=0.02)
    lost = {loss.name: loss.percent for loss in found.losses}
    assert set(lost) == {*(step for step, _ in STEPS), "fill and drain", "tail wave", "code", "masked waste"}
    for loss in ("tail wave", "code", "masked waste"):
        assert lost[loss] > -0.1, loss
    for role, shares in found.run.stalls.items():
        assert sum(shares.values()) == pytest.approx(100), role


def test_the_last_machine_does_nothing_but_tensor_work():
    arch = load_arch("h100", ("chip.sm_count=4",))
    run = h100(*machines(arch, "bf16")[-1], head_dim=64)
    assert run.utilisation["tensor"] > 90
    assert max(percent for unit, percent in run.utilisation.items() if unit != "tensor") < 2


def test_a_cause_that_is_made_worse_loses_more():
    def lost(job: Job, name: str) -> float:
        return next(loss.cycles for loss in explain(job, threads=1).losses if loss.name == name)

    job = small("fa3", "h100")
    slow = replace(job, overrides=(*job.overrides, "launch.ramp_ns=20000"))
    assert lost(slow, "launch and ramp") > lost(job, "launch and ramp") + 10_000
    causal = replace(job, problem=Problem(**{**vars(job.problem), "causal": True}))
    assert lost(causal, "masked waste") > 1.5 * lost(job, "masked waste")


def test_elasticities_agree_with_runs_by_hand():
    job = replace(small("fa3", "h100", head_dim=64), clock_mhz=1700.0)
    found = explain(job, infinite=True, threads=1)
    gain = next(gain for gain in found.gains if gain.resource == "mufu")
    overrides = (
        *job.overrides,
        "sm.mufu.ops_per_cycle=17.6",
        "sm.mufu.other_ops_per_cycle=17.6",
        f"sm.interference.mufu_cycles={load_arch('h100').sm.interference.mufu_cycles / 1.1!r}",
    )
    by_hand = simulate(job.schedule, job.problem, load_arch("h100", overrides), clock_mhz=1700.0)
    assert gain.tenth_percent == pytest.approx(100 * (found.run.cycles / by_hand.cycles - 1), abs=0.01)
    assert gain.infinite_percent is not None and gain.infinite_percent > gain.tenth_percent


@pytest.mark.parametrize(("name", "chip"), [("fa1", "a100"), ("fa3", "h100"), ("triton", "h100")])
def test_causal_losses_add_up(name: str, chip: str):
    job = small(name, chip)
    found = explain(replace(job, problem=Problem(**{**vars(job.problem), "causal": True})), threads=1)
    assert found.useful_percent + sum(loss.percent for loss in found.losses) == pytest.approx(100)
    fill = next(loss.percent for loss in found.losses if loss.name == "fill and drain")
    assert -5 < fill < 40


def test_a_problem_of_one_block_adds_up_too():
    found = explain(Job("fa3", Problem(batch=1, seqlen_q=64, heads_q=1), "h100", ("chip.sm_count=4",)), threads=1)
    assert found.useful_percent + sum(loss.percent for loss in found.losses) == pytest.approx(100)
    assert found.iteration is None and found.whole.cycles > 0


def test_threads_do_not_change_the_answer():
    job = small("fa3", "h100", head_dim=64)
    assert explain(job, threads=2).to_dict() == explain(job, threads=1).to_dict()
