"""Architecture files: find, load, override and check them. The content is described in ``fasim.arch.model``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasim.arch.model import Arch, Provenance
from fasim.errors import ConfigError
from fasim.files import File, Shelf, data_folder, merge, merge_chain, validate

__all__ = ["Arch", "Provenance", "arch_folder", "arch_schema", "check_arch", "list_archs", "load_arch"]

#: Keys that describe a file itself, so a derived file does not inherit them.
_NOT_INHERITED = ("base", "name", "title")


def arch_folder() -> Path:
    """Folder of the shipped files: package data in an installed wheel, ``<repository>/arch_models`` in a checkout."""
    return data_folder("arch_models")


def _shelf() -> Shelf:
    return Shelf("architecture", "architectures", arch_folder())


def list_archs() -> list[str]:
    """Names of the shipped architectures, sorted."""
    return _shelf().names()


def load_arch(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Arch:
    """Load an architecture.

    ``name_or_path`` is a shipped name ("h100") or the path of a TOML file. A file with ``base = "h100"`` (a shipped
    name, or a path relative to the file) states only what differs from its base. ``overrides`` are "path=value"
    texts such as "sm.mufu.ops_per_cycle=32", applied in order.

    Raises ConfigError, naming file and key, for a file that cannot be found, read or parsed, an unknown or missing
    key, a value of the wrong type, a cycle of bases, or an override that does not fit.
    """
    shelf = _shelf()
    files = shelf.read_chain(shelf.locate(name_or_path))
    own = files[0].content
    name = own.get("name", files[0].path.stem)
    content = {"name": name, "title": own.get("title", name), **merge_chain(files, _NOT_INHERITED)}
    arch = validate(Arch, content, files)
    digest = arch.content_digest()
    for text in overrides:
        content = _override(content, text)
        arch = validate(Arch, content, [File(f"override {text}", content)])
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
    return merge(content, parsed)


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
