"""What is measured, and how: every case runs alone in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

#: Before every measurement: under sustained load machines lower their clock.
PAUSE_SECONDS = 3.0


class Case(NamedTuple):
    """A problem for FA3 and what its simulation may cost."""

    title: str
    shape: dict[str, object]  # of fasim.problem.Problem
    seconds: float  # limit for the CPU time inside simulate()
    engine: str = "compiled"
    overrides: tuple[str, ...] = ()
    trace_sms: tuple[int, ...] = ()

    def measure(self, repeats: int = 5) -> Cost:
        """Simulate in a fresh process, after loading the engine; the fastest of ``repeats``, with pauses."""
        order = [self.shape, self.engine, self.overrides, self.trace_sms, repeats, PAUSE_SECONDS]
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, json.dumps(order)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return Cost(**json.loads(done.stdout))


class Cost(NamedTuple):
    """What a simulation took."""

    seconds: float  # of CPU, inside simulate()
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
from fasim.program.library import load_schedule
from fasim.problem import Problem
from fasim.studies.simulate import TraceSpec, simulate

shape, engine, overrides, sms, repeats, pause = json.loads(sys.argv[1])
arch, schedule, problem = load_arch("h200", overrides), load_schedule("fa3"), Problem(**shape)
prepare()
trace = TraceSpec(sms=tuple(sms)) if sms else None
times = []
for _ in range(repeats):
    time.sleep(pause)
    start = time.process_time()
    run = simulate(schedule, problem, arch, engine=engine, trace=trace)
    times.append(time.process_time() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
print(json.dumps({"seconds": min(times), "events": run.events, "megabytes": peak}))
"""


def _shape(batch: int, seqlen: int, heads: int, **more: object) -> dict[str, object]:
    return {"batch": batch, "seqlen_q": seqlen, "heads_q": heads, "head_dim": 128, **more}


CASES = (
    Case("B4 S4096 H16", _shape(4, 4096, 16), 0.5),
    Case("B4 S4096 H16, SMs 0 and 1 traced", _shape(4, 4096, 16), 0.5, trace_sms=(0, 1)),
    Case("B4 S4096 H16 causal", _shape(4, 4096, 16, causal=True), 0.5),
    Case("B1 S16384 H16", _shape(1, 16384, 16), 2.0),
    Case("B1 S16384 H16 causal", _shape(1, 16384, 16, causal=True), 2.0),
    Case("B1 S65536 H8", _shape(1, 65536, 8), 15.0),
    Case("B1 S65536 H8 causal", _shape(1, 65536, 8, causal=True), 15.0),
    Case("B1 H16, 128 queries, 65536 keys", _shape(1, 128, 16, seqlen_k=65536), 0.5),
)

#: Cases with twice the work of the first one.
TWICE = (
    Case("twice the sequences", _shape(8, 4096, 16), 1.0),
    Case("twice the keys", _shape(4, 4096, 16, seqlen_k=8192), 1.0),
    Case("twice the sequences on twice the SMs", _shape(8, 4096, 16), 1.0, overrides=("chip.sm_count=264",)),
)

#: One run for both engines.
BOTH = tuple(Case(engine, _shape(1, 2048, 16), 30.0, engine) for engine in ("compiled", "reference"))
