"""The tables of a comparison with hardware counters, as rich renderables.

Units in per cent of peak over the whole launch, differences in points; traffic in MB, differences in per cent::

    launch                              tensor  mufu  ...  L2 read
    fa3 B4 S4096 H16 d128  simulated      83.1  42.6          2454
                           measured       82.3  42.1          2450
                           difference     +0.8  +0.5        +0.1 %
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fasim.studies.validate.counters import TRAFFIC, UNITS, CountedLaunch, CounterComparison

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Headings of traffic, which is shown in MB.
TRAFFIC_TITLES = {
    "sm_read_bytes": "SM read",
    "l2_read_bytes": "L2 read",
    "hbm_read_bytes": "HBM read",
    "hbm_write_bytes": "HBM write",
}


def value_text(name: str, value: float | None) -> str:
    """A utilisation in per cent, traffic in MB, nothing for None."""
    if value is None:
        return ""
    return f"{value / 1e6:.0f}" if name in TRAFFIC else f"{value:.1f}"


def error_text(name: str, error: float | None) -> str:
    """A signed difference: points, or per cent for traffic."""
    if error is None:
        return ""
    return f"{100 * error:+.1f} %" if name in TRAFFIC else f"{error:+.1f}"


def render_counters(result: CounterComparison) -> RenderableType:
    """Every launch, the mean absolute errors, and what is not compared with the reason."""
    names = (*UNITS, *TRAFFIC)
    table = Table("launch", "", box=None, pad_edge=False, collapse_padding=True)
    for name in names:
        table.add_column(TRAFFIC_TITLES.get(name, name), justify="right")
    for launch in result.launches:
        for title, cells in _lines(launch).items():
            table.add_row(launch.name if title == "simulated" else "", title, *cells)
    means = result.mean_absolute()
    cells = [error_text(name, means.get(name)).lstrip("+") for name in names]
    table.add_row("mean absolute difference", "", *cells)
    parts: list[RenderableType] = [table, ""]
    reasons = Counter((row.columns["kernel"], row.columns["direction"], row.reason) for row in result.unpredicted)
    if reasons:
        missing = Table("rows", "kernel", "not compared because", box=None, pad_edge=False)
        for (kernel, direction, reason), count in reasons.items():
            missing.add_row(str(count), f"{kernel} {direction}", Text(reason))
        parts += [missing, ""]
    parts.append(Text("units: per cent of peak over all SMs and cycles, difference in points; traffic: MB"))
    return Group(*parts)


def _lines(launch: CountedLaunch) -> dict[str, list[str]]:
    names = (*UNITS, *TRAFFIC)
    return {
        "simulated": [value_text(name, launch.simulated[name]) for name in names],
        "measured": [value_text(name, launch.measured.get(name)) for name in names],
        "difference": [error_text(name, launch.error(name)) for name in names],
    }
