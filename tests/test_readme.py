"""The tables of README say what the simulator says today."""

from pathlib import Path

import pytest

from fasim.results.validation import Summary
from fasim.studies.validate.timing import validate

ROOT = Path(__file__).parents[1]
DATA = ROOT / "validation" / "data" / "h200_timing.csv"


def table(page: Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line.startswith("| ") and line.count(" | ") == 4]


@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim"),
    [("fa3", "bf16", 96), ("fa3", "fp8", 256), ("fa2", "bf16", 256), ("fa3split", "bf16", 128), ("naive", "bf16", 128)],
)
def test_lines_of_the_table_are_what_is_simulated(kernel, dtype, head_dim):
    """One line for most kernels; renewed by ``python docs/make.py accuracy``."""
    result = validate(DATA, kernels=[kernel], cells={"dtype": dtype, "head_dim": str(head_dim)})
    found = Summary.of(row for row in result.rows if not row.short)
    assert found is not None
    line = f"| {kernel} {dtype} d{head_dim} | {found.n} | {100 * found.mape:.1f} | {100 * found.max:.1f} | "
    assert line + f"{100 * found.bias:+.1f} |" in table(ROOT / "README.md")


def test_readme_and_docs_have_the_same_table():
    lines = table(ROOT / "README.md")
    assert len(lines) > 20
    assert set(lines) <= set(table(ROOT / "docs" / "accuracy.md"))


def test_the_table_names_triton_and_the_effects_of_switches():
    names = [line.split(" | ")[0] for line in table(ROOT / "README.md")]
    assert {"| **triton bf16**", "| **triton fp8**", "| **fa3, effect of one switch, in points**"} <= set(names)
