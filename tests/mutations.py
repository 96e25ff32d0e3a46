"""Broken copies of shipped schedules: one line changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasim.arch import load_arch
from fasim.checker.check import check
from fasim.problem import Problem
from fasim.program.library import Schedule, load_schedule, schedule_folder


@dataclass(frozen=True)
class Mutation:
    """``old`` in ``file`` becomes ``new``; ``caught`` is part of a message that names the cause.

    ``by``: ``deadlock``, ``structure``, the kind of a finding, or ``values`` (a wrong output).
    """

    name: str
    file: str
    old: str
    new: str
    by: str
    caught: str
    problem: tuple[tuple[str, Any], ...] = ()
    knobs: tuple[tuple[str, str], ...] = ()
    arch: str = ""  # empty: the usual one of its list
    spread: float = 1.0  # of Q: with more, row maxima grow


def mutate(folder: Path, schedule: str, mutation: Mutation) -> Schedule:
    """The schedule from a copy of its files in ``folder``, broken. The text to change must be there once."""
    for path in schedule_folder().glob("*.py"):
        text = path.read_text()
        if path.name == mutation.file:
            assert text.count(mutation.old) == 1, f"{mutation.name}: {text.count(mutation.old)} places to change"
            text = text.replace(mutation.old, mutation.new)
        (folder / path.name).write_text(text)
    return load_schedule(folder / f"{schedule}.py")


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


def caught(schedule: str, mutation: Mutation, arch: str, folder: Path) -> None:
    """The check that should find it does, and says why."""
    shape = {"heads_q": 1, **dict(mutation.problem)}
    broken, knobs = mutate(folder, schedule, mutation), dict(mutation.knobs)
    result = run_check(broken, mutation.arch or arch, shape, knobs, mutation.spread)
    found = messages(result)
    assert not result["passed"]
    assert any(mutation.caught in text for text in found.get(mutation.by, ())), found
