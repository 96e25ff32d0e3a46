"""Phases inside FlashAttention-3, measured and simulated: a table and a trace of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from fasim.studies.validate.phases import PhaseComparison, stamps_trace

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_phases(result: PhaseComparison) -> RenderableType:
    """Medians per variant and phase in cycles, errors in per cent of the measurement."""
    table = Table("variant", "phase", box=None, pad_edge=False)
    for name in ("measured", "simulated", "error %"):
        table.add_column(name, justify="right")
    for variant in result.variants:
        for i, (phase, (measured, simulated, error)) in enumerate(variant.rows().items()):
            cells = (f"{measured:.0f}", f"{simulated:.0f}", f"{100 * error:+.1f}")
            table.add_row("" if i else variant.name, phase, *cells)
    return table


def write_phases(result: PhaseComparison, path: str | Path) -> None:
    """Write the phases of every variant, measured above simulated on tracks of the same names, for Perfetto.

    The suffix picks the format. Raises ConfigError as :func:`fasim.views.perfetto.write_trace` does.
    """
    from fasim.views.perfetto import Recording, write_recordings

    recordings = [
        Recording(f"{variant.name} {source}", f"{variant.name} · {source}", {"data": result.data}, stamps_trace(stamps))
        for variant in result.variants
        for source, stamps in (("measured", variant.measured), ("simulated", variant.simulated))
    ]
    write_recordings(recordings, {"data": result.data, "overrides": list(result.overrides)}, path)
