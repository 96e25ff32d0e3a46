"""What is left over of whole tiles or kernels, and the errors without it. Called by docs/make.py.

Set-up of a tile, drawing it from a counter, instruction fetch and the first loads of a launch are what measurements of
whole tiles say beyond all that is simulated. Each build is written anew with these costs at 0, and the rows that it
predicts are validated with that file and ``launch.first_load_ns`` at 0.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fasim.program.build_files import choose_build
from fasim.program.builds import Build
from fasim.program.library import load_schedule
from fasim.results.validation import Summary, Validation
from fasim.studies.validate.timing import validate

DATA = Path(__file__).parents[1] / "validation" / "data"
FIRST_LOAD = "launch.first_load_ns"

#: Data, kernel in it, schedule, and the residual costs of its build for Hopper (FA4 takes FA3's). All were measured on
#: an H200.
MEASURED = (
    ("h200_timing.csv", "fa3", "fa3", ("setup", "draw", "fetch")),
    ("h200_timing.csv", "fa4sm90", "fa4", ("setup", "fetch")),
    ("h200_triton.csv", "triton", "triton", ("cold",)),
)


def without(build: Build, costs: Sequence[str], folder: Path) -> Path:
    """A file of ``build`` with ``costs`` at 0."""
    lines = [f'base = "{build.name}"', f'title = "{build.title}, no residual"']
    for name in costs:
        lines += [f"[costs.{name}]", 'source = "left out, to see what it explains"', 'grade = "assumed"']
        kinds = ", ".join(f'"{kind}" = 0' for kind in build.costs[name].by_kind)
        lines.append(f"by_kind = {{ {kinds} }}" if kinds else "value = 0")
    path = folder / f"{build.schedule}_{build.name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def rows_with(data: Path, kernel: str, build: Path, folder: Path) -> Path:
    """The rows of ``data`` for ``kernel``, to be predicted with ``build``."""
    with data.open() as file:
        rows = [row | {"build": str(build)} for row in csv.DictReader(file) if row["kernel"] == kernel]
    path = folder / f"{kernel}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def residuals() -> str:
    """Two tables: the residual numbers, and the errors with and without them."""
    numbers = ["| build | cost | unit | value | where it comes from |", "|---|---|---|---|---|"]
    errors = [
        "| | rows | MAPE % | bias % | without: MAPE % | max % | bias % |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for data, kernel, schedule, costs in MEASURED:
            build = choose_build(schedule, "hopper")
            if build is None:
                raise SystemExit(f"{schedule}: no build for Hopper")
            for cost in costs:
                number = build.costs[cost]
                values = ", ".join(f"{kind}: {value:g}" for kind, value in number.by_kind.items())
                value = values or f"{number.value:g}"
                numbers.append(f"| {schedule} {build.name} | {cost} | {number.unit} | {value} | {number.source} |")
            if "build" not in load_schedule(schedule).knobs:
                errors.append(f"| {kernel}: the schedule takes no build, so nothing can be left out | | | | | | |")
                continue
            changed = rows_with(DATA / data, kernel, without(build, costs, folder), folder)
            pair = validate(DATA / data, kernels=[kernel]), validate(changed, overrides=[f"{FIRST_LOAD}=0"])
            if "build" not in pair[1].knob_columns:
                raise SystemExit(f"{kernel}: the file with zeros was not used")
            errors += _lines(kernel, *pair)
    return "\n".join([*numbers, "", *errors])


def _lines(kernel: str, found: Validation, left_out: Validation) -> Iterator[str]:
    """A line for every data type and class of length."""
    for dtype in dict.fromkeys(row.columns["dtype"] for row in found.rows):
        for title, least, most in (("up to 1024 tokens", 0, 1024), ("longer", 1025, 10**9)):
            pair = [
                Summary.of(
                    row
                    for row in result.rows
                    if row.columns["dtype"] == dtype
                    and not row.short
                    and row.error is not None
                    and least <= int(row.columns["seqlen_q"]) <= most
                )
                for result in (found, left_out)
            ]
            if pair[0] is None or pair[1] is None:
                continue
            before, after = pair
            cells = f"{before.n} | {100 * before.mape:.1f} | {100 * before.bias:+.1f}"
            cells += f" | {100 * after.mape:.1f} | {100 * after.max:.1f} | {100 * after.bias:+.1f}"
            yield f"| {kernel} {dtype}, {title} | {cells} |"
