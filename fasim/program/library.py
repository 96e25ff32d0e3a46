"""Finding and calling schedules: the shipped ones and a user's own file.

A schedule file holds one function marked with :func:`schedule`, which takes the problem, the architecture and its
knobs, the fields of a frozen dataclass whose annotations say type and meaning::

    @dataclass(frozen=True)
    class Knobs:
        stages: Annotated[int, "K/V buffers"] = 2

    @schedule(architectures=("hopper",), dtypes=("bf16", "fp16"))
    def fa3(problem: Problem, arch: Arch, knobs: Knobs) -> Kernel: ...

A schedule without knobs leaves the third parameter out. One with builds (:mod:`fasim.program.builds`) has one more,
``build: Build``, and the knob ``build`` chooses it by name or path.

Where a schedule is several kernels, one file each, the files are called ``NAME_sm90.py``, ``NAME_sm100.py`` ...;
``NAME`` picks the one that exists for chip and problem.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from fasim.arch import Arch
from fasim.errors import ConfigError, FasimError, did_you_mean
from fasim.files import data_folder
from fasim.problem import Problem
from fasim.program.build_files import choose_build, list_builds, load_build
from fasim.program.builds import Build
from fasim.program.language import Kernel

Recorded = Kernel | Sequence[Kernel]
F = TypeVar("F", bound=Callable[..., Recorded])

_TRUE = ("on", "true", "yes", "1")
_FALSE = ("off", "false", "no", "0")

#: ``fa4_sm90``, ``fa4_sm100_d256``: kernels of the schedule ``fa4``.
_OF_FAMILY = re.compile(r"(\w+?)_sm\d+(_\w+)?")


@dataclass(frozen=True)
class Knob:
    """A field of a schedule's knobs. ``default`` None: chosen as the real kernel does."""

    name: str
    type: type
    default: object
    doc: str
    choices: tuple[str, ...] = ()

    def parse(self, value: object) -> object:
        """``value`` (often text from the command line) as this knob's type.

        Raises ConfigError naming the knob and what it takes.
        """
        if value is None or value in ("auto", ""):
            return self.default
        text = str(value).strip().lower()
        if self.type is bool:
            if text in _TRUE or text in _FALSE:
                return text in _TRUE
            raise ConfigError(f"knob '{self.name}': expected on or off, got '{value}'")
        if self.choices:
            if text in self.choices:
                return text
            raise ConfigError(f"knob '{self.name}': unknown value '{value}'{did_you_mean(text, self.choices)}")
        try:
            number = float(text)
            if not math.isfinite(number):
                raise ValueError
            if self.type is int:
                if number != int(number):
                    raise ValueError
                return int(number)
            return number
        except (ValueError, OverflowError):
            kind = "a whole number" if self.type is int else "a number"
            raise ConfigError(f"knob '{self.name}': expected {kind}, got '{value}'") from None


@dataclass(frozen=True)
class BuildKnob(Knob):
    """The knob ``build`` of schedules that have builds: a name, or the path of a user's file."""

    def parse(self, value: object) -> object:
        """Name or path as text; None for the default of the architecture. Raises ConfigError for an unknown name."""
        text = str(value)
        return text if text.endswith(".toml") or "/" in text else super().parse(value)


@dataclass(frozen=True)
class Marked:
    """What :func:`schedule` says about a function. ``head_dims``: the only ones it is for, empty: all others."""

    architectures: tuple[str, ...]
    dtypes: tuple[str, ...]
    directions: tuple[str, ...]
    head_dims: tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """The function of one schedule file, and its knobs."""

    marked: Marked
    summary: str
    knobs: dict[str, Knob]
    knobs_type: type | None
    takes_build: bool
    function: Callable[..., Recorded]
    path: Path


@dataclass(frozen=True)
class Schedule:
    """A schedule with what it declares about itself: one kernel, or several of which chip and problem pick one."""

    name: str
    variants: tuple[Variant, ...]

    @property
    def summary(self) -> str:
        """One line."""
        return self.variants[0].summary

    @property
    def path(self) -> Path:
        """Its file, the first of several."""
        return self.variants[0].path

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures it exists for."""
        return tuple(dict.fromkeys(a for v in self.variants for a in v.marked.architectures))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Data types of any of its kernels."""
        return tuple(dict.fromkeys(d for v in self.variants for d in v.marked.dtypes))

    @property
    def directions(self) -> tuple[str, ...]:
        """Directions of any of its kernels."""
        return tuple(dict.fromkeys(d for v in self.variants for d in v.marked.directions))

    @property
    def knobs(self) -> dict[str, Knob]:
        """Knobs of all its kernels."""
        return self._knobs(self.variants, self.architectures)

    def knobs_on(self, arch: Arch) -> dict[str, Knob]:
        """Knobs of its kernels for ``arch``."""
        on = [variant for variant in self.variants if arch.architecture in variant.marked.architectures]
        return self._knobs(on, (arch.architecture,))

    def _knobs(self, variants: Sequence[Variant], architectures: Sequence[str]) -> dict[str, Knob]:
        found = {name: knob for variant in variants for name, knob in variant.knobs.items()}
        if any(variant.takes_build for variant in variants):
            builds = [load_build(self.home, name) for name in list_builds(self.home)]
            builds = [build for build in builds if set(build.architectures) & set(architectures)]
            defaults = [build.name for build in builds if build.default]
            doc = "what a compiler made of it: a name or a .toml file; default: the architecture's"
            choices = tuple(build.name for build in builds)
            found["build"] = BuildKnob("build", str, defaults[0] if len(defaults) == 1 else None, doc, choices)
        return found

    @property
    def home(self) -> Path:
        """The path beside which its builds are: that of its file, or of the family of its files."""
        return self.path.with_name(f"{self.name}.py")

    def build(self, problem: Problem, arch: Arch, knobs: Mapping[str, object]) -> list[Kernel]:
        """Record the kernels for ``problem`` on ``arch``, in the order they are launched.

        Raises ConfigError where the schedule does not exist for this chip, dtype, direction, or knob.
        """
        variant = self._pick(problem, arch)
        name = variant.path.stem if len(self.variants) > 1 else self.name  # of several kernels, the one that refuses
        parsed = parse_knobs(name, self._knobs((variant,), (arch.architecture,)), knobs)
        arguments: list[object] = [problem, arch]
        build = self._choose(parsed.pop("build", None), arch) if variant.takes_build else None
        if variant.knobs_type is not None:
            arguments.append(variant.knobs_type(**parsed))
        if build is not None:
            arguments.append(build)
        built = variant.function(*arguments)
        return [built] if isinstance(built, Kernel) else list(built)

    def _choose(self, chosen: object, arch: Arch) -> Build:
        build = choose_build(self.home, arch.architecture, None if chosen is None else str(chosen))
        if build is None:
            raise ConfigError(f"schedule '{self.name}' has no build for {arch.name} ({arch.architecture})")
        return build

    def _pick(self, problem: Problem, arch: Arch) -> Variant:
        """The kernel for ``problem`` on ``arch``."""
        if arch.architecture not in self.architectures:
            others = [n for n in list_schedules() if arch.architecture in load_schedule(n).architectures]
            raise ConfigError(
                f"schedule '{self.name}' does not exist for {arch.name} ({arch.architecture}); it runs on "
                f"{', '.join(self.architectures)}; schedules for {arch.name}: {', '.join(others) or 'none'}"
            )
        found = [v for v in self.variants if arch.architecture in v.marked.architectures]
        special = [v for v in found if problem.head_dim in v.marked.head_dims]
        variant = (special or [v for v in found if not v.marked.head_dims])[0]
        for what, value, known in (
            ("dtype", problem.dtype, variant.marked.dtypes),
            ("direction", problem.direction, variant.marked.directions),
        ):
            if value not in known:
                where = f" on {arch.name}" if len(self.variants) > 1 else ""
                raise ConfigError(f"schedule '{self.name}'{where}: no {what} '{value}' (has {', '.join(known)})")
        return variant


def parse_knobs(schedule: str, knobs: Mapping[str, Knob], given: Mapping[str, object]) -> dict[str, object]:
    """The values of ``given`` knobs of a schedule, by their types. Raises ConfigError with the choices."""
    for name in given:
        if name not in knobs:
            raise ConfigError(f"schedule '{schedule}': unknown knob '{name}'{did_you_mean(name, knobs)}")
    return {name: knobs[name].parse(value) for name, value in given.items()}


def schedule(
    *,
    architectures: tuple[str, ...],
    dtypes: tuple[str, ...],
    directions: tuple[str, ...] = ("fwd",),
    head_dims: tuple[int, ...] = (),
) -> Callable[[F], F]:
    """Mark a function as the schedule of its file and say what it exists for; ``head_dims`` empty: any."""

    def mark(function: F) -> F:
        function.fasim_schedule = Marked(architectures, dtypes, directions, head_dims)  # type: ignore[attr-defined]
        return function

    return mark


def schedule_folder() -> Path:
    """Where the shipped schedules are: package data in a wheel, the top-level folder in a checkout."""
    return data_folder("schedules")


def _shipped() -> dict[str, list[Path]]:
    """Shipped schedules and their files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(schedule_folder().glob("*.py")):
        if not path.stem.startswith("_"):
            family = _OF_FAMILY.fullmatch(path.stem)
            found.setdefault(family[1] if family else path.stem, []).append(path)
    return found


def list_schedules() -> list[str]:
    """Names of the shipped schedules, from the folder."""
    return sorted(_shipped())


def load_schedule(name_or_path: str | Path) -> Schedule:
    """A shipped schedule by name, or the one in a ``.py`` file.

    Raises ConfigError for an unknown name, an unreadable file, or a file without a schedule.
    """
    text = str(name_or_path)
    if text.endswith(".py") or "/" in text:
        path = Path(text)
        if not path.is_file():
            raise ConfigError(f"schedule file '{path}' does not exist")
        return Schedule(path.stem, (_load(path),))
    shipped = _shipped()
    if text not in shipped:
        raise ConfigError(f"unknown schedule '{text}'{did_you_mean(text, shipped)}")
    return Schedule(text, tuple(_load(path) for path in shipped[text]))


def _load(path: Path) -> Variant:
    module = _import(path)
    found = [f for f in vars(module).values() if callable(f) and hasattr(f, "fasim_schedule")]
    if len(found) != 1:
        raise ConfigError(f"{path}: expected one function marked @schedule, found {len(found)}")
    return _describe(found[0], path)


def _import(path: Path) -> types.ModuleType:
    # A package of its folder, so that a schedule may be spread over files: ``from ._parts import ...``.
    folder = str(path.resolve().parent)
    package = types.ModuleType("fasim_schedules" + re.sub(r"\W", "_", folder))
    package.__path__ = [folder]
    sys.modules.setdefault(package.__name__, package)
    name = f"{package.__name__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that annotations and dataclasses in the file resolve
    try:
        spec.loader.exec_module(module)
    except FasimError:
        raise
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
    return module


def _describe(function: Callable[..., Recorded], path: Path) -> Variant:
    hints: dict[str, Any] = typing.get_type_hints(function)
    others = list(inspect.signature(function).parameters)[2:]
    takes_build = bool(others) and hints.get(others[-1]) is Build
    knobs_type: type | None = None
    for name in others[: len(others) - takes_build]:
        knobs_type = hints.get(name)
        if not is_dataclass(knobs_type):
            raise ConfigError(f"{path}: the third parameter, '{name}', is the knobs: annotate it by a dataclass")
    doc_text = inspect.getdoc(function) or inspect.getdoc(sys.modules[function.__module__]) or ""
    summary = doc_text.strip().splitlines()[0] if doc_text.strip() else ""
    marked: Marked = function.fasim_schedule  # type: ignore[attr-defined]
    knobs = {} if knobs_type is None else _knobs(knobs_type)
    return Variant(marked, summary, knobs, knobs_type, takes_build, function, path)


def _knobs(knobs_type: type) -> dict[str, Knob]:
    """The fields of a dataclass of knobs."""
    hints = typing.get_type_hints(knobs_type, include_extras=True)
    found = {}
    for field in fields(knobs_type):
        hint, doc = hints[field.name], ""
        if typing.get_origin(hint) is typing.Annotated:
            hint, doc = typing.get_args(hint)[:2]
        options = [a for a in typing.get_args(hint) if a is not type(None)] or [hint]
        choices: tuple[str, ...] = ()
        kind = options[0]
        if typing.get_origin(hint) is typing.Literal:
            choices, kind = tuple(str(a) for a in options), str
        elif typing.get_origin(kind) is typing.Literal:
            choices, kind = tuple(str(a) for a in typing.get_args(kind)), str
        found[field.name] = Knob(field.name, kind, field.default, str(doc), choices)
    return found
