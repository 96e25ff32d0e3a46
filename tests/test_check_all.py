"""All shipped schedules are right, on every architecture they exist for; the catalogue of broken copies is whole."""

from __future__ import annotations

import pytest
from catalogue import CATALOGUE, CHECKERS, MARKED, PAGE, overview
from mutations import messages, run_check

from fasim.program.library import list_schedules, load_schedule

#: Forward schedules, from the folder.
SHIPPED = [name for name in list_schedules() if "fwd" in load_schedule(name).directions]
CHIPS = {"ampere": "a100", "hopper": "h100", "blackwell": "b200"}
SHAPES = {
    "one block": {"seqlen_q": 64, "seqlen_k": 32, "heads_q": 1},
    "odd": {"seqlen_q": 201, "seqlen_k": 201, "heads_q": 1, "head_dim": 64},
    "causal": {"seqlen_q": 270, "seqlen_k": 270, "causal": True},
    "grouped": {"seqlen_q": 150, "seqlen_k": 330, "heads_q": 4, "heads_kv": 2},
}


def cases():
    for name in SHIPPED:
        schedule = load_schedule(name)
        for architecture in schedule.architectures:
            for shape in SHAPES:
                if (name, shape) != ("fa1", "grouped"):  # which has no groups of heads
                    yield pytest.param(name, CHIPS[architecture], SHAPES[shape], id=f"{name}-{architecture}-{shape}")


@pytest.mark.parametrize(("name", "chip", "shape"), list(cases()))
def test_no_finding_and_the_errors_of_a_straightforward_implementation(name, chip, shape):
    result = run_check(name, chip, shape, {})
    assert messages(result) == {}
    out = result["values"][0]
    assert out["output"] == "O" and 0 < out["rmse"] <= 1.2 * out["straightforward_rmse"]
    assert out["max_abs"] < 2e-2


def test_every_schedule_has_broken_copies_and_every_checker_finds_some():
    assert set(CATALOGUE) == set(SHIPPED)
    assert all(len(mutations) >= 5 for mutations in CATALOGUE.values())
    names = [(schedule, mutation.name) for schedule, mutations in CATALOGUE.items() for mutation in mutations]
    assert len(names) == len(set(names)) >= 25
    assert {mutation.by for mutations in CATALOGUE.values() for mutation in mutations} == set(CHECKERS)
    assert all(mutation.caught for mutations in CATALOGUE.values() for mutation in mutations if mutation.by != "values")


def test_the_page_has_them_all():
    match = MARKED.search(PAGE.read_text())
    assert match and match[0] == match[1] + overview() + match[2], "run python tests/catalogue.py"
