from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fasim.analysis.critical_path import CriticalPath, EventGraph, critical_path
from fasim.arch import load_arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import Run, Trace
from fasim.studies.simulate import TraceSpec, simulate
from fasim.views.explain_report import sentence

TRACKS = ("a", "b", "tensor")
NAMES = ("load", "wait", "exp", "QK", "wait QK")


def trace(*rows: tuple[str, str, str, int, int, str, int]) -> Trace:
    """Slices (track, name, reason or "unit", first cycle, last cycle, owner, row of the cause) of SM 0."""
    table = [
        (
            4 * start,
            4 * end,
            TRACKS.index(track),
            NAMES.index(name),
            UNIT_SLICE if kind == "unit" else REASONS.index(kind),
            TRACKS.index(owner) if owner else -1,
            cause,
        )
        for track, name, kind, start, end, owner, cause in rows
    ]
    start, end, track, name, kind, owner, cause = np.array(table, dtype=np.int64).T
    zero = np.zeros_like(start)
    return Trace(4, TRACKS, NAMES, start, end, zero, zero, track, name, kind, zero, zero - 1, owner, cause)


def steps(path: CriticalPath) -> dict[str, float]:
    return {step.label: step.cycles for step in path.steps}


@cache
def traced(schedule: str, chip: str, head_dim: int = 128) -> Run:
    problem = Problem(batch=1, seqlen_q=4096, heads_q=1, head_dim=head_dim)
    return simulate(schedule, problem, load_arch(chip, ("chip.sm_count=4",)), trace=TraceSpec())


def test_a_wait_is_followed_to_the_role_that_ended_it():
    told = trace(
        ("a", "load", "work", 0, 300, "", -1),
        ("b", "exp", "work", 0, 40, "", -1),
        ("b", "wait", "barrier", 40, 331, "", 0),
        ("b", "exp", "work", 331, 500, "", -1),
    )
    path = critical_path(EventGraph(told), steady=False)
    assert steps(path) == {"a: load": 300, "b: exp": 169, "b: wait": 31}
    (hand_over,) = path.hand_overs
    assert sentence(hand_over, {}) == "b at 'wait' waits for a: load (once, 291 cycles)."


def test_a_wait_without_a_cause_is_charged_to_the_role():
    told = trace(
        ("a", "load", "work", 0, 300, "", -1),
        ("b", "wait", "barrier", 0, 331, "", -1),
        ("b", "exp", "work", 331, 500, "", -1),
    )
    assert steps(critical_path(EventGraph(told), steady=False)) == {"b: wait": 331, "b: exp": 169}


def test_a_busy_tensor_core_is_followed_to_the_mma_before():
    told = trace(
        ("a", "load", "work", 0, 10, "", -1),
        ("a", "QK", "issue", 10, 26, "", -1),
        ("tensor", "QK", "unit", 10, 110, "a", 0),
        ("b", "load", "work", 0, 20, "", -1),
        ("b", "QK", "issue", 20, 36, "", -1),
        ("tensor", "QK", "unit", 110, 210, "b", 3),
        ("b", "wait QK", "dependency", 36, 240, "", 5),
    )
    path = critical_path(EventGraph(told), steady=False)
    assert steps(path) == {"tensor: QK of a": 100, "tensor: QK of b": 100, "b: wait QK": 30, "a: load": 10}


def test_an_mma_that_starts_when_it_is_issued_has_not_queued():
    told = trace(
        ("a", "load", "work", 0, 10, "", -1),
        ("tensor", "QK", "unit", 10, 110, "a", 0),
        ("b", "exp", "work", 0, 110, "", -1),
        ("tensor", "QK", "unit", 110, 210, "b", 2),  # right after the other, by chance
        ("b", "wait QK", "dependency", 110, 240, "", 3),
    )
    assert steps(critical_path(EventGraph(told), steady=False)) == {
        "b: exp": 110,
        "tensor: QK of b": 100,
        "b: wait QK": 30,
    }


def test_a_pipe_taken_is_followed_to_the_work_that_took_it():
    told = trace(
        ("a", "exp", "work", 0, 120, "", -1),  # has another pipe for longer
        ("b", "exp", "pipe", 0, 100, "", 0),
        ("b", "exp", "work", 100, 150, "", -1),
    )
    path = critical_path(EventGraph(told), steady=False)
    assert steps(path) == {"a: exp": 100, "b: exp": 50}
    assert "queues for a pipe behind a: exp, bound by MUFU (once" in sentence(path.hand_overs[0], {"exp": "mufu"})


@pytest.mark.parametrize(
    ("schedule", "chip"), [("fa3", "h100"), ("fa2", "h100"), ("fa2", "a100"), ("fa4", "b200"), ("triton", "h100")]
)
def test_the_path_adds_up(schedule: str, chip: str):
    run = traced(schedule, chip)
    assert run.trace is not None
    iteration = critical_path(EventGraph(run.trace))
    assert sum(step.percent for step in iteration.steps) == pytest.approx(100)
    assert sum(step.cycles for step in iteration.steps) == pytest.approx(iteration.cycles)
    assert iteration.iterations > 5
    assert 0.3 * iteration.interval_cycles < iteration.loop_carried_cycles <= 1.001 * iteration.interval_cycles
    whole = critical_path(EventGraph(run.trace), steady=False)
    assert 0.9 * run.cycles < whole.cycles <= run.cycles


def test_fa4_iterates_through_scores_exponentials_and_output():
    run = traced("fa4", "b200")
    assert run.trace is not None
    path = critical_path(EventGraph(run.trace))
    shares: dict[str, float] = {}
    for step in path.steps:
        # Of the CTA pair, the arrivals from the other SM come last.
        label = step.label.removeprefix("SM 1 ").replace("softmax0", "softmax").replace("softmax1", "softmax")
        shares[label] = shares.get(label, 0.0) + step.percent
    for label in ("tensor: QK of mma", "tensor: PV of mma", "softmax: exp, P"):
        assert shares[label] > 12, label
    assert path.loop_carried_cycles > 2048  # the tensor floor of a 256 x 128 block


@pytest.mark.parametrize(
    ("schedule", "chip", "expected"),
    [
        ("fa4", "b200", {"exp, P": "mufu", "row max": "alu", "load S": "tmem", "rescale O": "fma"}),
        ("fa3", "h100", {"row max": "port", "store O": "smem"}),  # beside an MMA, maxima wait for their operands
        ("fa2", "a100", {"QK": "tensor", "PV": "tensor", "exp, sum, P": "mufu"}),
    ],
)
def test_operations_name_the_pipe_that_limits_them(schedule: str, chip: str, expected: dict[str, str]):
    pipes = traced(schedule, chip).meta["op_pipes"]
    assert {name: pipes[name] for name in expected} == expected


def test_only_what_was_recorded():
    run = traced("fa3", "h100")
    assert run.trace is not None
    with pytest.raises(ConfigError, match="SM 3 is not in the trace"):
        EventGraph(run.trace, sm=3)
    told = trace(("a", "exp", "work", 0, 10, "", -1))
    with pytest.raises(ConfigError, match="no work tile in the trace has two iterations"):
        critical_path(EventGraph(told))
