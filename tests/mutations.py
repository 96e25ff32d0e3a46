"""Broken copies of shipped schedules: the program that they record, with something wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from changes import Change

from fasim.arch import Arch, load_arch
from fasim.checker.check import check
from fasim.problem import Problem
from fasim.program.language import Kernel
from fasim.program.library import Schedule, load_schedule


@dataclass(frozen=True)
class Mutation:
    """What ``change`` breaks; ``caught`` is part of a message that names the cause.

    ``by``: ``deadlock``, ``structure``, the kind of a finding, or ``values`` (a wrong output).
    """

    name: str
    change: Change
    by: str
    caught: str
    problem: tuple[tuple[str, Any], ...] = ()
    knobs: tuple[tuple[str, str], ...] = ()
    arch: str = ""  # empty: the usual one of its list
    spread: float = 1.0  # of Q: with more, row maxima grow


@dataclass(frozen=True)
class Broken(Schedule):
    """A schedule whose kernels are recorded and then changed."""

    change: Change

    def build(self, problem: Problem, arch: Arch, knobs: Mapping[str, object]) -> list[Kernel]:
        return self.change(super().build(problem, arch, knobs))


def messages(result: dict[str, Any]) -> dict[str, list[str]]:
    """What a check found, by who found it."""
    found: dict[str, list[str]] = {}
    for kind in ("structure", "deadlock"):
        if result[kind]:
            found[kind] = [result[kind]]
    for finding in result["findings"]:
        found.setdefault(finding["kind"], []).append(finding["message"])
    for row in result["values"] or ():
        if not row["passed"]:
            found.setdefault("values", []).append(row["hint"])
    return found


def run_check(
    schedule: str | Schedule, arch: str, shape: dict[str, Any], knobs: dict[str, object], spread: float = 1.0
) -> dict[str, Any]:
    """Check a small problem: two heads of 512 tokens unless ``shape`` says otherwise."""
    found = load_schedule(schedule) if isinstance(schedule, str) else schedule
    problem = Problem(**{"batch": 1, "seqlen_q": 512, "heads_q": 2, **shape})
    return check(found, problem, load_arch(arch), knobs, spread=spread)


def right(result: dict[str, Any], factor: float = 1.05) -> None:
    """No finding, and the errors of a straightforward implementation."""
    assert messages(result) == {}
    assert result["passed"]
    out, *others = result["values"]
    assert 0 < out["rmse"] <= factor * out["straightforward_rmse"]
    assert result["problem"]["dtype"] == "fp8" or out["max_abs"] < 2e-2
    assert all(row["output"] == "LSE" and row["max_abs"] < 2e-6 for row in others)


def caught(schedule: str, mutation: Mutation, arch: str, **shape: Any) -> None:
    """The check that should find it does, and says why."""
    whole = load_schedule(schedule)
    broken = Broken(**vars(whole), change=mutation.change)
    result = run_check(
        broken, mutation.arch or arch, {**shape, **dict(mutation.problem)}, dict(mutation.knobs), mutation.spread
    )
    found = messages(result)
    assert not result["passed"]
    assert any(mutation.caught in text for text in found.get(mutation.by, ())), found
