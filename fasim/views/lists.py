"""What there is to run, and on what: the tables of ``fasim list``, made of plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from fasim.arch import Arch
from fasim.views.common import knob_text


def render_archs(archs: Iterable[Arch]) -> Table:
    """One row for each architecture."""
    return plain_table(
        ("arch", "chip", "architecture", "SMs"),
        ((arch.name, arch.title, arch.architecture, str(arch.chip.sm_count)) for arch in archs),
    )


def render_schedules(schedules: Iterable[tuple[str, Sequence[str], str]]) -> Table:
    """One row for each schedule: name, architectures, what it is."""
    return plain_table(
        ("schedule", "architectures", "what it is"),
        ((name, ", ".join(architectures), summary) for name, architectures, summary in schedules),
    )


def render_knobs(knobs: Iterable[tuple[str, str, object, str, Sequence[object]]]) -> Table:
    """One row for each knob: schedule, name, default, what it does, the choices if only some values are allowed."""
    return plain_table(
        ("schedule", "knob", "default", "what it does"),
        (
            (
                schedule,
                name,
                "auto" if default is None else knob_text(default),
                f"{doc} ({', '.join(map(str, choices))})" if choices else doc,
            )
            for schedule, name, default, doc, choices in knobs
        ),
    )


def render_builds(builds: Iterable[tuple[str, str, bool, Sequence[str], str, str]]) -> Table:
    """One row for each build: schedule, name, whether it is the default, architectures, what it is, compiler."""
    return plain_table(
        ("schedule", "build", "architectures", "what it is", "compiler"),
        (
            (schedule, f"{name}{'*' if default else ''}", ", ".join(architectures), title, compiler)
            for schedule, name, default, architectures, title, compiler in builds
        ),
    )


def warnings_text(warnings: Mapping[str, Sequence[str]]) -> str:
    """Warnings by architecture file, a line each; where there are none, that all is well."""
    lines = [f"{file}: {warning}" for file, found in warnings.items() for warning in found]
    return "\n".join(lines) or f"{len(warnings)} file{'s' if len(warnings) > 1 else ''} ok"


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without lines, of texts that are shown whole."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
