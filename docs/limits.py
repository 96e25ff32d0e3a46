"""The table of docs/explain.md: what limits the kernels whose limits are known from the papers."""

from __future__ import annotations

import re
from pathlib import Path

from fasim import Job, Problem, explain

PAGE = Path(__file__).parent / "explain.md"

#: Schedule, arch, head dim, dtype.
CASES = (
    ("fa2", "a100", 128, "bf16"),
    ("fa2", "h100", 128, "bf16"),
    ("fa2", "h100", 64, "bf16"),
    ("fa3", "h100", 128, "bf16"),
    ("fa3", "h100", 64, "bf16"),
    ("fa4", "b200", 128, "bf16"),
    ("fa4", "b300", 128, "bf16"),
    ("fa4", "b200", 64, "bf16"),
    ("fa4", "b300", 64, "bf16"),
    ("fa4", "b200", 128, "fp8"),
    ("fa4", "b300", 128, "fp8"),
)


def limits() -> None:
    """Replace what stands between the marks of the page."""
    lines = ["| kernel | % of peak | limit | next | largest losses, % of time |", "|---|---|---|---|---|"]
    for schedule, arch, head_dim, dtype in CASES:
        found = explain(Job(schedule, Problem(head_dim=head_dim, dtype=dtype), arch))
        named = [f"{gain.resource} {gain.tenth_percent:+.1f}" for gain in found.limits]
        losses = sorted(found.losses, key=lambda loss: -loss.percent)[:2]
        lost = ", ".join(f"{loss.name} {loss.percent:.1f}" for loss in losses)
        lines.append(
            f"| {schedule} {arch} d{head_dim} {dtype} | {found.run.peak_percent:.0f} | {' | '.join(named)} | {lost} |"
        )
    marked = re.sub(
        r"(<!-- limits -->\n).*?(<!-- /limits -->)",
        lambda match: "\n".join((f"{match[1]}", *lines, "", match[2])),
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    PAGE.write_text(marked)
