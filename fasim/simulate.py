"""Simulate a schedule for a problem on an architecture: the one entry point that runs an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import fasim
from fasim import image as im
from fasim.arch import Arch
from fasim.engine.common import NO_TRACE, TraceWindow
from fasim.engine.memory import COUNTERS
from fasim.errors import ConfigError, did_you_mean
from fasim.image import Image, RawResult
from fasim.library import Schedule, load_schedule
from fasim.lower import lower
from fasim.problem import Problem
from fasim.run import REASONS, UNITS, Run, Trace
from fasim.schedule import Kernel

ENGINES = ("compiled", "reference")
Engine = Literal["compiled", "reference"]

#: A unit at or above this share of its peak in steady state is called the bottleneck; below, the
#: time goes into latency and dependencies.
BOTTLENECK_PERCENT = 75.0


@dataclass(frozen=True)
class TraceSpec:
    """What to record: SM numbers, a window in cycles (None: all), and a bound on the slices."""

    sms: tuple[int, ...] = (0,)
    cycles: tuple[int, int] | None = None
    limit: int = 1_000_000


def work_kind(problem: Problem) -> str:
    """Key of ``Arch.clock.sustained_mhz`` that describes the problem's load on the chip."""
    return "tensor_16bit" if problem.bits == 16 else "tensor_8bit"


def choose_clock(problem: Problem, arch: Arch, clock_mhz: float | None) -> tuple[float, str]:
    """The clock of a run and why: the one given, or the arch file's sustained clock."""
    if clock_mhz is not None:
        if not clock_mhz > 0:
            raise ConfigError(f"clock {clock_mhz} MHz: must be positive")
        return float(clock_mhz), "given"
    kind = work_kind(problem)
    if kind not in arch.clock.sustained_mhz:
        kind = "tensor_16bit"
    return float(arch.clock.sustained_mhz[kind]), f"sustained under {kind} load, {arch.name}.toml"


def simulate(
    schedule: Schedule | str,
    problem: Problem,
    arch: Arch,
    *,
    knobs: Mapping[str, object] | None = None,
    clock_mhz: float | None = None,
    engine: str = "compiled",
    trace: TraceSpec | None = None,
) -> Run:
    """Run ``schedule`` for ``problem`` on ``arch`` and account for every cycle.

    ``knobs`` may be text as typed on a command line. ``clock_mhz`` None takes the arch file's
    sustained clock. Raises ConfigError for bad input, BudgetError for a tile the SM cannot hold,
    DeadlockError for a program that stops.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine '{engine}'{did_you_mean(engine, ENGINES)}")
    if isinstance(schedule, str):
        schedule = load_schedule(schedule)
    clock, why = choose_clock(problem, arch, clock_mhz)
    given = dict(knobs or {})
    kernel = schedule.build(problem, arch, given)
    image = lower(kernel, clock)
    raw = execute(image, engine, trace)
    meta = {
        "fasim_version": fasim.__version__,
        "schedule": schedule.name,
        "arch": arch.name,
        "arch_digest": arch.digest,
        "overrides": list(arch.overrides),
        "knobs": kernel.knobs,
        "knobs_set": {name: kernel.knobs.get(name, value) for name, value in given.items()},
        "problem": asdict(problem),
        "problem_text": problem.describe(),
        "engine": engine,
        "clock_reason": why,
        "tiles": kernel.tile_count,
        "ctas": image.machine.grid * kernel.cluster,
        "ctas_per_sm": image.machine.slots,
        "waves": kernel.tile_count / (image.machine.groups * kernel.cluster * image.machine.slots),
    }
    return _summarise(kernel, image, raw, clock, meta, trace is not None)


def execute(image: Image, engine: str, trace: TraceSpec | None = None) -> RawResult:
    """Run an image on the named engine."""
    window = NO_TRACE
    if trace is not None:
        sms = image.machine.groups * image.machine.cluster
        if bad := [sm for sm in trace.sms if not 0 <= sm < sms]:
            raise ConfigError(f"cannot trace SM {bad[0]}: the chip has SMs 0 to {sms - 1}")
        first, last = trace.cycles or (0, 2**40)
        window = TraceWindow(trace.sms, (first * im.TICKS, last * im.TICKS), trace.limit)
    if engine == "reference":
        from fasim.engine import reference

        return reference.run(image, window)
    from fasim.engine import compiled

    return compiled.run(image, window)


def _utilisation(image: Image, counts: im.IntArray, ticks: float, tmem: bool) -> dict[str, float]:
    """Activity counts as a percentage of ``ticks`` per unit of every SM (L2 and HBM: of the chip)."""
    names = (*im.PIPES, "tma", "l2", "hbm")
    sms = image.machine.groups * image.machine.cluster
    busy = counts[:-1] @ image.activity
    busy[im.U_HBM] += counts[-1]
    values = dict(zip(names, busy.tolist(), strict=True))
    result = {}
    for unit in UNITS:
        if unit == "tmem" and not tmem:
            continue
        result[unit] = 100.0 * values[unit] / (ticks * (1 if unit in ("l2", "hbm") else sms))
    return result


def _steady(image: Image, raw: RawResult, tmem: bool) -> dict[str, float] | None:
    """Utilisation over the whole bins in which every CTA slot had work; None if there is none."""
    width = 1 << raw.bin_shift
    first = -(-raw.full_from // width) + 1  # skip the bin in which pipelines fill
    last = min(raw.full_until, raw.ticks) // width
    if last - first < 2:
        return None
    return _utilisation(image, raw.bins[first:last].sum(axis=0), float((last - first) * width), tmem)


def _summarise(kernel: Kernel, image: Image, raw: RawResult, clock: float, meta: dict[str, object], traced: bool) -> Run:
    problem, arch = kernel.problem, kernel.arch
    cycles = raw.ticks / im.TICKS
    time_us = cycles / clock
    tflops = problem.flops() / time_us / 1e6
    rate = arch.sm.tensor.flops_per_cycle[problem.dtype]
    peak = rate * arch.chip.sm_count * clock * 1e6 / 1e12
    has_tmem = arch.sm.tmem is not None
    whole = _utilisation(image, raw.bins.sum(axis=0), float(raw.ticks), has_tmem)
    steady = _steady(image, raw, has_tmem)
    view = steady or whole
    top = max(view, key=lambda unit: view[unit])
    return Run(
        cycles=cycles,
        time_us=time_us,
        clock_mhz=clock,
        tflops=tflops,
        peak_percent=100.0 * tflops / peak,
        bottleneck=top if view[top] >= BOTTLENECK_PERCENT else "latency",
        utilisation=whole,
        utilisation_steady=steady,
        stalls=_stalls(image, raw),
        traffic={name: float(value) for name, value in zip(COUNTERS, raw.memory.tolist(), strict=True) if "bytes" in name},
        events=raw.events,
        meta=meta,
        trace=_trace(image, raw) if traced else None,
    )


def _stalls(image: Image, raw: RawResult) -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for role in dict.fromkeys(image.agent_role):
        rows = [i for i, name in enumerate(image.agent_role) if name == role]
        ticks = raw.stalls[rows].sum(axis=0)
        result[role] = {reason: 100.0 * float(t) / float(ticks.sum()) for reason, t in zip(REASONS, ticks, strict=True)}
    return result


def _trace(image: Image, raw: RawResult) -> Trace:
    t = raw.trace
    return Trace(
        ticks_per_cycle=im.TICKS,
        tracks=(*image.agents, "tensor", "tma"),
        names=image.names,
        start=t[:, im.T_START],
        end=t[:, im.T_END],
        sm=t[:, im.T_SM],
        slot=t[:, im.T_SLOT],
        track=t[:, im.T_TRACK],
        name=t[:, im.T_NAME],
        kind=t[:, im.T_KIND],
        tile=t[:, im.T_TILE],
        iteration=t[:, im.T_ITER],
        owner=t[:, im.T_OWNER],
        truncated=raw.truncated,
    )
