"""Finding and calling schedules: the shipped ones and a user's own file.

A schedule file holds one function marked with :func:`schedule`. Its keyword parameters are the
knobs; their annotations say type and meaning::

    @schedule(architectures=("hopper",), dtypes=("bf16", "fp16"))
    def fa3(problem: Problem, arch: Arch, *, stages: Annotated[int, "K/V buffers"] = 2) -> Kernel: ...
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fasim.arch import Arch
from fasim.errors import ConfigError, FasimError, did_you_mean
from fasim.problem import Problem
from fasim.program.language import Kernel

F = TypeVar("F", bound=Callable[..., Kernel | Sequence[Kernel]])

_TRUE = ("on", "true", "yes", "1")
_FALSE = ("off", "false", "no", "0")


@dataclass(frozen=True)
class Knob:
    """A keyword parameter of a schedule. ``default`` None: chosen as the real kernel does."""

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
class Schedule:
    """A schedule function with what it declares about itself."""

    name: str
    summary: str
    architectures: tuple[str, ...]
    dtypes: tuple[str, ...]
    directions: tuple[str, ...]
    knobs: dict[str, Knob]
    function: Callable[..., Kernel | Sequence[Kernel]]
    path: Path

    def parse_knobs(self, given: Mapping[str, object]) -> dict[str, object]:
        """Check names and types of ``given`` knobs. Raises ConfigError with the choices."""
        for name in given:
            if name not in self.knobs:
                raise ConfigError(f"schedule '{self.name}': unknown knob '{name}'{did_you_mean(name, self.knobs)}")
        return {name: self.knobs[name].parse(value) for name, value in given.items()}

    def build(self, problem: Problem, arch: Arch, knobs: Mapping[str, object]) -> list[Kernel]:
        """Record the kernels for ``problem`` on ``arch``, in the order they are launched.

        Raises ConfigError where the schedule does not exist for this chip, dtype or direction.
        """
        if arch.architecture not in self.architectures:
            others = [n for n in list_schedules() if arch.architecture in load_schedule(n).architectures]
            raise ConfigError(
                f"schedule '{self.name}' does not exist for {arch.name} ({arch.architecture}); it runs on "
                f"{', '.join(self.architectures)}; schedules for {arch.name}: {', '.join(others) or 'none'}"
            )
        for what, value, known in (
            ("dtype", problem.dtype, self.dtypes),
            ("direction", problem.direction, self.directions),
        ):
            if value not in known:
                raise ConfigError(f"schedule '{self.name}': no {what} '{value}' (has {', '.join(known)})")
        built = self.function(problem, arch, **self.parse_knobs(knobs))
        return [built] if isinstance(built, Kernel) else list(built)


def schedule(
    *, architectures: tuple[str, ...], dtypes: tuple[str, ...], directions: tuple[str, ...] = ("fwd",)
) -> Callable[[F], F]:
    """Mark a function as the schedule of its file and say what it exists for."""

    def mark(function: F) -> F:
        function.fasim_schedule = (architectures, dtypes, directions)  # type: ignore[attr-defined]
        return function

    return mark


def schedule_folder() -> Path:
    """Where the shipped schedules are: package data in a wheel, the top-level folder in a checkout."""
    package = Path(__file__).parents[1]
    data = package / "data" / "schedules"
    return data if data.is_dir() else package.parent / "schedules"


def list_schedules() -> list[str]:
    """Names of the shipped schedules, from the folder."""
    return sorted(path.stem for path in schedule_folder().glob("*.py") if not path.stem.startswith("_"))


def load_schedule(name_or_path: str | Path) -> Schedule:
    """A shipped schedule by name, or the one in a ``.py`` file.

    Raises ConfigError for an unknown name, an unreadable file, or a file without a schedule.
    """
    text = str(name_or_path)
    if text.endswith(".py") or "/" in text:
        path = Path(text)
        if not path.is_file():
            raise ConfigError(f"schedule file '{path}' does not exist")
    else:
        path = schedule_folder() / f"{text}.py"
        if not path.is_file():
            raise ConfigError(f"unknown schedule '{text}'{did_you_mean(text, list_schedules())}")
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


def _describe(function: Callable[..., Kernel | Sequence[Kernel]], path: Path) -> Schedule:
    architectures, dtypes, directions = function.fasim_schedule  # type: ignore[attr-defined]
    hints: dict[str, Any] = typing.get_type_hints(function, include_extras=True)
    knobs: dict[str, Knob] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        hint, doc = hints[parameter.name], ""
        if typing.get_origin(hint) is typing.Annotated:
            hint, doc = typing.get_args(hint)[:2]
        options = [a for a in typing.get_args(hint) if a is not type(None)] or [hint]
        choices: tuple[str, ...] = ()
        kind = options[0]
        if typing.get_origin(hint) is typing.Literal:
            choices, kind = tuple(str(a) for a in options), str
        elif typing.get_origin(kind) is typing.Literal:
            choices, kind = tuple(str(a) for a in typing.get_args(kind)), str
        knobs[parameter.name] = Knob(parameter.name, kind, parameter.default, str(doc), choices)
    doc_text = inspect.getdoc(function) or inspect.getdoc(sys.modules[function.__module__]) or ""
    summary = doc_text.strip().splitlines()[0] if doc_text.strip() else ""
    return Schedule(path.stem, summary, architectures, dtypes, directions, knobs, function, path)
