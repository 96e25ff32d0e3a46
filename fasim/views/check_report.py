"""The result of a check of a schedule, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_GOOD, _BAD = "green", "bold red"


def render_check(result: Mapping[str, Any]) -> RenderableType:
    """Verdict, budgets, deadlock, findings and errors of ``studies.check.check``."""
    head = Text(" · ".join((result["schedule"], result["arch"], result["problem_text"])), style="cyan")
    parts: list[RenderableType] = [head]
    if numerics := _numerics(result["numerics"]):
        parts.append(Text.assemble((f"{'numerics':<10}", "bold"), numerics))
    if result["structure"] is not None:
        parts.append(_line("structure", result["structure"], False))
    if result["budgets"]:
        parts.append(_budgets(result))
    if result["structure"] is None:
        parts.append(_line("deadlock", result["deadlock"] or "none", result["deadlock"] is None))
        parts += _findings(result)
    parts.append(_values(result))
    checked = result["annotated"] or not result["passed"]
    right = "right, as far as checked" if checked else "fits and does not deadlock; races and values were not checked"
    parts.append(_line("verdict", right if result["passed"] else "WRONG", result["passed"] and checked))
    return Group(*parts)


def _numerics(given: Mapping[str, Any]) -> str:
    """The choices in the place of the schedule's own."""
    said = []
    if exp2 := given["exp2"]:
        said.append(f"{exp2['fraction']:.0%} of the exponentials by degree {len(exp2['coefficients']) - 1}")
    if given["threshold"] is not None:
        said.append(f"rescale threshold {given['threshold']:g}")
    if given["p_format"]:
        said.append(f"P in {given['p_format']}")
    return ", ".join(said)


def _line(name: str, text: str, good: bool) -> Text:
    return Text.assemble((f"{name:<10}", "bold"), (text, _GOOD if good else _BAD))


def _budgets(result: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    kernels = len({row["kernel"] for row in result["budgets"]}) > 1
    for column in ("budget", "used", "limit"):
        table.add_column(column, justify="left" if column == "budget" else "right", overflow="fold")
    for row in result["budgets"]:
        name = f"{row['kernel']}: {row['resource']}" if kernels else row["resource"]
        style = _BAD if row["used"] > row["limit"] else ""
        table.add_row(name, f"{row['used']:,}", f"{row['limit']:,}", style=style)
    return table


def _findings(result: Mapping[str, Any]) -> list[RenderableType]:
    if not result["findings"]:
        return [_line("races", "none", True)] if result["annotated"] else []
    lines: list[RenderableType] = []
    for finding in result["findings"]:
        times = f" ({finding['count']} times)" if finding["count"] > 1 else ""
        lines.append(_line(finding["kind"], finding["message"] + times, False))
    return lines


def _values(result: Mapping[str, Any]) -> RenderableType:
    if result["values"] is None:
        return Text.assemble(("values    ", "bold"), ("not checked: " + str(result["values_reason"]), "yellow"))
    table = Table(box=None, pad_edge=False)
    for column in ("output", "max error", "relative", "RMSE", "straightforward RMSE", ""):
        table.add_column(column, justify="left" if column in ("output", "") else "right", overflow="fold")
    for row in result["values"]:
        numbers = (row[key] for key in ("max_abs", "max_relative", "rmse", "straightforward_rmse"))
        verdict = Text("ok", style=_GOOD) if row["passed"] else Text(f"wrong: {row['hint']}", style=_BAD)
        table.add_row(row["output"], *(f"{number:.2e}" for number in numbers), verdict)
    return table
