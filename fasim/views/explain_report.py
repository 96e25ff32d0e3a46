"""Why a run takes as long as it does, in words and two tables.

How to read it: *From peak to achieved* splits the run's cycles into useful work at the chip's peak and losses; together
they are 100 %. A loss is what the removal of its cause saves once the causes above it are gone; a negative one means
that the removal made others collide. *Faster by a tenth* says what each resource would gain alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fasim.analysis.losses import Loss
from fasim.run import Run
from fasim.views.common import provenance

#: A gain below this many per cent is not worth a sentence.
_NOTICEABLE = 0.2


def render_losses(run: Run, useful_percent: float, losses: Sequence[Loss]) -> RenderableType:
    """Head line and loss table of ``run``."""
    head = Text()
    head.append(" · ".join(provenance(run)) + "\n", style="cyan")
    head.append(f"{run.cycles:,.0f} cycles, {run.tflops:.0f} TFLOP/s, {run.peak_percent:.1f} % of peak", style="bold")
    table = _table("", "% of time", "")
    table.add_row("useful", f"{useful_percent:.1f}", "unmasked FLOPs at the dense peak of all SMs", style="green")
    for loss in losses:
        table.add_row(loss.name, f"{loss.percent:.1f}", loss.how)
    return Group(head, Text(), Text("From peak to achieved", style="bold"), table)


def render_gains(gains: Mapping[str, tuple[str, float, float | None]]) -> RenderableType:
    """Table of resource -> (meaning, gain by 10 %, gain by infinitely fast or None), in per cent."""
    endless = any(infinite is not None for _, _, infinite in gains.values())
    table = _table("resource", "gain %", *(["infinite"] if endless else []), "what it is")
    for name, (meaning, tenth, infinite) in gains.items():
        table.add_row(name, f"{tenth:+.1f}", *([f"{infinite:+.1f}"] if infinite is not None else []), meaning)
    return Group(Text("Faster by a tenth", style="bold"), table)


def verdict(run: Run, losses: Sequence[Loss], gains: Mapping[str, tuple[str, float, float | None]]) -> str:
    """The answer in words: the limiting resource, the next one, and the largest losses."""
    (first, (what, gain, _)), (second, (next_what, next_gain, _)) = list(gains.items())[:2]
    busiest = max(run.utilisation, key=lambda unit: run.utilisation[unit])
    lines = [
        f"Limit: {first} ({what}), {gain:.1f} % faster by a tenth of it."
        if gain >= _NOTICEABLE
        else "Limit: none; no resource alone gains anything."
    ]
    if next_gain >= _NOTICEABLE:
        lines.append(f"Next: {second} ({next_what}), {next_gain:.1f} %.")
    top = sorted(losses, key=lambda loss: -loss.percent)[:2]
    lines.append("Largest losses: " + ", ".join(f"{loss.name} {loss.percent:.1f} %" for loss in top) + ".")
    lines.append(f"Busiest unit: {busiest}, {run.utilisation[busiest]:.1f} %.")
    return " ".join(lines)


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for position, head in enumerate(heads):
        table.add_column(head, justify="left" if position in (0, len(heads) - 1) else "right")
    return table
