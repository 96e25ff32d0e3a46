"""Files of builds: find, load and check them, and choose one. The content is described in ``fasim.program.builds``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from fasim.errors import ConfigError, did_you_mean
from fasim.files import File, Shelf, data_folder, merge_chain, owner, validate
from fasim.program.builds import Build

#: Keys that describe a file itself, so a derived file does not inherit them.
_NOT_INHERITED = ("base", "default")

#: Tables of numbers with names of the schedule's own.
_NAMED = ("costs", "mixes", "tables", "loops")


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
    shelf = _shelf(schedule)
    marked = (name for name in shelf.names() if shelf.read(shelf.locate(name)).content.get("default"))
    builds = (load_build(schedule, name) for name in marked)
    return next((build for build in builds if architecture in build.architectures), None)


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
