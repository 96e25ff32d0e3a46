"""Fill the tables of the pages that name the command of each row. Called by docs/make.py.

A table is filled when the heading of one of its columns holds a command in backticks, say ``fasim run fa3``. The cells
below add options, in backticks too; a row without is left alone. What a column shows is said by its heading: the keys
of RUN, COMPARE and STATISTICS (of ``fasim validate``; also ``bias % by head_dim``, by any column of the data), or a
unit and its per cent in the steady state, ``tensor %``. Other columns are typed, and so is what stands in parentheses
behind a number: measurements.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from typer.testing import CliRunner

from fasim.arch import load_arch
from fasim.cli import app

ROOT = Path(__file__).parents[1]
PAGES = (*sorted((ROOT / "docs" / "schedules").glob("*.md")), ROOT / "validation" / "DEVIATIONS.md")


def busy_percent(run: dict[str, Any]) -> dict[str, float]:
    """Utilisation by unit in the steady state, of the whole run where it has none."""
    found: dict[str, float] = run["utilisation_steady"] or run["utilisation"]
    return found


def limit(run: dict[str, Any]) -> str:
    """The bottleneck and how busy it is in the steady state."""
    name = run["bottleneck"]
    busy = busy_percent(run).get(name)
    return name if busy is None else f"{name}, {busy:.0f} %"


def block_cycles(run: dict[str, Any]) -> str:
    """Steady-state cycles of an SM for 256 queries x 128 keys, without a mask.

    The tensor core works in proportion to blocks, so what it is busier in the steady state tells the pace there.
    """
    problem, meta = run["meta"]["problem"], run["meta"]
    sms = load_arch(meta["arch"], meta["overrides"]).chip.sm_count
    blocks = problem["batch"] * problem["heads_q"] * (problem["seqlen_q"] / 256) * (problem["seqlen_k"] / 128) / sms
    steady = run["utilisation"]["tensor"] / run["utilisation_steady"]["tensor"]
    return f"{run['cycles'] * steady / blocks:.0f}"


def kernels(run: dict[str, Any]) -> str:
    """The kernels of the launch and what each takes."""
    pairs = zip(run["meta"]["kernels"], run["meta"]["kernel_cycles"], strict=True)
    return ", ".join(f"{name} {cycles / 1e6:.1f}" for name, cycles in pairs)


RUN: dict[str, Callable[[dict[str, Any]], str]] = {
    "cycles": lambda run: f"{run['cycles']:,.0f}",
    "TFLOP/s": lambda run: f"{run['tflops']:.0f}",
    "% of peak": lambda run: f"{run['peak_percent']:.0f}",
    "limit, steady state": limit,
    "HBM read GB": lambda run: f"{run['traffic']['hbm_read_bytes'] / 1e9:.2f}",
    "HBM written GB": lambda run: f"{run['traffic']['hbm_write_bytes'] / 1e9:.2f}",
    "kernels, million cycles": kernels,
    "cycles per 256 x 128": block_cycles,
}

#: Of the last run against the first.
COMPARE: dict[str, Callable[[dict[str, Any]], str]] = {
    "TFLOP/s": lambda both: f"{both['runs'][-1]['tflops']:.0f}",
    "time %": lambda both: f"{both['changes'][-1]['time_percent']:+.1f}",
}


def spread(errors: Sequence[float]) -> str:
    """The smallest and the largest error, signed."""
    low, high = (f"{round(100 * end):+d}" for end in (min(errors), max(errors)))
    return low if low == high else f"{low} to {high}"


#: Of the errors of the rows, ``predicted / measured - 1``.
STATISTICS: dict[str, Callable[[Sequence[float]], str]] = {
    "rows": lambda errors: f"{len(errors)}",
    "MAPE %": lambda errors: f"{100 * fmean(map(abs, errors)):.1f}",
    "max %": lambda errors: f"{100 * max(map(abs, errors)):.1f}",
    "bias %": lambda errors: f"{100 * fmean(errors):+.1f}",
    "error %": spread,
}


def statistic(heading: str, command: str) -> str:
    """A statistic of all predicted rows, or of those of each value of a column."""
    name, _, column = heading.partition(" by ")
    parts: dict[Any, list[float]] = {}
    for row in result(command)["rows"]:
        if row["error"] is not None:
            parts.setdefault(row[column] if column else None, []).append(row["error"])
    if not parts:
        raise SystemExit(f"{command}: predicts no row")
    numbers = all(isinstance(key, int | float) for key in parts)
    texts = [(key, STATISTICS[name](parts[key])) for key in (sorted(parts) if numbers else parts)]
    return ", ".join(f"{key}: {text}" for key, text in texts) if column else texts[0][1]


def value(heading: str, command: str) -> str | None:
    """What a column shows of a command; None where it is typed."""
    kind = command.split()[1]
    if kind == "validate":
        return statistic(heading, command) if heading.partition(" by ")[0] in STATISTICS else None
    if heading in (known := COMPARE if kind == "compare" else RUN):
        return known[heading](result(command))
    unit = heading.removesuffix(" %")
    if kind == "run" and unit != heading:
        busy = busy_percent(result(command))
        return f"{busy[unit]:.1f}" if unit in busy else None
    return None


def result(command: str) -> dict[str, Any]:
    """The JSON of a command. Rows of a validation that an earlier command has predicted are taken from it."""
    words = shlex.split(command)[1:]
    if words[0] != "validate":
        return output(tuple(words))
    options = frozenset(zip(words[1::2], words[2::2], strict=True))
    for earlier, found in VALIDATIONS.items():
        if earlier <= options and {name for name, _ in options - earlier} <= {"--where"}:
            cells = [cell.partition("=") for _, cell in options - earlier]
            rows = [row for row in found["rows"] if all(str(row[name]) == cell for name, _, cell in cells)]
            return {**found, "rows": rows}
    return VALIDATIONS.setdefault(options, output(tuple(words)))


@cache
def output(words: tuple[str, ...]) -> dict[str, Any]:
    """What ``fasim`` writes as JSON."""
    with chdir(ROOT):
        done = CliRunner().invoke(app, [*words, "--json", "-"])
    if done.exception is not None:
        raise SystemExit(f"fasim {shlex.join(words)}: {done.exception}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


#: Validations so far by their options.
VALIDATIONS: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def filled(lines: Sequence[str]) -> Iterator[str]:
    """The lines of a page, with its tables filled."""
    headings: list[str] = []
    at, start = 0, ""
    for line in lines:
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells(line)
            found = [(i, m[1]) for i, cell in enumerate(headings) if (m := re.search(r"`(fasim [^`]*)`", cell))]
            at, start = found[0] if found else (0, "")
        elif start and (options := re.search(r"`([^`]*)`", cells(line)[at])):
            command, row = f"{start} {options[1]}", cells(line)
            values = [value(heading, command) for heading in headings]
            if not any(values):
                raise SystemExit(f"`{command}`: no column shows anything of it ({', '.join(headings)})")
            for i, text in enumerate(values):
                if text is not None:
                    measured = re.search(r" \(.*\)$", f" {row[i]}")
                    row[i] = text + (measured[0] if measured else "")
            line = f"| {' | '.join(row)} |"
        yield line


def numbers() -> None:
    """Fill the tables of all pages."""
    for page in PAGES:
        page.write_text("\n".join(filled(page.read_text().splitlines())) + "\n")
