"""The report of a few runs, word for word, so that any change of a prediction is seen and meant.

After a change that is meant (of an arch file, a schedule, the cost model, an engine or the report) write them anew
and read the difference::

    pytest tests/test_golden_reports.py --regen-all
    git diff tests/test_golden_reports
"""

from __future__ import annotations

import pytest
from sample_run import report_text

from fasim.arch import load_arch
from fasim.problem import Problem
from fasim.program.library import list_schedules
from fasim.studies.simulate import simulate

#: Name of the file -> schedule, chip, shape, knobs.
CASES = {
    "h100-d128": ("fa3", "h100", {"head_dim": 128}, {}),
    "h200-d128-causal": ("fa3", "h200", {"head_dim": 128, "causal": True}, {}),
    "h200-d64-gqa": ("fa3", "h200", {"head_dim": 64, "heads_kv": 2}, {}),
    "h200-d256": ("fa3", "h200", {"head_dim": 256}, {}),
    "h200-d128-serial": ("fa3", "h200", {"head_dim": 128}, {"pingpong": "off", "overlap": "off"}),
    "h100-d128-one-stage": ("fa3", "h100", {"head_dim": 128}, {"stages": 1, "persistent": "off", "cluster": 1}),
    "fa1-a100": ("fa1", "a100", {"head_dim": 64, "dtype": "fp16"}, {}),
    "fa2-a100": ("fa2", "a100", {"head_dim": 128, "dtype": "fp16"}, {}),
    "fa4-b200": ("fa4", "b200", {"head_dim": 128}, {}),
    "fa4-h200": ("fa4", "h200", {"head_dim": 128}, {}),
    "naive-h200": ("naive", "h200", {"head_dim": 128}, {}),
    "triton-h200": ("triton", "h200", {"head_dim": 128}, {}),
}


def test_every_schedule_has_a_golden_report():
    assert {case[0] for case in CASES.values()} == set(list_schedules())


@pytest.mark.parametrize("case", CASES)
def test_reports(case: str, file_regression):
    schedule, chip, shape, knobs = CASES[case]
    problem = Problem(**{"batch": 2, "seqlen_q": 2048, "heads_q": 8, **shape})
    arch = load_arch(chip, ("chip.sm_count=32",))
    text = report_text(simulate(schedule, problem, arch, knobs=knobs, clock_mhz=1500))
    # the digest changes with every comment-free edit of an arch file, the version with every release
    kept = [line for line in text.splitlines() if "digest" not in line]
    file_regression.check("\n".join(kept) + "\n", basename=case)
