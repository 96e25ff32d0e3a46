"""The bounds of a run as text.

How to read it: *needed* are cycles that any kernel spends on a unit at its peak rate, *executed* those of this
schedule's work; no run is shorter than the largest of them. Below is the arithmetic of one head, naive against fused.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fasim.analysis.bounds import Bounds, Story, problem_of
from fasim.analysis.compare import busy_cycles
from fasim.results.run import Run
from fasim.views.common import FirstThatFits, provenance, table


def render_bounds(run: Run, bounds: Bounds, *, layers: int = 80) -> RenderableType:
    """Bounds of ``run``; memory for backward is counted for its heads (of all sequences) and for ``layers`` too."""
    problem, head = problem_of(run), Text()
    head.append(" · ".join(provenance(run)) + "\n", style="cyan")
    head.append(f"{run.cycles:,.0f} cycles", style="bold")
    head.append(f", {bound_text(bounds)}; any kernel needs {bounds.needed_cycles:,.0f}")
    return Group(
        head,
        Text(),
        Text("Cycles at peak rate", style="bold"),
        FirstThatFits(_units(bounds, 2), _units(bounds, 1)),
        Text(),
        Text("Memory traffic and the roofline", style="bold"),
        _traffic(bounds),
        Text(),
        Text("One head: naive against fused", style="bold"),
        _story(bounds.story, problem.batch * problem.heads_q, layers),
    )


def bound_text(bounds: Bounds) -> str:
    """The bound in one phrase, such as "at least 1,051,231 cycles by tensor (83.8 % of the run)"."""
    limit = bounds.limit
    share = 100 * limit.executed_cycles / bounds.cycles
    return f"at least {limit.executed_cycles:,.0f} cycles by {limit.unit} ({share:.1f} % of the run)"


def bound_line(run: Run) -> str:
    """The bound of a run by its busiest unit, the line below its report."""
    busy = busy_cycles(run)
    unit = max(busy, key=lambda name: busy[name])
    return f"Bound: {busy[unit]:,.0f} cycles by {unit}; the run takes {run.cycles / busy[unit]:.2f} times as long"


def _units(bounds: Bounds, gap: int) -> Table:
    heads = ("% of run", "% steady") if gap > 1 else ("%\nrun", "%\nsteady")
    rows = table("unit", "needed", "executed", *heads, gap=gap)
    for bound in sorted(bounds.units, key=lambda bound: -bound.executed_cycles):
        rows.add_row(
            Text(bound.unit, style="bold red" if bound is bounds.limit else ""),
            "" if bound.needed_cycles is None else f"{bound.needed_cycles:,.0f}",
            f"{bound.executed_cycles:,.0f}",
            f"{100 * bound.executed_cycles / bounds.cycles:.1f}",
            "" if bound.steady_percent is None else f"{bound.steady_percent:.1f}",
        )
    return rows


def _traffic(bounds: Bounds) -> Table:
    rows = table("", "", gap=2, show_header=False)
    side = "compute" if bounds.simulated_intensity > bounds.story.ridge else "memory"
    rows.add_row("HBM traffic, minimal", _bytes(bounds.minimal_hbm_bytes))
    rows.add_row("HBM traffic, simulated", _bytes(bounds.simulated_hbm_bytes))
    rows.add_row("arithmetic intensity", f"{bounds.simulated_intensity:,.0f} FLOP/byte")
    rows.add_row("ridge", f"{bounds.story.ridge:,.0f} FLOP/byte, so this run is on the {side} side")
    return rows


def _story(story: Story, heads: int, layers: int) -> Table:
    rows = table("", "naive", "fused", gap=2)
    rows.add_row("intensity, FLOP/byte", f"{story.naive_intensity:,.0f}", f"{story.fused_intensity:,.0f}")
    arithmetic = f"{1e6 * story.arithmetic_s:.1f} us"
    rows.add_row("arithmetic of one head", arithmetic, arithmetic)
    ratio = story.naive_traffic_s / story.arithmetic_s
    rows.add_row("passes over S and P", f"{1e6 * story.naive_traffic_s:.1f} us = {ratio:.1f} x arithmetic", "none")
    for count, what in ((1, "head"), (heads, f"layer ({heads} heads)"), (heads * layers, f"model ({layers} layers)")):
        kept = (_bytes(count * story.naive_kept_bytes), _bytes(count * story.fused_kept_bytes))
        rows.add_row(f"kept for backward, {what}", *kept)
    rows.add_row("backward FLOPs / forward", *[f"{story.backward_flops_ratio:g}"] * 2)
    room = f"{story.tile_bytes / 1024:.0f} of {story.smem_bytes / 1024:.0f} KiB of SMEM"
    rows.add_row("tile: Q, K, V and FP32 scores", "", room)
    return rows


def _bytes(count: float) -> str:
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
