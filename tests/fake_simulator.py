"""A simulator that costs nothing: stands in for ``fasim.program.library``, ``fasim.studies.simulate`` and the views.

It predicts one cycle per query token, twice that with ``pingpong`` off, and refuses fp8 as a model error.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fasim.errors import ConfigError, ModelError, did_you_mean
from fasim.results.reasons import REASONS
from fasim.results.run import Run

KNOBS = {
    "pingpong": SimpleNamespace(name="pingpong", type=bool, default=True, doc="Take turns.", choices=()),
    "stages": SimpleNamespace(name="stages", type=int, default=2, doc="Stages of K and V.", choices=("1", "2", "3")),
    "splits": SimpleNamespace(name="splits", type=int, default=1, doc="Splits of the keys.", choices=()),
}


class Fake:
    """What the fakes were called with."""

    def __init__(self) -> None:
        self.simulated: list[SimpleNamespace] = []
        self.files: list[str] = []

    def load_schedule(self, name: str) -> SimpleNamespace:
        if name not in self.list_schedules():
            raise ConfigError(f"unknown schedule '{name}'{did_you_mean(name, self.list_schedules())}")
        return SimpleNamespace(name=name, summary=f"What {name} is.", knobs=KNOBS, architectures=("hopper",))

    def list_schedules(self) -> list[str]:
        return ["fa3", "fa4"]

    def simulate(self, schedule, problem, arch, *, knobs=None, clock_mhz=None, engine="compiled", trace=None) -> Run:
        call = SimpleNamespace(schedule=schedule, problem=problem, arch=arch, knobs=dict(knobs or {}))
        call.clock_mhz, call.engine, call.trace = clock_mhz, engine, trace
        self.simulated.append(call)
        if problem.dtype == "fp8":
            raise ModelError(f"{schedule}: fp8 does not fit")
        cycles = float(problem.seqlen_q * (2 if call.knobs.get("pingpong") in ("off", "0") else 1))
        clock = clock_mhz or 1000.0
        return Run(
            cycles=cycles,
            time_us=cycles / clock,
            clock_mhz=clock,
            tflops=1.0,
            peak_percent=50.0,
            bottleneck="tensor",
            utilisation={"tensor": 50.0},
            utilisation_steady=None,
            stalls={"consumer": {reason: 100.0 * (reason == "work") for reason in REASONS}},
            traffic={},
            events=1,
            meta={"schedule": "fa3"},
            trace=None if trace is None else SimpleNamespace(truncated=trace.cycles is None),
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Replace the schedule loader, the simulator and the views."""
    fake = Fake()
    modules = {
        "fasim.program.library": {"load_schedule": fake.load_schedule, "list_schedules": fake.list_schedules},
        "fasim.studies.simulate": {
            "simulate": fake.simulate,
            "TraceSpec": lambda sms=(0,), cycles=None: SimpleNamespace(sms=sms, cycles=cycles),
        },
        "fasim.views.report": {"render_report": lambda run: f"REPORT {run.cycles:.0f} cycles"},
        "fasim.views.timeline": {"render_timeline": lambda trace, sm, cycles, width: f"TIMELINE sm {sm} {cycles}"},
        "fasim.views.plot": {"plot_timeline": lambda runs, path, sm, cycles: fake.files.append(str(path))},
        "fasim.views.perfetto": {"write_trace": lambda run, path: fake.files.append(str(path))},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return fake
