"""The tables of the numeric study: errors of exponentials, rescales, quantisation and rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render_numerics(data: Mapping[str, Any]) -> RenderableType:
    """The tables of :func:`fasim.studies.numerics.numerics`, an empty line after each."""
    return Group(*(part for name, rows in data["tables"].items() for part in (_table(name, rows), Text())))


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=name, box=None, pad_edge=False, title_justify="left")
    for column, value in rows[0].items():
        heading = column.removesuffix("_percent").replace("_", " ") + (" %" if column.endswith("_percent") else "")
        table.add_column(heading, justify="left" if isinstance(value, str | bool) else "right")
    for row in rows:
        table.add_row(*(Text(_cell(column, value)) for column, value in row.items()))
    return table


def _cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if column == "gain" or column.endswith("_percent"):
        return f"{value:.2f}"
    return f"{value:g}" if column == "threshold" else f"{value:.2e}"
