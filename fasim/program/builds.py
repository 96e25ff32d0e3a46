"""Builds: what a compiler made of a kernel, in a TOML file with a source and a grade on every number.

A schedule says how a kernel is organised. Its build says what the compiled code of one release looks like: tile table,
registers, costs in cycles, instruction counts, and the order in which the compiler put a softmax. The files of a
schedule are in ``builds/<schedule>/`` beside it; ``docs/builds.md`` describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from fasim.arch.instructions import INSTRUCTIONS, InstructionClass
from fasim.errors import ConfigError, did_you_mean
from fasim.files import Table, keyed_by, one_of
from fasim.problem import Problem
from fasim.program.ops import Mix, add_mixes, scale_mix

#: How a number was found. ``source``: read in source code or documentation. ``counted``: in machine code or in
#: executed opcodes. ``measured``: counters, cycle stamps or timed builds. ``residual``: what measurements of whole
#: tiles or kernels leave over when everything else is simulated. ``assumed``: nobody looked at this kernel for it.
Grade = Literal["source", "counted", "measured", "residual", "assumed"]

Architecture = Literal["ampere", "hopper", "blackwell"]
Entry = TypeVar("Entry")
Fact = bool | int | str
Condition = Fact | Annotated[tuple[Fact, ...], Field(strict=False)]
_CLASSES = tuple(INSTRUCTIONS)
Counts = Annotated[
    Mapping[Annotated[InstructionClass, BeforeValidator(one_of(_CLASSES))], NonNegativeFloat], keyed_by(_CLASSES)
]
When = Mapping[str, Condition]


class Sourced(Table):
    """A table of numbers and where they come from."""

    source: Annotated[str, Field(min_length=1)]
    """Where the numbers were found: file and commit, machine code, data file, or what was assumed."""
    grade: Grade


class SourcedRow(Table):
    """A row, which says ``source`` and ``grade`` only where they differ from those of its table."""

    source: Annotated[str, Field(min_length=1)] | None = None
    grade: Grade | None = None


class TileRow(SourcedRow):
    """A row of the tile table."""

    when: When
    tile_m: PositiveInt
    """Query rows of a CTA."""
    tile_n: PositiveInt
    """Keys of a block."""
    stages: PositiveInt | None = None
    """Buffers each of K and V, or the depth of the software pipeline."""
    warps: PositiveInt | None = None
    registers: PositiveInt | None = None
    """Registers per thread."""
    p_in_registers: bool | None = None
    """P is a register operand of PV, else it goes through shared memory."""


class Tiles(Sourced):
    """The tile table; the first row that fits counts."""

    rows: Annotated[tuple[TileRow, ...], Field(strict=False, min_length=1)]


class OneOrSeveral(Sourced):
    """What a file says once, in the field called ``_one``, or for each of several kinds."""

    by_kind: Mapping[str, object] = Field(default={})
    grades: Mapping[str, Grade] = Field(default={})
    """Grades of single kinds that differ from ``grade``."""

    _one: ClassVar[str]

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (getattr(self, self._one) is None) != bool(self.by_kind):
            raise ValueError(f"expected either {self._one} or by_kind")
        for kind in set(self.grades) - set(self.by_kind):
            raise ValueError(f"grades.{kind}: unknown key{did_you_mean(kind, self.by_kind)}")
        return self


class Cost(OneOrSeveral):
    """One number, or one for each of several kinds."""

    unit: str
    """What is counted, and per what: "cycles per tile"."""
    value: NonNegativeFloat | None = None
    by_kind: Mapping[str, NonNegativeFloat] = Field(default={})
    _one = "value"


class MixTable(OneOrSeveral):
    """Instructions per thread by class, once or for each of several kinds."""

    per: str
    """What the counts are of: "tile", "score element", "block of K and V"."""
    mix: Counts | None = None
    by_kind: Mapping[str, Counts] = Field(default={})
    _one = "mix"


class Row(SourcedRow):
    """A row of a table with columns of the schedule's own."""

    when: When = Field(default={})
    columns: Mapping[str, bool | int | float]


class Rows(Sourced):
    """A table with columns of its own. A column is that of the first row that fits and states it."""

    rows: Annotated[tuple[Row, ...], Field(strict=False, min_length=1)]


class StreamRun(Table):
    """Instructions that stand together in the compiled loop, or a mark between them."""

    label: str = ""
    """What reports call the run."""
    mark: str = ""
    """What stands at this place instead of a run, such as "wait PV"."""
    shares: Counts = Field(default={})
    """By class, the share of all its instructions in the region."""

    @model_validator(mode="after")
    def _one_of_both(self) -> StreamRun:
        if bool(self.label) == bool(self.mark) or bool(self.mark and self.shares):
            raise ValueError("expected either label and shares, or mark")
        return self


class CompiledLoop(Sourced):
    """The order of a softmax in compiled code: runs of instructions, with marks between them.

    A warp issues in order, so instructions of a run contend with each other, and what no run names comes last.
    """

    region: str
    """Which code this is; a schedule asks for it by this name."""
    when: When = Field(default={})
    rows_first: PositiveInt
    """Of a thread's two rows, those whose maximum is complete before the first run."""
    runs: Annotated[tuple[StreamRun, ...], Field(strict=False)]

    def split(self, mark: str) -> tuple[tuple[StreamRun, ...], tuple[StreamRun, ...]]:
        """Runs before and after ``mark``; all are after it where the mark is missing."""
        at = next((number for number, run in enumerate(self.runs) if run.mark == mark), None)
        before, after = ((), self.runs) if at is None else (self.runs[:at], self.runs[at + 1 :])
        return tuple(r for r in before if r.label), tuple(r for r in after if r.label)


class Build(Table):
    """One build of a schedule. Load with :func:`fasim.program.build_files.load_build`."""

    schedule: str
    title: str
    compiler: str
    """Compiler and version."""
    revision: str
    """Source code that was compiled: repository and commit."""
    architectures: Annotated[tuple[Architecture, ...], Field(strict=False, min_length=1)]
    default: bool = False
    """Taken where no build is named; one file for each schedule and architecture."""
    features: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What the source of this release does otherwise, by names that the schedule asks for."""
    tiles: Tiles | None = None
    costs: Mapping[str, Cost] = Field(default={})
    mixes: Mapping[str, MixTable] = Field(default={})
    tables: Mapping[str, Rows] = Field(default={})
    loops: Mapping[str, CompiledLoop] = Field(default={})

    _path: Path = Path()

    @property
    def name(self) -> str:
        """Name of the file."""
        return self._path.stem

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def has(self, feature: str) -> bool:
        """Whether the release has a feature."""
        return feature in self.features

    def tile(self, problem: Problem, **facts: Fact) -> TileRow:
        """The first row of the tile table that fits ``problem`` and ``facts``. Raises ConfigError where none does."""
        rows = self.tiles.rows if self.tiles else ()
        for number, row in enumerate(rows):
            if self._fits(row.when, _facts(problem, facts), f"tiles.rows.{number}"):
                return row
        raise ConfigError(
            f"{self.schedule}: build {self.name}: no tile for head_dim {problem.head_dim}, head_dim_v "
            f"{problem.head_dim_v}, {problem.dtype}"
        )

    def cost(self, name: str, kind: Fact | None = None) -> float:
        """The number ``name``, of a ``kind`` where it has several. Raises ConfigError where the file lacks it."""
        cost: Cost = self._named("costs", self.costs, name)
        return cost.value if cost.value is not None else self._kind(f"costs.{name}", cost.by_kind, kind)

    def mix(self, name: str, kind: Fact | None = None) -> Mix:
        """The instruction counts ``name``, of a ``kind`` where they have several. Raises ConfigError as ``cost``."""
        table: MixTable = self._named("mixes", self.mixes, name)
        return table.mix if table.mix is not None else self._kind(f"mixes.{name}", table.by_kind, kind)

    def total(self, name: str, **times: float) -> Mix:
        """Instruction counts of several kinds, each as often as said: ``total("mask", step=1, element=32)``."""
        return add_mixes(*(scale_mix(self.mix(name, kind), count) for kind, count in times.items()))

    def kinds(self, name: str) -> list[str]:
        """What the instruction counts ``name`` are of. Raises ConfigError where the file lacks them."""
        table: MixTable = self._named("mixes", self.mixes, name)
        return list(table.by_kind)

    def row(self, name: str, problem: Problem | None = None, **facts: Fact) -> Mapping[str, bool | int | float]:
        """Columns of the table ``name``, each from the first row that fits and states it.

        Raises ConfigError where the table is missing or no row fits.
        """
        known = _facts(problem, facts)
        columns: dict[str, bool | int | float] = {}
        for number, row in enumerate(self._named("tables", self.tables, name).rows):
            if self._fits(row.when, known, f"tables.{name}.rows.{number}"):
                columns = {**row.columns, **columns}
        if not columns:
            raise ConfigError(f"{self._path.name}: tables.{name}: no row for {_text(known)}")
        return columns

    def loop(self, region: str, **facts: Fact) -> CompiledLoop:
        """The first loop of a region whose conditions fit.

        Where the head dimension exceeds that of all loops, the last one whose other conditions fit stands in.
        Raises ConfigError where there is none.
        """
        found = [(name, loop) for name, loop in self.loops.items() if loop.region == region]
        for width in (False, True):
            for name, loop in reversed(found) if width else found:
                when = {k: v for k, v in loop.when.items() if not (width and k in ("head_dim", "head_dim_v"))}
                if self._fits(when, facts, f"loops.{name}"):
                    return loop
        raise ConfigError(f"{self._path.name}: loops: no region '{region}' for {_text(facts)}")

    def _named(self, section: str, table: Mapping[str, Entry], name: str) -> Entry:
        if name not in table:
            raise ConfigError(f"{self._path.name}: {section}.{name}: missing key{did_you_mean(name, table)}")
        return table[name]

    def _kind(self, path: str, table: Mapping[str, Entry], kind: Fact | None) -> Entry:
        if str(kind) not in table:
            raise ConfigError(f"{self._path.name}: {path}.by_kind.{kind}: missing key{did_you_mean(str(kind), table)}")
        return table[str(kind)]

    def _fits(self, when: When, facts: Mapping[str, Fact], path: str) -> bool:
        for key in when:
            if key not in facts:
                raise ConfigError(f"{self._path.name}: {path}.when.{key}: unknown key{did_you_mean(key, facts)}")
        return all(_fits(key, wanted, facts[key]) for key, wanted in when.items())


def _fits(key: str, wanted: Condition, fact: Fact) -> bool:
    """Head dimensions fit up to the wanted one, everything else when equal to it or to one of several."""
    if key in ("head_dim", "head_dim_v"):
        return isinstance(wanted, int) and isinstance(fact, int) and fact <= wanted
    return fact in wanted if isinstance(wanted, tuple) else fact == wanted


def _facts(problem: Problem | None, facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """What conditions may ask for: of the problem, and what the schedule says on top."""
    if problem is None:
        return dict(facts)
    of_problem = ("head_dim", "head_dim_v", "causal", "dtype")
    return {**{name: getattr(problem, name) for name in of_problem}, **facts}


def _text(facts: Mapping[str, Fact]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
