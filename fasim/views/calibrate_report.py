"""The table of a calibration, as a rich renderable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fasim.studies.calibrate.study import Calibration, Change

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_calibration(result: Calibration) -> RenderableType:
    """One line per key: the value in the file, the new one, the estimate before rounding with its residual.

    A star marks what changes; what is stated in the base the file inherits.
    """
    table = Table("", box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for name in ("old", "new", "estimate", "residual", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("how", "program", "stated"):
        table.add_column(name)
    for change in result.changes:
        estimate = change.estimate
        for key, old, new, value in _parts(change):
            table.add_row(
                "*" if new != old else "",
                key,
                f"{old:g}",
                f"{new:g}",
                f"{value:.4g}",
                f"{estimate.residual:.3g}",
                str(estimate.count),
                estimate.how,
                change.rule.program,
                "in base" if change.inherited else "here",
            )
    parts: list[RenderableType] = [table]
    if result.skipped:
        parts.append("")
        parts += [Text(f"not set: {key}: {reason}") for key, reason in result.skipped]
    return Group(*parts)


def _parts(change: Change) -> Iterator[tuple[str, float, float, float]]:
    """Key, old value, new value, estimate: of a list one by one."""
    key, found = change.rule.key, change.estimate.value
    if isinstance(found, tuple) and isinstance(change.old, tuple) and isinstance(change.new, tuple):
        for i, values in enumerate(zip(change.old, change.new, found, strict=True)):
            yield f"{key}[{i}]", *values
    else:
        assert not isinstance(found, tuple) and not isinstance(change.old, tuple) and not isinstance(change.new, tuple)
        yield key, change.old, change.new, found
