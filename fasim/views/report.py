"""The report of one run: how long, which unit limits it, and what every role waited for.

A sample::

    52,685 cycles = 32.93 us at 1600 MHz (h200.toml: sustained clock of 16-bit
    tensor work)
    739.8 TFLOP/s, 85.5 % of the dense BF16 peak at this clock, bottleneck: tensor
    fa3 · B3 S1408 H8 d128 bf16 forward · h200 · sm.mufu.ops_per_cycle=16

    Utilisation, % of peak rate
    unit    run steady
    tensor 85.5   92.4 ━━━━━━━━━━━━━━━━━    limit
    mufu   54.2   58.5 ━━━━━━━━━━╸
    smem   49.3   53.2 ━━━━━━━━━╸
    alu    47.1   50.9 ━━━━━━━━━
    issue  41.0   44.3 ━━━━━━━━
    fma    38.4   41.5 ━━━━━━━╸
    tma    34.0   36.7 ━━━━━━╸
    l2     31.5   34.0 ━━━━━━
    hbm    22.4   24.2 ━━━━
    lsu     2.2    2.4

    Time of each role, %
    role      work issue pipe dependency barrier full empty memory launch tail
    producer     -   1.2    -          -       -    -  82.0      -    1.8 15.0
    consumer0 55.0  32.1  4.3        1.4       -  1.1     -    1.6    1.8  2.7
    consumer1 55.0  32.7  4.3        1.4     2.0  1.1     -    1.6    1.9    -

    Traffic
        read MB write MB GB/s
    L2    199.0      8.7 6306
    HBM    26.0      8.7 1052

    264 tiles, 132 CTAs, 1 per SM, 2.00 waves, fasim 0.1.0, compiled engine, arch
    digest 5f2c9d1e77aa

How to read it: the first two lines are the answer. *Utilisation* is the share of its peak rate at which each
unit ran, over the whole run and while every SM had work; the limiting unit is marked. A run whose
bottleneck is "latency" has no unit near its limit: its roles wait for each other. *Time of each role* adds up to
100 % per row (in warp terms: "issue" includes blocking while the MMA queue is full, "dependency" is
waiting for an own result, "full" and "empty" are waits at the two sides of a buffer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasim.results.reasons import REASONS, UNITS
from fasim.results.run import Run
from fasim.views.common import FirstThatFits, provenance, table

_BAR_WIDTH = 20
_HIGH_PERCENT = 80.0  # a unit this busy is near its limit
_STALL_PERCENT = 20.0  # a wait this long deserves a look, unless it is one of:
#: Healthy: blocked at issue the MMA queue is full, a producer that waits for an empty buffer is ahead.
HEALTHY = ("issue", "empty", "launch", "tail")
_STALLS = "Time of each role, %"
#: Column heads of at most four characters, the width of a share.
_SHORT = {"issue": "iss", "dependency": "dep", "barrier": "barr", "empty": "empt", "memory": "mem", "launch": "lnch"}


def render_report(run: Run) -> RenderableType:
    """The report as a rich renderable; it fits 80 columns, and 40 with shorter heads, bars and lines for tables."""
    utilisation = FirstThatFits(*(_utilisation(run, bar) for bar in (_BAR_WIDTH, _BAR_WIDTH // 2)))
    parts: list[RenderableType] = [_headline(run), Text(), utilisation, Text(), _stalls(run.stalls), _Legend(), Text()]
    return Group(*parts, _traffic(run), Text(), _origin(run))


def _headline(run: Run) -> Text:
    dtype = str(run.meta.get("problem", {}).get("dtype", "")).upper()
    peak = f"{run.peak_percent:.1f} % of the dense {dtype} peak at this clock".replace("  ", " ")
    reason = run.meta.get("clock_reason", "")
    text = Text()
    text.append(f"{run.cycles:,.0f} cycles", style="bold")
    text.append(" = ")
    text.append(f"{run.time_us:.4g} us", style="bold")
    text.append(f" at {run.clock_mhz:.0f} MHz")
    text.append(f" ({reason})\n" if reason else "\n", style="dim")
    text.append(f"{run.tflops:.1f} TFLOP/s", style="bold")
    text.append(f", {peak}, bottleneck: ")
    text.append(run.bottleneck, style="bold red")
    text.append("\n" + " · ".join(provenance(run)), style="cyan")
    return text


def _table(title: str, *heads: str) -> Table:
    return table(*heads, title=title, title_justify="left", title_style="bold")


def _utilisation(run: Run, bar_width: int) -> Table:
    steady = run.utilisation_steady
    rows = _table("Utilisation, % of peak rate", "unit", "run", *(() if steady is None else ("steady",)))
    rows.add_column("", width=bar_width)
    if run.bottleneck in run.utilisation:
        rows.add_column("")
    for unit, percent in busiest_first(run):
        limit = unit == run.bottleneck
        style = "bold red" if limit else "yellow" if percent >= _HIGH_PERCENT else ""
        cells: list[RenderableType] = [Text(unit, style=style), Text(f"{percent:.1f}", style=style)]
        if steady is not None:
            cells.append(f"{steady[unit]:.1f}" if unit in steady else "")
        colour = "red" if limit else "yellow" if percent >= _HIGH_PERCENT else "green"
        bar = ProgressBar(total=100, completed=percent, width=bar_width, complete_style=colour, finished_style=colour)
        rows.add_row(*cells, bar, *([Text("limit", style=style)] if limit else []))
    return rows


def busiest_first(run: Run) -> list[tuple[str, float]]:
    """Units with their utilisation over the run; equal ones in the order of UNITS."""
    order = {unit: position for position, unit in enumerate(UNITS)}
    return sorted(run.utilisation.items(), key=lambda item: (-item[1], order.get(item[0], len(order))))


def _stalls(stalls: Mapping[str, Mapping[str, float]]) -> RenderableType:
    """Shares by role: as a table, with abbreviated heads, or a line per role, whatever the terminal has room for."""
    rows = {role: dict(zip(REASONS, tenths(shares), strict=True)) for role, shares in stalls.items()}
    return FirstThatFits(_stall_table(rows, {}), _stall_table(rows, _SHORT), _stall_lines(rows))


def _stall_table(rows: Mapping[str, Mapping[str, float]], short: Mapping[str, str]) -> Table:
    reasons = [reason for reason in REASONS if any(row[reason] for row in rows.values())]
    shown = _table(_STALLS, "role", *(short.get(reason, reason) for reason in reasons))
    for role, shares in rows.items():
        shown.add_row(Text(role), *(_share_cell(reason, shares[reason]) for reason in reasons))
    return shown


def _stall_lines(rows: Mapping[str, Mapping[str, float]]) -> Text:
    text = Text(_STALLS, style="bold")
    for role, shares in rows.items():
        text.append(f"\n{role}:", style="not bold")
        for reason in sorted(shares, key=lambda reason: -shares[reason]):
            if shares[reason]:
                text.append(f" {reason} ", style="not bold").append_text(_share_cell(reason, shares[reason]))
    return text


class _Legend:
    """What the colours mean, where there are any."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.color_system is None or console.no_color:
            return
        parts = (
            ("limit", "bold red"),
            (f"above {_HIGH_PERCENT:.0f} % of peak, or a wait above {_STALL_PERCENT:.0f} %", "yellow"),
            ("work, or busy", "green"),
        )
        yield Text("  ").join(Text(text, style=style) for text, style in parts)


def tenths(shares: Mapping[str, float]) -> list[float]:
    """Shares in the order of REASONS, rounded to 0.1 so that the printed row adds up to 100 exactly.

    By the largest remainder method.
    """
    exact = [10 * shares.get(reason, 0.0) for reason in REASONS]
    tenths = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: tenths[i] - exact[i])
    for i in by_remainder[: round(sum(exact)) - sum(tenths)]:
        tenths[i] += 1
    return [value / 10 for value in tenths]


def _share_cell(reason: str, percent: float) -> Text:
    if not percent:
        return Text("-", style="dim")
    if reason == "work":
        return Text(f"{percent:.1f}", style="green")
    waiting = reason not in HEALTHY and percent >= _STALL_PERCENT
    return Text(f"{percent:.1f}", style="yellow" if waiting else "")


def _traffic(run: Run) -> Table:
    rows = _table("Traffic", "", "read MB", "write MB", "GB/s")
    for level, read, write, rate in traffic_of(run):
        rows.add_row(level, f"{read:.1f}", f"{write:.1f}", f"{rate:.0f}")
    return rows


def traffic_of(run: Run) -> Iterator[tuple[str, float, float, float]]:
    """Level, MB read, MB written, GB/s."""
    for level in ("l2", "hbm"):
        read, write = (run.traffic.get(f"{level}_{way}_bytes", 0.0) for way in ("read", "write"))
        rate = (read + write) / run.time_us / 1e3 if run.time_us else 0.0
        yield level.upper(), read / 1e6, write / 1e6, rate


def _origin(run: Run) -> Text:
    meta = run.meta
    parts = [
        ("{} tiles", "tiles"),
        ("{} CTAs", "ctas"),
        ("{} per SM", "ctas_per_sm"),
        ("{:.2f} waves", "waves"),
        ("fasim {}", "fasim_version"),
        ("{} engine", "engine"),
        ("arch digest {:.12}", "arch_digest"),
    ]
    return Text(", ".join(form.format(meta[key]) for form, key in parts if key in meta), style="dim")
