"""Builds: what a compiler made of a kernel, in a TOML file with a source and a grade on every number.

A schedule says how a kernel is organised. Its build says what the compiled code of one release looks like: tile table,
registers, costs in cycles, instruction counts, and the order in which the compiler put a softmax. The files of a
schedule are in ``builds/<schedule>/`` beside it; ``docs/builds.md`` describes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from fasim.arch.instructions import INSTRUCTIONS, InstructionClass
from fasim.errors import ConfigError, did_you_mean
from fasim.files import File, Shelf, Table, data_folder, keyed_by, merge_chain, one_of, owner, validate
from fasim.problem import Problem
from fasim.program.ops import Mix, add_mixes, scale_mix

#: How a number was found. ``source``: read in source code or documentation. ``counted``: in machine code or in
#: executed opcodes. ``measured``: counters, cycle stamps or timed builds. ``residual``: what measurements of whole
#: tiles or kernels leave over when everything else is simulated. ``assumed``: nobody looked at this kernel for it.
Grade = Literal["source", "counted", "measured", "residual", "assumed"]
GRADES = ("source", "counted", "measured", "residual", "assumed")

Architecture = Literal["ampere", "hopper", "blackwell"]
Entry = TypeVar("Entry")
Fact = bool | int | str
Condition = Fact | Annotated[tuple[Fact, ...], Field(strict=False)]
_CLASSES = tuple(INSTRUCTIONS)
Counts = Annotated[
    Mapping[Annotated[InstructionClass, BeforeValidator(one_of(_CLASSES))], NonNegativeFloat], keyed_by(_CLASSES)
]
When = Mapping[str, Condition]

#: Keys that describe a file itself, so a derived file does not inherit them.
_NOT_INHERITED = ("base", "default")

#: Tables of numbers with names of the schedule's own.
_NAMED = ("costs", "mixes", "tables", "loops")


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


def _check_grades(grades: Iterable[str], kinds: Iterable[str]) -> None:
    for kind in set(grades) - set(kinds):
        raise ValueError(f"grades.{kind}: unknown key{did_you_mean(kind, kinds)}")


class Cost(Sourced):
    """One number, or one for each of several kinds."""

    unit: str
    """What is counted, and per what: "cycles per tile"."""
    value: NonNegativeFloat | None = None
    by_kind: Mapping[str, NonNegativeFloat] = Field(default={})
    grades: Mapping[str, Grade] = Field(default={})
    """Grades of single kinds that differ from ``grade``."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Cost:
        if (self.value is None) != bool(self.by_kind):
            raise ValueError("expected either value or by_kind")
        _check_grades(self.grades, self.by_kind)
        return self


class MixTable(Sourced):
    """Instructions per thread by class, once or for each of several kinds."""

    per: str
    """What the counts are of: "tile", "score element", "block of K and V"."""
    mix: Counts | None = None
    by_kind: Mapping[str, Counts] = Field(default={})
    grades: Mapping[str, Grade] = Field(default={})
    """Grades of single kinds that differ from ``grade``."""

    @model_validator(mode="after")
    def _one_of_both(self) -> MixTable:
        if (self.mix is None) != bool(self.by_kind):
            raise ValueError("expected either mix or by_kind")
        _check_grades(self.grades, self.by_kind)
        return self


class Row(SourcedRow):
    """A row of a table with columns of the schedule's own."""

    when: When = Field(default={})
    columns: Mapping[str, bool | int | float]


class Rows(Sourced):
    """A table with columns of its own. A column is that of the first row that fits and states it."""

    rows: Annotated[tuple[Row, ...], Field(strict=False, min_length=1)]


class Run(Table):
    """Instructions that stand together in the compiled loop, or a mark between them."""

    label: str = ""
    """What reports call the run."""
    mark: str = ""
    """What stands at this place instead of a run, such as "wait PV"."""
    shares: Counts = Field(default={})
    """By class, the share of all its instructions in the region."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Run:
        if bool(self.label) == bool(self.mark) or bool(self.mark and self.shares):
            raise ValueError("expected either label and shares, or mark")
        return self


class Loop(Sourced):
    """The order of a softmax in compiled code: runs of instructions, with marks between them.

    A warp issues in order, so instructions of a run contend with each other, and what no run names comes last.
    """

    region: str
    """Which code this is; a schedule asks for it by this name."""
    when: When = Field(default={})
    rows_first: PositiveInt
    """Of a thread's two rows, those whose maximum is complete before the first run."""
    runs: Annotated[tuple[Run, ...], Field(strict=False)]

    def split(self, mark: str) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """Runs before and after ``mark``; all are after it where the mark is missing."""
        at = next((number for number, run in enumerate(self.runs) if run.mark == mark), None)
        before, after = ((), self.runs) if at is None else (self.runs[:at], self.runs[at + 1 :])
        return tuple(r for r in before if r.label), tuple(r for r in after if r.label)


class Build(Table):
    """One build of a schedule. Load with :func:`load_build`."""

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
    loops: Mapping[str, Loop] = Field(default={})

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

    def loop(self, region: str, **facts: Fact) -> Loop:
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


def list_builds(schedule: str | Path) -> list[str]:
    """Names of the builds beside a schedule (a shipped name or the path of a ``.py`` file), sorted."""
    return _shelf(schedule).names()


def load_build(schedule: str | Path, name_or_path: str | Path) -> Build:
    """A build of ``schedule`` by name, or the one in a ``.toml`` file of the user's.

    Raises ConfigError, naming file and key, for a file that cannot be found, read or parsed, for an unknown or
    missing key or value, and for numbers without a source and grade of their own.
    """
    shelf = _shelf(schedule)
    text = str(name_or_path)
    if not text.endswith(".toml") and "/" not in text and text not in shelf.names():
        raise ConfigError(f"unknown {shelf.kind} '{text}'{did_you_mean(text, shelf.names())}")
    path = shelf.locate(name_or_path)
    if path.parent == shelf.folder:
        return _load_shipped(shelf, path)
    build, files = _load(shelf, path)
    shipped = [_load_shipped(shelf, shelf.folder / f"{name}.toml") for name in shelf.names()]
    if shipped:
        _check_names(build, shipped, files)
    return build


def choose_build(schedule: str | Path, architecture: str, chosen: str | Path | None = None) -> Build | None:
    """The build that is ``chosen`` by name or path, or the default one; None where none is for the architecture.

    Raises ConfigError as :func:`load_build` does, and where the chosen build is not for the architecture.
    """
    if chosen is not None:
        build = load_build(schedule, chosen)
        if architecture not in build.architectures:
            raise ConfigError(
                f"{build.schedule}: build '{build.name}' is for {', '.join(build.architectures)}, not {architecture}"
            )
        return build
    shipped = (load_build(schedule, name) for name in list_builds(schedule))
    return next((build for build in shipped if build.default and architecture in build.architectures), None)


def _name(schedule: str | Path) -> str:
    return Path(schedule).stem if str(schedule).endswith(".py") else str(schedule)


def _shelf(schedule: str | Path) -> Shelf:
    is_file = str(schedule).endswith(".py")
    folder = Path(schedule).resolve().parent if is_file else data_folder("schedules")
    name = _name(schedule)
    return Shelf(f"build of {name}", f"builds of {name}", folder / "builds" / name)


@cache
def _load_shipped(shelf: Shelf, path: Path) -> Build:
    return _load(shelf, path)[0]


def _load(shelf: Shelf, path: Path) -> tuple[Build, list[File]]:
    """The build at ``path`` and its file followed by those of its bases."""
    files = shelf.read_chain(path)
    for file in files:
        _check_sources(file)
    content = {**merge_chain(files, _NOT_INHERITED), "default": files[0].content.get("default", False)}
    build = validate(Build, content, files)
    if build.schedule != _name(shelf.folder.name):
        where = owner(files, ("schedule",)).label
        raise ConfigError(f"{where}: schedule: '{build.schedule}', but it is a build of '{shelf.folder.name}'")
    build._path = path
    return build, files


def _check_sources(file: File) -> None:
    """A file that derives from another must not put its own numbers under the other's source."""
    if "base" not in file.content:
        return
    tables = {"tiles": file.content.get("tiles")}
    for section in _NAMED:
        of_section = file.content.get(section)
        if isinstance(of_section, dict):
            tables |= {f"{section}.{name}": table for name, table in of_section.items()}
    for path, table in tables.items():
        for key in ("source", "grade"):
            if isinstance(table, dict) and key not in table:
                raise ConfigError(f"{file.label}: {path}.{key}: missing key (the base's does not cover new numbers)")


def _names(build: Build) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Path of each table whose keys are the schedule's own, and these keys."""
    for section in _NAMED:
        yield (section,), list(getattr(build, section))
    for section in ("costs", "mixes"):
        for name, table in getattr(build, section).items():
            yield (section, name, "by_kind"), list(table.by_kind)
    for name, rows in build.tables.items():
        yield ("tables", name, "columns"), [column for row in rows.rows for column in row.columns]
        yield ("tables", name, "when"), [key for row in rows.rows for key in row.when]
    yield ("tiles", "when"), [key for row in (build.tiles.rows if build.tiles else ()) for key in row.when]
    yield ("loops", "region"), [loop.region for loop in build.loops.values()]
    yield ("loops", "when"), [key for loop in build.loops.values() for key in loop.when]
    yield ("features",), list(build.features)


def _check_names(build: Build, shipped: Iterable[Build], files: Sequence[File]) -> None:
    """Names that no shipped build of the schedule has are misspelt: no kernel asks for them."""
    known: dict[tuple[str, ...], set[str]] = {}
    for other in shipped:
        for path, names in _names(other):
            known.setdefault(path, set()).update(names)
    for path, names in _names(build):
        if path == ("loops",):
            continue  # found by region and conditions, not by name
        for name in names:
            if name not in known.get(path, ()):
                label = owner(files, (*path, name)).label
                raise ConfigError(f"{label}: {'.'.join((*path, name))}: unknown key{did_you_mean(name, known[path])}")
