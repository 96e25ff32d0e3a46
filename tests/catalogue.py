"""Every broken copy of a shipped schedule that the tests check, in one table.

``python tests/catalogue.py`` writes the overview between the marks of docs/values.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import test_check_fa3
import test_check_fa4
import test_check_mma_sync
import test_check_triton
from mutations import Mutation

PAGE = Path(__file__).parent.parent / "docs" / "values.md"
MARKED = re.compile(r"(<!-- mutations -->\n).*(<!-- /mutations -->)", re.DOTALL)

#: Schedule -> its broken copies.
CATALOGUE: dict[str, list[Mutation]] = {
    "naive": test_check_triton.NAIVE,
    "fa1": test_check_mma_sync.FA1,
    "fa2": test_check_mma_sync.FA2,
    "triton": test_check_triton.TRITON,
    "fa3": test_check_fa3.MUTATIONS,
    "fa4": test_check_fa4.MUTATIONS,
}
CHECKERS = ("race", "data", "scale", "output", "values", "deadlock", "structure")


def overview() -> str:
    """Markdown: how many copies are found by which checker, and what is broken in them."""
    total = sum(len(mutations) for mutations in CATALOGUE.values())
    lines = [f"{total} broken copies, each found by the checker that should, with its cause in the message:", ""]
    lines += ["| found by | copies | what is broken |", "|---|---|---|"]
    for checker in CHECKERS:
        found = {
            schedule: [mutation.name for mutation in mutations if mutation.by == checker]
            for schedule, mutations in CATALOGUE.items()
        }
        text = ". ".join(f"**{schedule}**: {', '.join(names)}" for schedule, names in found.items() if names)
        lines.append(f"| {checker} | {sum(map(len, found.values()))} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(MARKED.sub(lambda match: match[1] + overview() + match[2], PAGE.read_text()))
