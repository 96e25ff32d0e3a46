"""Loops of FlashAttention-3, measured and simulated: ``python validation/loops.py`` (half a minute, no GPU).

Prints the rows of ``data/h200_fa3_parts.csv`` that leave nothing out, with the simulated cycles of an iteration, taken
as they were measured: the mean over a work tile's loop, its median over the tiles of a warpgroup (the launch's first
left out), the mean over the warpgroups of SM 0. The cycles of iterations in DEVIATIONS.md are these.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from fasim.arch import load_arch
from fasim.problem import Problem
from fasim.studies.simulate import TraceSpec, simulate
from fasim.studies.validate.phases import simulated_stamps

DATA = Path(__file__).parent / "data" / "h200_fa3_parts.csv"
SEEN = (
    *("dtype", "head_dim", "tile_n", "causal", "stages"),
    *("p_in_registers", "overlap", "pingpong", "cluster", "warpgroups"),
)
MASKED = 2  # iterations of a causal tile that come before its full blocks
WIDTH = 2048  # heads x head dim


def simulated_period(row: dict[str, str]) -> float:
    """Cycles of an iteration of the kernel that ``row`` describes."""
    head_dim = int(row["head_dim"])
    shape = dict(batch=4, seqlen_q=4096, heads_q=WIDTH // head_dim, head_dim=head_dim)
    problem = Problem(**shape, dtype=row["dtype"], causal=row["causal"] == "1")
    knobs = {key: row[key] == "1" for key in ("p_in_registers", "overlap", "pingpong")}
    knobs |= {key: int(row[key]) for key in ("tile_n", "stages", "cluster")} | {"tile_m": 64 * int(row["warpgroups"])}
    run = simulate("fa3", problem, load_arch("h200"), knobs=knobs, trace=TraceSpec())
    assert run.trace is not None
    stamps = simulated_stamps(run.trace, overlapped=knobs["overlap"])
    full = stamps.iteration > (MASKED if problem.causal else 0)
    periods = []
    for warpgroup in np.unique(stamps.warpgroup):
        means = []
        for tile in np.unique(stamps.tile)[1:]:
            starts = stamps.issue_start[full & (stamps.warpgroup == warpgroup) & (stamps.tile == tile)]
            if len(starts) > 1:
                means.append((starts[-1] - starts[0]) / (len(starts) - 1))
        periods.append(np.median(means))
    return float(np.mean(periods))


def main() -> int:
    """Print the table."""
    with DATA.open() as file:
        rows = [row for row in csv.DictReader(file) if not row["left_out"]]
    print(*SEEN, "registers", "measured", "simulated", "error_pct", sep=",")
    periods: dict[tuple[str, ...], float] = {}
    for row in rows:  # builds with other registers are one kernel here
        key = tuple(row[name] for name in SEEN)
        if key not in periods:
            periods[key] = simulated_period(row)
        error = 100 * (periods[key] / float(row["period"]) - 1)
        print(*key, row["registers"], row["period"], f"{periods[key]:.0f},{error:+.1f}", sep=",", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
