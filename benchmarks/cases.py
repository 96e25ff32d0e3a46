"""What is measured, and how: every case runs alone in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple


class Case(NamedTuple):
    """A problem for FA3 and what its simulation may cost."""

    title: str
    shape: dict[str, object]  # of fasim.problem.Problem
    seconds: float  # limit for the time inside simulate()
    engine: str = "compiled"
    overrides: tuple[str, ...] = ()

    def measure(self, repeats: int = 3) -> Cost:
        """Simulate in a fresh process, after loading the engine; the fastest of ``repeats``."""
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, json.dumps([self.shape, self.engine, self.overrides, repeats])],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return Cost(**json.loads(done.stdout))


class Cost(NamedTuple):
    """What a simulation took."""

    seconds: float  # inside simulate()
    events: int
    megabytes: float  # peak resident memory of the process, Python and Numba included

    @property
    def rate(self) -> float:
        """Events per second."""
        return self.events / self.seconds


_MEASURE = """
import json, resource, sys, time
from fasim.arch import load_arch
from fasim.engine.compiled import prepare
from fasim.library import load_schedule
from fasim.problem import Problem
from fasim.simulate import simulate

shape, engine, overrides, repeats = json.loads(sys.argv[1])
arch, schedule, problem = load_arch("h200", overrides), load_schedule("fa3"), Problem(**shape)
prepare()
times = []
for _ in range(repeats):
    start = time.perf_counter()
    run = simulate(schedule, problem, arch, engine=engine)
    times.append(time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
print(json.dumps({"seconds": min(times), "events": run.events, "megabytes": peak}))
"""


def _shape(batch: int, seqlen: int, heads: int, **more: object) -> dict[str, object]:
    return {"batch": batch, "seqlen_q": seqlen, "heads_q": heads, "head_dim": 128, **more}


CASES = (
    Case("B4 S4096 H16", _shape(4, 4096, 16), 0.5),
    Case("B4 S4096 H16 causal", _shape(4, 4096, 16, causal=True), 0.5),
    Case("B1 S16384 H16", _shape(1, 16384, 16), 2.0),
    Case("B1 S16384 H16 causal", _shape(1, 16384, 16, causal=True), 2.0),
    Case("B1 S65536 H8", _shape(1, 65536, 8), 15.0),
    Case("B1 S65536 H8 causal", _shape(1, 65536, 8, causal=True), 15.0),
    Case("B1 H16, 128 queries on 65536 keys", _shape(1, 128, 16, seqlen_k=65536), 0.5),
)

#: Pairs of cases of which the second has twice the work.
GROWTH = (
    ("twice the sequences", CASES[0], Case("", _shape(8, 4096, 16), 1.0)),
    ("twice the keys per query", CASES[0], Case("", _shape(4, 4096, 16, seqlen_k=8192), 1.0)),
    (
        "twice the SMs and sequences",
        CASES[0],
        Case("", _shape(8, 4096, 16), 1.0, overrides=("chip.sm_count=264",)),
    ),
)

#: The run on which the two engines are compared.
BOTH = _shape(1, 2048, 16)
