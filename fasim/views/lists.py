"""What there is to run, and on what: the tables of ``fasim list``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rich.table import Table
from rich.text import Text

from fasim.arch import Arch


class KnobLike(Protocol):
    """What is shown of a knob."""

    @property
    def name(self) -> str:
        """As ``--knob`` takes it."""

    @property
    def default(self) -> object:
        """The value unless given."""

    @property
    def doc(self) -> str:
        """What it does."""

    @property
    def choices(self) -> Sequence[object]:
        """All values that there are; empty where any value of the type is one."""


class ScheduleLike(Protocol):
    """What is shown of a schedule."""

    @property
    def name(self) -> str:
        """As ``fasim run`` takes it."""

    @property
    def summary(self) -> str:
        """What it is, in one line."""

    @property
    def architectures(self) -> Sequence[str]:
        """Those it runs on."""

    @property
    def knobs(self) -> Mapping[str, KnobLike]:
        """Its knobs by name."""


class BuildLike(Protocol):
    """What is shown of a build."""

    @property
    def schedule(self) -> str:
        """What was compiled."""

    @property
    def name(self) -> str:
        """As ``--build`` takes it."""

    @property
    def default(self) -> bool:
        """Whether it is taken unless another is named."""

    @property
    def architectures(self) -> Sequence[str]:
        """Those it was compiled for."""

    @property
    def title(self) -> str:
        """What it is, in one line."""

    @property
    def compiler(self) -> str:
        """Compiler and version."""


def render_builds(builds: Iterable[BuildLike]) -> Table:
    """One row for each build; defaults have a star."""
    return plain_table(
        ("schedule", "build", "architectures", "what it is", "compiler"),
        ((b.schedule, b.name + "*" * b.default, ", ".join(b.architectures), b.title, b.compiler) for b in builds),
    )


def render_archs(archs: Iterable[Arch]) -> Table:
    """One row for each architecture."""
    return plain_table(
        ("arch", "chip", "architecture", "SMs"),
        ((arch.name, arch.title, arch.architecture, str(arch.chip.sm_count)) for arch in archs),
    )


def render_schedules(schedules: Iterable[ScheduleLike]) -> Table:
    """One row for each schedule."""
    return plain_table(
        ("schedule", "architectures", "what it is"),
        ((schedule.name, ", ".join(schedule.architectures), schedule.summary) for schedule in schedules),
    )


def render_knobs(schedules: Iterable[ScheduleLike]) -> Table:
    """One row for each knob of each schedule."""
    return plain_table(
        ("schedule", "knob", "default", "what it does"),
        (
            (schedule.name, knob.name, knob_text(knob.default), knob.doc + _choices(knob))
            for schedule in schedules
            for knob in schedule.knobs.values()
        ),
    )


def knob_text(value: object) -> str:
    """The value of a knob as it is typed on the command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else str(value)


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


def _choices(knob: KnobLike) -> str:
    return f" ({', '.join(map(str, knob.choices))})" if knob.choices else ""
