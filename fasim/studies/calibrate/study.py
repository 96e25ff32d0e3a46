"""Architecture files from microbenchmarks: applies the rules of :mod:`fasim.studies.calibrate.rules` to a TOML file.

What a file inherits from its base is stated in it only where the measurement differs, so a file of a product with
known SMs stays short. Values of the product itself (memory system) are taken over only when the results come from it.
Every value that a rule sets carries in its comment where it came from::

    latency_cycles = 17  # dependent EX2; A [measured 2026-11-29: pipes, NVIDIA H200, driver 580.159.04, 1938 MHz]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomlkit
from tomlkit import TOMLDocument

from fasim.arch import Arch, load_arch
from fasim.errors import ConfigError
from fasim.studies.calibrate.estimates import Estimate
from fasim.studies.calibrate.microbench import Microbench
from fasim.studies.calibrate.rules import RULES, Rule

Value = float | tuple[float, ...]

_PROVENANCE = re.compile(r"\s*\[(?:measured|fitted) [^\]]*\]")


@dataclass(frozen=True)
class Change:
    """What one rule says about one key."""

    rule: Rule
    old: Value
    new: Value
    estimate: Estimate
    inherited: bool
    """The file does not state the key; its base has ``new`` already."""


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate`."""

    text: str
    """The new content of the file."""
    changes: tuple[Change, ...]
    skipped: tuple[tuple[str, str], ...]
    """Keys without a result, each with the reason."""


def calibrate(results: Path, arch: str | Path, rules: Sequence[Rule] = RULES) -> Calibration:
    """Apply ``rules`` to the file of an architecture.

    Args:
        results: JSON of ``validation/microbench/run.py``.
        arch: a shipped name or a TOML file. It is not written.
        rules: what follows from what.

    Raises ConfigError for a file that cannot be read or is not what it should be, and for a chip whose SMs the
    microbenchmarks do not describe.
    """
    measured, chip = Microbench.read(results), load_arch(arch)
    if chip.architecture != "hopper":
        raise ConfigError(f"{chip.source}: the microbenchmarks describe Hopper, '{chip.name}' is {chip.architecture}")
    document = tomlkit.parse(Path(chip.source).read_text(encoding="utf-8"))
    changes, skipped = [], []
    for rule in rules:
        reason = _why_not(rule, measured, chip)
        if reason:
            skipped.append((rule.key, reason))
            continue
        estimate = rule.formula(measured)
        old, new = current_value(chip, rule.key), rule.rounded(estimate)
        inherited = not _states(document, rule.key)
        if not inherited or new != old:
            note = f"{estimate.how} {measured.provenance(rule.program)}"
            set_value(document, rule.key, rule.text(new), note)
        changes.append(Change(rule, old, new, estimate, inherited and new == old))
    return Calibration(tomlkit.dumps(document), tuple(changes), tuple(skipped))


def current_value(arch: Arch, key: str) -> Value:
    """The number or list of numbers at a dotted ``key``."""
    node: Any = arch
    for part in key.split("."):
        node = node[part] if isinstance(node, Mapping) else getattr(node, part)
    return cast(Value, node)


def set_value(document: TOMLDocument, key: str, text: str, note: str) -> None:
    """Set a dotted ``key`` to the TOML ``text`` and say where it comes from at the end of its comment."""
    *tables, last = key.split(".")
    table: Any = document
    for depth, name in enumerate(tables, start=1):
        if name not in table:
            table.append(name, tomlkit.table(is_super_table=depth < len(tables)))
        table = table[name]
    old = table.item(last) if last in table else None
    comment = _PROVENANCE.sub("", old.trivia.comment) if old is not None else "#"
    value = tomlkit.value(text)
    value.comment(f"{comment.removeprefix('#').strip()} [{note}]".strip())
    value.trivia.comment_ws = "  "
    table[last] = value


def _states(document: TOMLDocument, key: str) -> bool:
    node: Any = document
    for part in key.split("."):
        if part not in node:
            return False
        node = node[part]
    return True


def _why_not(rule: Rule, measured: Microbench, chip: Arch) -> str:
    """Why the results say nothing about a key of this chip; empty when they do."""
    if rule.of_the_chip and not set(measured.chip.split()[1:2]) <= set(chip.title.split()):
        return f"measured on {measured.chip}, not on {chip.title}"
    return "" if measured.has(rule.program) else f"{rule.program} has no results"
