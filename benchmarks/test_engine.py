"""``pytest benchmarks``: timings of the engine by pytest-benchmark, after a first run that loads it."""

from __future__ import annotations

import pytest
from cases import CASES

from fasim.arch import load_arch
from fasim.engine import compiled
from fasim.lowering.lower import lower_all
from fasim.problem import Problem
from fasim.program.library import load_schedule
from fasim.studies.simulate import TraceSpec, simulate

SHORT = [case for case in CASES if case.seconds <= 2.0]


@pytest.fixture(scope="session", autouse=True)
def _engine():
    compiled.prepare()


@pytest.mark.parametrize("case", SHORT, ids=[case.title for case in SHORT])
def test_simulate(benchmark, case):
    """A whole simulation."""
    schedule, problem, arch = load_schedule("fa3"), Problem(**case.shape), load_arch("h200")
    trace = TraceSpec(sms=case.trace_sms) if case.trace_sms else None
    run = benchmark.pedantic(simulate, (schedule, problem, arch), {"trace": trace}, rounds=3)
    benchmark.extra_info["events_per_second"] = run.events / benchmark.stats.stats.min


@pytest.mark.parametrize("case", SHORT, ids=[case.title for case in SHORT])
def test_build_and_lower(benchmark, case):
    """What comes before the engine."""
    schedule, problem, arch = load_schedule("fa3"), Problem(**case.shape), load_arch("h200")
    benchmark.pedantic(lambda: lower_all(schedule.build(problem, arch, {}), 1500.0), rounds=3)
