"""TOML files that hold numbers: found by name or path, inherited from a base, validated by a pydantic model.

Architecture files and builds share this module. An error names the file, the key and the choices.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from fasim.errors import ConfigError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str, ...]

#: What a value should have been, by pydantic error type.
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "model_type": "a table",
    "dict_type": "a table",
}


class Table(BaseModel):
    """A TOML table: immutable, without unknown keys, and without conversion between types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A validator of keys that lets only ``choices`` pass."""

    def check(key: str) -> str:
        if key not in choices:
            raise PydanticCustomError("unknown_key", "unknown key", {"choices": tuple(choices)})
        return key

    return check


def keyed_by(choices: Sequence[str]) -> FieldInfo:
    """The same for the JSON schema of a table: its keys are ``choices``."""
    info: FieldInfo = Field(json_schema_extra={"propertyNames": {"enum": list(choices)}})
    return info


def data_folder(name: str) -> Path:
    """A folder of shipped files: package data in an installed wheel, ``<repository>/<name>`` in a checkout."""
    package = Path(__file__).parent
    packaged = package / "data" / name
    return packaged if packaged.is_dir() else package.parent / name


@cache
def _parse(text: str) -> dict[str, Any]:
    """The content of a TOML text, which nobody may change: a file and those derived from it share it."""
    return tomllib.loads(text)


@dataclass(frozen=True)
class File:
    """A parsed file; ``label`` is how messages call it."""

    label: str
    content: dict[str, Any]
    path: Path = Path()

    def has(self, path: Sequence[str]) -> bool:
        """Whether the file itself states the key at ``path``."""
        node: Any = self.content
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True


@dataclass(frozen=True)
class Shelf:
    """A folder of TOML files of one kind. ``kind`` and ``kinds`` are what messages call one file and all of them."""

    kind: str
    kinds: str
    folder: Path

    def names(self) -> list[str]:
        """Names of the files, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.toml"))

    def locate(self, name_or_path: str | Path, relative_to: Path = Path()) -> Path:
        """Path of a shipped name, or of a file relative to a folder.

        A text with a slash, or with a dot and no shipped name, is a path. Raises ConfigError for an unknown name.
        """
        text = str(name_or_path)
        names = self.names()
        if isinstance(name_or_path, str) and text in names:
            return self.folder / f"{text}.toml"
        if isinstance(name_or_path, str) and "/" not in text and "." not in text:
            raise ConfigError(f"unknown {self.kind} '{text}'{did_you_mean(text, names)}")
        return relative_to / name_or_path

    def read(self, path: Path) -> File:
        """The parsed file. Raises ConfigError where it cannot be found, read or parsed."""
        try:
            return File(path.name, _parse(path.read_text(encoding="utf-8")), path)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file (shipped {self.kinds}: {', '.join(self.names())})") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{path}: cannot read: {reason}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None

    def read_chain(self, path: Path) -> list[File]:
        """The file at ``path`` followed by its bases, nearest first.

        ``base`` is a shipped name, or a path relative to the file that states it. Raises ConfigError as ``read``
        does, and for a cycle of bases.
        """
        chain: list[File] = []
        while True:
            if any(path.resolve() == file.path.resolve() for file in chain):
                names = " -> ".join([*(file.label for file in chain), path.name])
                raise ConfigError(f"{chain[0].label}: base: cycle {names}")
            try:
                chain.append(self.read(path))
            except ConfigError as error:
                raise ConfigError(f"{chain[-1].label}: base: {error}" if chain else str(error)) from None
            base = chain[-1].content.get("base")
            if base is None:
                return chain
            if not isinstance(base, str):
                raise ConfigError(f"{chain[-1].label}: base: expected a string, got {base!r}")
            try:
                path = self.locate(base, path.parent)
            except ConfigError as error:
                raise ConfigError(f"{chain[-1].label}: base: {error}") from None


def merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """``top`` over ``base``, table by table; neither is changed."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def merge_chain(chain: Sequence[File], not_inherited: Sequence[str]) -> dict[str, Any]:
    """Content of a file (the first) on top of that of its bases; no file's own ``not_inherited`` keys are in it."""
    merged: dict[str, Any] = {}
    for file in reversed(chain):
        merged = merge(merged, {key: value for key, value in file.content.items() if key not in not_inherited})
    return merged


def validate(model: type[Model], content: Mapping[str, Any], files: Sequence[File]) -> Model:
    """The validated model, or a ConfigError that names the nearest of ``files`` with the offending key."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        # Unknown keys first: a misspelt key is also reported as the lack of the right one.
        problems = sorted(
            error.errors(include_url=False), key=lambda p: p["type"] not in ("extra_forbidden", "unknown_key")
        )
        path, message = _describe(model, problems[0])
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{owner(files, path).label}: {'.'.join(path)}: {message}{more}") from None


def owner(files: Sequence[File], path: Sequence[str]) -> File:
    """The nearest of ``files`` that states the key at ``path``; the first where none does."""
    return next((file for file in files if file.has(path)), files[0])


def _describe(model: type[BaseModel], problem: ErrorDetails) -> tuple[KeyPath, str]:
    """Key path and one-line message of a pydantic error."""
    path = tuple(str(key) for key in problem["loc"] if key != "[key]")
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return path, f"unknown key{did_you_mean(path[-1], _keys(model, path[:-1]))}"
    if kind == "unknown_key":
        return path, f"unknown key{did_you_mean(path[-1], problem['ctx']['choices'])}"
    if kind == "missing":
        return path, "missing key"
    if kind == "value_error":
        return path, str(problem["ctx"]["error"])
    if kind == "literal_error":
        choices = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return path, f"unknown value {value!r}{did_you_mean(str(value), choices)}"
    expected = _EXPECTED.get(kind) or problem["msg"].removeprefix("Input should be ")
    if expected.startswith("greater"):
        expected = f"a number {expected}"
    return path, f"expected {expected}, got {value!r}"


def _keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Keys of the table at ``path``: of a model, of a table of models with free names, or of one in an array."""
    schema = model.model_json_schema()
    node: dict[str, Any] = schema
    for key in path:
        node = node.get("properties", {}).get(key) or node.get("items") or node.get("additionalProperties") or {}
        for option in (node, *node.get("anyOf", ())):
            if "$ref" in option:
                node = schema["$defs"][option["$ref"].rpartition("/")[2]]
                break
    return [*node.get("properties", ()), *(() if path else ("base",))]
