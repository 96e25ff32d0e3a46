"""The facts that the papers are remembered by come out, at the clocks that the chips hold (table in docs/story.md)."""

from __future__ import annotations

from functools import cache

import pytest

from fasim.arch import load_arch
from fasim.problem import Problem
from fasim.results.run import Run
from fasim.studies.simulate import simulate


@cache
def run(schedule: str, arch: str, seqlen: int, head_dim: int, *, tokens: int = 16384, causal: bool = False,
        dtype: str = "fp16", knobs: tuple[tuple[str, object], ...] = ()) -> Run:  # fmt: skip
    """A row of a paper's figure: ``tokens`` in all, heads x head dim = 2048."""
    problem = Problem(
        batch=max(1, tokens // seqlen), seqlen_q=seqlen, heads_q=2048 // head_dim, head_dim=head_dim, causal=causal,
        dtype=dtype,
    )  # fmt: skip
    return simulate(schedule, problem, load_arch(arch), knobs=dict(knobs))


def peak_share(result: Run, arch: str, dtype: str = "fp16") -> float:
    """Of the data sheet's dense peak."""
    return result.tflops / load_arch(arch).chip.datasheet_tflops[dtype]


def test_fa1_is_half_of_fa2_on_a100():
    assert 0.4 < run("fa1", "a100", 4096, 64).tflops / run("fa2", "a100", 4096, 64).tflops < 0.6


@pytest.mark.parametrize(("seqlen", "head_dim", "causal"), [(512, 64, False), (2048, 64, True), (8192, 128, False)])
def test_fa2_reaches_50_to_73_percent_of_an_a100(seqlen: int, head_dim: int, causal: bool):
    assert 0.50 < peak_share(run("fa2", "a100", seqlen, head_dim, causal=causal), "a100") < 0.73


def test_fa2_reaches_about_35_percent_of_an_h100():
    assert peak_share(run("fa2", "h100", 8192, 128), "h100") == pytest.approx(0.36, abs=0.02)


def test_fa3_at_d128_is_about_650_tflops_and_best_at_d256():
    """The paper's release; 75 % of the peak is its best, at d256."""
    build = (("build", "2024"),)
    assert run("fa3", "h100", 16384, 128, knobs=build).tflops == pytest.approx(650, rel=0.06)
    best = run("fa3", "h100", 16384, 256, knobs=build)
    assert peak_share(best, "h100") == pytest.approx(0.75, abs=0.04)


def test_fa3_fp8_is_about_1200_tflops():
    assert run("fa3", "h100", 16896, 256, dtype="fp8", tokens=16896).tflops == pytest.approx(1200, rel=0.05)


def test_fa4_is_71_percent_of_a_b200():
    best = run("fa4", "b200", 32768, 128, dtype="bf16", tokens=32768)
    assert best.tflops == pytest.approx(1605, rel=0.03)
    assert peak_share(best, "b200", "bf16") == pytest.approx(0.71, abs=0.02)


@pytest.mark.parametrize(("seqlen", "causal"), [(4096, False), (8192, True)])
def test_fa4_is_two_to_three_times_triton(seqlen: int, causal: bool):
    """The paper: 2.1 to 2.7 times the tutorial, which Triton then did not specialise."""
    fa4, triton = (
        run(name, "b200", seqlen, 128, dtype="bf16", tokens=32768, causal=causal, knobs=knobs)
        for name, knobs in (("fa4", ()), ("triton", (("warp_specialize", "off"),)))
    )
    assert 2.1 < fa4.tflops / triton.tflops < 2.8
