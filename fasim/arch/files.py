"""Architecture files: find, load, override and check them. The content is described in ``fasim.arch.model``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fasim.arch.model import Arch, Provenance
from fasim.errors import ConfigError, did_you_mean

__all__ = ["Arch", "Provenance", "arch_folder", "arch_schema", "check_arch", "list_archs", "load_arch"]

KeyPath = tuple[str, ...]

#: Keys that describe a file itself, so a derived file does not inherit them.
_NOT_INHERITED = ("base", "name", "title")

_PACKAGE = Path(__file__).parents[1]

#: What a value should have been, by pydantic error type.
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "model_type": "a table",
    "dict_type": "a table",
}


def arch_folder() -> Path:
    """Folder of the shipped files: package data in an installed wheel, ``<repository>/arch_models`` in a checkout."""
    packaged = _PACKAGE / "data" / "arch_models"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "arch_models"


def list_archs() -> list[str]:
    """Names of the shipped architectures, sorted."""
    return sorted(path.stem for path in arch_folder().glob("*.toml"))


def load_arch(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Arch:
    """Load an architecture.

    ``name_or_path`` is a shipped name ("h100") or the path of a TOML file. A file with ``base = "h100"`` (a shipped
    name, or a path relative to the file) states only what differs from its base. ``overrides`` are "path=value"
    texts such as "sm.mufu.ops_per_cycle=32", applied in order.

    Raises ConfigError, naming file and key, for a file that cannot be found, read or parsed, an unknown or missing
    key, a value of the wrong type, a cycle of bases, or an override that does not fit.
    """
    files = _read_chain(_locate(name_or_path))
    content = files[0].resolve(files[1:])
    arch = _validate(content, files)
    digest = arch.content_digest()
    for text in overrides:
        content = _override(content, text)
        arch = _validate(content, [_File(f"override {text}", content)])
    return arch.with_provenance(Provenance(str(files[0].path), digest, tuple(overrides)))


def check_arch(path: str | Path) -> list[str]:
    """Warnings about an architecture that is well formed but looks wrong; an empty list when it looks right.

    Raises ConfigError as :func:`load_arch` does.
    """
    arch = load_arch(path)
    stem = Path(arch.source).stem
    return ([f"name: '{arch.name}' differs from the file name '{stem}'"] if arch.name != stem else []) + list(
        _warnings(arch)
    )


def arch_schema() -> dict[str, Any]:
    """JSON schema of an architecture file, for editors. A file with a ``base`` needs no other key."""
    schema = Arch.model_json_schema()
    required = schema.pop("required")
    schema["properties"]["base"] = {"type": "string", "description": "Shipped name or path this file derives from."}
    for definition in schema["$defs"].values():
        definition.pop("required", None)  # a derived file may state any part of a table
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **schema,
        "anyOf": [{"required": ["base"]}, {"required": [key for key in required if key not in _NOT_INHERITED]}],
    }


@dataclass(frozen=True)
class _File:
    """A parsed file; ``label`` is how messages call it."""

    label: str
    content: dict[str, Any]
    path: Path = Path()

    def resolve(self, bases: Sequence[_File]) -> dict[str, Any]:
        """Content on top of that of its bases (nearest first), with the name and title that every Arch has."""
        merged: dict[str, Any] = {}
        for file in (*reversed(bases), self):
            inheritable = {k: v for k, v in file.content.items() if k not in _NOT_INHERITED}
            merged = _merge(merged, inheritable)
        name = self.content.get("name", self.path.stem)
        return {"name": name, "title": self.content.get("title", name), **merged}

    def has(self, path: Sequence[str]) -> bool:
        node: Any = self.content
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True


def _locate(name_or_path: str | Path, folder: Path = Path()) -> Path:
    """Path of a shipped name, or of a file relative to ``folder``. Anything with a dot or a slash is a path."""
    text = str(name_or_path)
    if isinstance(name_or_path, str) and "/" not in text and "." not in text:
        if text not in list_archs():
            raise ConfigError(f"unknown architecture '{text}'{did_you_mean(text, list_archs())}")
        return arch_folder() / f"{text}.toml"
    return folder / name_or_path


def _read(path: Path) -> _File:
    try:
        return _File(path.name, tomllib.loads(path.read_text(encoding="utf-8")), path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (shipped architectures: {', '.join(list_archs())})") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _read_chain(path: Path) -> list[_File]:
    """The file at ``path`` followed by its bases, nearest first."""
    chain: list[_File] = []
    while True:
        if any(path.resolve() == file.path.resolve() for file in chain):
            names = " -> ".join([*(file.label for file in chain), path.name])
            raise ConfigError(f"{chain[0].label}: base: cycle {names}")
        try:
            chain.append(_read(path))
        except ConfigError as error:
            raise ConfigError(f"{chain[-1].label}: base: {error}" if chain else str(error)) from None
        base = chain[-1].content.get("base")
        if base is None:
            return chain
        if not isinstance(base, str):
            raise ConfigError(f"{chain[-1].label}: base: expected a string, got {base!r}")
        try:
            path = _locate(base, path.parent)
        except ConfigError as error:
            raise ConfigError(f"{chain[-1].label}: base: {error}") from None


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """``top`` over ``base``, table by table; neither is changed."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _override(content: dict[str, Any], text: str) -> dict[str, Any]:
    """``content`` with one "path=value" applied. The value is read as TOML, else as a bare string."""
    path, equals, value = (part.strip() for part in text.partition("="))
    if not (path and equals and value):
        raise ConfigError(f"override '{text}': expected path=value, such as sm.mufu.ops_per_cycle=32")
    if path == "base":
        raise ConfigError(f"override {text}: base: can only be set in a file")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for key in reversed(path.split(".")):
        parsed = {key: parsed}
    return _merge(content, parsed)


def _validate(content: dict[str, Any], files: Sequence[_File]) -> Arch:
    """The validated model, or a ConfigError that names the nearest of ``files`` with the offending key."""
    try:
        return Arch.model_validate(content)
    except ValidationError as error:
        # Unknown keys first: a misspelt key is also reported as the lack of the right one.
        problems = sorted(
            error.errors(include_url=False), key=lambda p: p["type"] not in ("extra_forbidden", "unknown_key")
        )
        path, message = _describe(problems[0])
        file = next((file for file in files if file.has(path)), files[0])
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{file.label}: {'.'.join(path)}: {message}{more}") from None


def _describe(problem: ErrorDetails) -> tuple[KeyPath, str]:
    """Key path and one-line message of a pydantic error."""
    path = tuple(str(key) for key in problem["loc"] if key != "[key]")
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return path, f"unknown key{did_you_mean(path[-1], _keys(path[:-1]))}"
    if kind == "unknown_key":
        return path, f"unknown key{did_you_mean(path[-1], problem['ctx']['choices'])}"
    if kind == "missing":
        return path, "missing key"
    if kind == "literal_error":
        choices = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return path, f"unknown value {value!r}{did_you_mean(str(value), choices)}"
    expected = _EXPECTED.get(kind) or problem["msg"].removeprefix("Input should be ")
    if expected.startswith("greater"):
        expected = f"a number {expected}"
    return path, f"expected {expected}, got {value!r}"


def _keys(path: KeyPath) -> list[str]:
    """Keys of the table at ``path``."""
    schema = arch_schema()
    node: dict[str, Any] = schema
    for key in path:
        node = node["properties"][key]
        for option in (node, *node.get("anyOf", ())):
            if "$ref" in option:
                node = schema["$defs"][option["$ref"].rpartition("/")[2]]
                break
    return list(node["properties"])


def _warnings(arch: Arch) -> Iterator[str]:
    chip, clock, sm = arch.chip, arch.clock, arch.sm
    rates = sm.tensor.flops_per_cycle
    yield from _peak_warnings(chip.datasheet_tflops, rates, chip.sm_count * clock.datasheet_mhz * 1e-6)
    if clock.datasheet_mhz > clock.max_mhz:
        yield f"clock.datasheet_mhz: {clock.datasheet_mhz:g} is above clock.max_mhz {clock.max_mhz:g}"
    for work, mhz in clock.sustained_mhz.items():
        if mhz > clock.max_mhz:
            yield f"clock.sustained_mhz.{work}: {mhz:g} is above clock.max_mhz {clock.max_mhz:g}"
    if clock.attention is not None:
        if clock.attention.idle_mhz > clock.max_mhz:
            yield f"clock.attention.idle_mhz: {clock.attention.idle_mhz:g} is above clock.max_mhz {clock.max_mhz:g}"
        if clock.attention.drop_mhz >= clock.attention.idle_mhz:
            yield "clock.attention.drop_mhz: leaves no clock at the tensor peak"
    for key, rate in (
        ("issue.ops_per_cycle", sm.issue.ops_per_cycle),
        ("fma.ops_per_cycle", sm.fma.ops_per_cycle),
        ("alu.ops_per_cycle", sm.alu.ops_per_cycle),
        ("mufu.ops_per_cycle", sm.mufu.ops_per_cycle),
    ):
        if rate % sm.sub_cores:
            yield f"sm.{key}: {rate:g} does not divide by sm.sub_cores {sm.sub_cores}"
    if sm.smem.max_cta_bytes + sm.smem.reserved_cta_bytes > sm.smem.capacity_bytes:
        yield "sm.smem.max_cta_bytes: with reserved_cta_bytes it is above sm.smem.capacity_bytes"
    for dtype in ("fp16", "bf16"):
        if sm.tensor.mma_sync_flops_per_cycle > rates.get(dtype, float("inf")):
            yield f"sm.tensor.mma_sync_flops_per_cycle: above sm.tensor.flops_per_cycle.{dtype}"
    if arch.hbm.achieved_bytes_per_second > arch.hbm.peak_bytes_per_second:
        yield "hbm.achieved_bytes_per_second: above hbm.peak_bytes_per_second"
    if arch.hbm.latency_cycles < arch.l2.latency_cycles:
        yield "hbm.latency_cycles: below l2.latency_cycles, which it includes"
    for table, architectures in (("tma", ("hopper", "blackwell")), ("tmem", ("blackwell",))):
        if (getattr(sm, table) is not None) != (arch.architecture in architectures):
            yield f"sm.{table}: unexpected presence or absence on {arch.architecture}"


def _peak_warnings(peaks: Mapping[str, float], rates: Mapping[str, float], tera_sm_cycles: float) -> Iterator[str]:
    """Published peaks that rate x SMs x clock misses by more than 3 %."""
    for dtype, peak in peaks.items():
        if dtype not in rates:
            yield f"chip.datasheet_tflops.{dtype}: sm.tensor.flops_per_cycle has no {dtype}"
        elif abs(rates[dtype] * tera_sm_cycles / peak - 1) > 0.03:
            yield (
                f"chip.datasheet_tflops.{dtype}: {peak:g}, but flops_per_cycle x sm_count x datasheet_mhz gives "
                f"{rates[dtype] * tera_sm_cycles:.5g}"
            )
