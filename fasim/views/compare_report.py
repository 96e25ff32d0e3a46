"""The report of a comparison: what was set differently, how much faster, which unit moved, where the cycles went.

How to read it: *points* is the change of a unit's utilisation over the whole run, *work* that of the cycles it is
busy: the same work in less time is a unit that waits less, less work is a unit relieved. *Where the cycles went*
lists, per role, the reasons whose time changed; a role's changes add up to the change of the run's cycles.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from fasim.analysis.compare import Change, Comparison
from fasim.results.reasons import UNITS
from fasim.views.common import FirstThatFits, knob_text, provenance, table

#: Changes of a role's reason below this share of the base's cycles are left out.
_SMALL = 0.002


def render_comparison(comparison: Comparison) -> RenderableType:
    """The comparison as a rich renderable."""
    parts: list[RenderableType] = [_runs(comparison), Text()]
    for change in comparison.changes:
        parts += [_settings(comparison, change), Text()]
    parts += [_units(comparison), Text(), _verdicts(comparison), Text(), _roles(comparison)]
    return Group(*parts)


def _runs(comparison: Comparison) -> RenderableType:
    rows = table("", "cycles", "", "us", "", "MHz", "TFLOP/s", "% peak", "bottleneck")
    changes = (None, *comparison.changes)
    for (label, run), change in zip(comparison.runs, changes, strict=True):
        rows.add_row(
            label,
            f"{run.cycles:,.0f}",
            _signed(change.cycles_percent, " %") if change else Text(),
            f"{run.time_us:.4g}",
            _signed(change.time_percent, " %") if change else Text(),
            f"{run.clock_mhz:.0f}",
            f"{run.tflops:.1f}",
            f"{run.peak_percent:.1f}",
            run.bottleneck,
        )
    lines = [Text(f"{label}: {' · '.join(provenance(run))}", style="cyan") for label, run in comparison.runs]
    return Group(*lines, Text(), FirstThatFits(rows, _run_lines(comparison)))


def _run_lines(comparison: Comparison) -> Text:
    """What the table of runs says, in lines."""
    text = Text()
    for (label, run), change in zip(comparison.runs, (None, *comparison.changes), strict=True):
        text.append(f"{label}: {run.cycles:,.0f} cycles")
        if change:
            text.append(" (").append_text(_signed(change.cycles_percent, " %")).append(")")
        text.append(f", {run.time_us:.4g} us")
        if change:
            text.append(" (").append_text(_signed(change.time_percent, " %")).append(")")
        text.append(f" at {run.clock_mhz:.0f} MHz, {run.tflops:.1f} TFLOP/s, {run.peak_percent:.1f} % of peak, ")
        text.append(f"bottleneck {run.bottleneck}\n")
    text.rstrip()
    return text


def _settings(comparison: Comparison, change: Change) -> RenderableType:
    base = comparison.runs[0][0]
    if not change.settings:
        return Text(f"{change.label} is set as {base}.")
    pairs = (f"{name} {_value(was)} -> {_value(now)}" for name, (was, now) in change.settings.items())
    return Text(f"{base} -> {change.label}: {', '.join(pairs)}")


def _value(value: object) -> str:
    return "none" if value in (None, "") else knob_text(value)


def _units(comparison: Comparison) -> RenderableType:
    heads = ["unit", *(label for label, _ in comparison.runs)]
    for change in comparison.changes:
        heads += [f"{change.label} points", f"{change.label} work"]
    rows = table(*heads)
    for unit in UNITS:
        if not any(unit in run.utilisation for _, run in comparison.runs):
            continue
        cells = [Text(f"{run.utilisation[unit]:.1f}" if unit in run.utilisation else "") for _, run in comparison.runs]
        for change in comparison.changes:
            points, work = change.points.get(unit), change.work_percent.get(unit)
            cells.append(Text("" if points is None else f"{points:+.1f}"))
            cells.append(Text("" if work is None else f"{work:+.1f} %"))
        rows.add_row(Text(unit), *cells)
    return Group(Text("Utilisation over the whole run, % of peak rate", style="bold"), rows)


def _verdicts(comparison: Comparison) -> Text:
    base_label, base = comparison.runs[0]
    lines = []
    for change, (_, run) in zip(comparison.changes, comparison.runs[1:], strict=True):
        speed = "slower" if change.time_percent > 0 else "faster"
        limit = f"limit {base.bottleneck}"
        if run.bottleneck != base.bottleneck:
            limit += f" -> {run.bottleneck}"
        moved = f"{change.moved} moved most ({change.points[change.moved]:+.1f} points)"
        amount = f"{abs(change.time_percent):.1f} % {speed} than {base_label}" if change.time_percent else "as fast"
        lines.append(f"{change.label}: {amount}; {limit}; {moved}.")
    return Text("\n".join(lines), style="bold")


def _roles(comparison: Comparison) -> RenderableType:
    base = comparison.runs[0][1]
    heads = ("role", "reason", *(f"{change.label} kcycles" for change in comparison.changes))
    shown = table(*heads, left=(0, 1))
    for role in dict.fromkeys(role for change in comparison.changes for role in change.role_cycles):
        rows = [change.role_cycles.get(role, {}) for change in comparison.changes]
        reasons = [r for r in base.stalls[role] if any(abs(row.get(r, 0.0)) > _SMALL * base.cycles for row in rows)]
        for reason in sorted(reasons, key=lambda r: -max(abs(row.get(r, 0.0)) for row in rows)):
            shown.add_row(role, reason, *(_thousands(row.get(reason)) for row in rows))
        shown.add_row(role, "sum", *(_thousands(sum(row.values()) if row else None) for row in rows), style="dim")
    return Group(Text("Where the cycles went, change in thousands of cycles", style="bold"), shown)


def _thousands(cycles: float | None) -> str:
    return "" if cycles is None else f"{cycles / 1e3:+,.1f}"


def _signed(percent: float, unit: str) -> Text:
    return Text(f"{percent:+.1f}{unit}", style="red" if percent > 0 else "green")
