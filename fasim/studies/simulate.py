"""Simulate a schedule for a problem on an architecture: the one entry point that runs an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from fasim import __version__
from fasim.arch import Arch, load_arch
from fasim.engine import image as im
from fasim.engine.common import NO_TRACE, TraceWindow
from fasim.engine.image import Image, RawResult
from fasim.engine.memory import COUNTERS, MemoryState, new_memory, next_launch
from fasim.errors import ConfigError, did_you_mean
from fasim.lowering.lower import lower_all
from fasim.problem import Problem
from fasim.program.language import Kernel
from fasim.program.library import Schedule, load_schedule
from fasim.results.reasons import REASONS, UNITS
from fasim.results.run import Run, Trace

ENGINES = ("compiled", "reference")

#: A run whose clock follows from its result is repeated when the clock it assumed was off by more than this:
#: memory rates per cycle depend on it, cycles hardly do.
CLOCK_TOLERANCE = 0.02
CLOCK_ATTEMPTS = 3
#: What a good kernel achieves: the first assumption, so that most runs need no second one.
USUAL_PEAK_SHARE = 0.8

#: A unit at or above this share of its peak in steady state is called the bottleneck; below, the
#: time goes into latency and dependencies.
BOTTLENECK_PERCENT = 75.0


@dataclass(frozen=True)
class TraceSpec:
    """What to record: SM numbers, a window in cycles (None: all), and a bound on the slices.

    SMs of one cluster release each other's roles, so all of a cluster are recorded with one of them.
    """

    sms: tuple[int, ...] = (0,)
    cycles: tuple[int, int] | None = None
    limit: int = 1_000_000


def work_kind(problem: Problem, kernels: Sequence[Kernel]) -> str:
    """Key of ``Arch.clock.sustained_mhz`` that describes the load on the chip."""
    if all(kernel.load == "memory" for kernel in kernels):
        return "memory"
    return "tensor_16bit" if problem.bits == 16 else "tensor_8bit"


def clock_under_load(arch: Arch, work: str, peak_share: float) -> tuple[float, str]:
    """The clock in MHz that attention holds at ``peak_share`` of the dense tensor peak, and why.

    A chip without a load line (``clock.attention``) holds its sustained clock for the kind of work.
    """
    line = arch.clock.attention
    if line is None:
        sustained = arch.clock.sustained_mhz
        why = f"sustained under {work} load, {arch.name}.toml"
        return float(sustained.get(work, sustained["tensor_16bit"])), why
    return line.mhz(peak_share), f"load line at {100 * peak_share:.0f} % of the tensor peak, {arch.name}.toml"


def simulate(
    schedule: Schedule | str | Path,
    problem: Problem,
    arch: Arch | str | Path,
    *,
    knobs: Mapping[str, object] | None = None,
    clock_mhz: float | None = None,
    engine: str = "compiled",
    trace: TraceSpec | None = None,
) -> Run:
    """Run ``schedule`` for ``problem`` on ``arch`` and account for every cycle.

    ``schedule`` and ``arch`` may be names or files, see :func:`fasim.program.library.load_schedule` and
    :func:`fasim.arch.load_arch`. ``knobs`` may be text as typed on a command line. ``clock_mhz`` None takes the clock
    the chip holds under this load, see :func:`clock_under_load`. Raises ConfigError for bad input, BudgetError for a
    tile the SM cannot hold, DeadlockError for a program that stops.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine '{engine}'{did_you_mean(engine, ENGINES)}")
    schedule = schedule if isinstance(schedule, Schedule) else load_schedule(schedule)
    arch = arch if isinstance(arch, Arch) else load_arch(arch)
    if clock_mhz is not None and not clock_mhz > 0:
        raise ConfigError(f"clock {clock_mhz} MHz: must be positive")
    given = dict(knobs or {})
    kernels = schedule.build(problem, arch, given)
    work = work_kind(problem, kernels)
    assumed, why = clock_mhz or clock_under_load(arch, work, USUAL_PEAK_SHARE)[0], "given"
    for _ in range(CLOCK_ATTEMPTS):
        images = lower_all(kernels, assumed)
        results = execute(images, engine, trace, _host_ticks(kernels, assumed))
        launches = [Launch(k, i, r) for k, i, r in zip(kernels, images, results, strict=True)]
        clock = assumed
        if clock_mhz is None:
            clock, why = clock_under_load(arch, work, _peak_share(problem, arch, launches))
        if abs(clock - assumed) <= CLOCK_TOLERANCE * clock:
            break
        assumed = clock
    first = launches[0]
    meta = {
        "fasim_version": __version__,
        "schedule": schedule.name,
        "arch": arch.name,
        "arch_digest": arch.digest,
        "overrides": list(arch.overrides),
        "knobs": first.kernel.knobs,
        "knobs_set": {name: first.kernel.knobs.get(name, value) for name, value in given.items()},
        "problem": asdict(problem),
        "problem_text": problem.describe(),
        "engine": engine,
        "clock_reason": why,
        "kernels": [launch.kernel.name for launch in launches],
        "kernel_cycles": [launch.raw.ticks / im.TICKS for launch in launches],
        "tiles": sum(launch.kernel.tile_count for launch in launches),
        "ctas": first.image.machine.grid * first.kernel.cluster,
        "ctas_per_sm": first.image.machine.slots,
        "waves": first.kernel.tile_count / (first.sms * first.image.machine.slots),
        "op_pipes": op_pipes(images),
    }
    return _summarise(problem, arch, launches, float(clock), meta, trace is not None)


def _peak_share(problem: Problem, arch: Arch, launches: Sequence[Launch]) -> float:
    """Achieved share of the chip's dense tensor peak; no clock enters."""
    cycles = sum(launch.raw.ticks for launch in launches) / im.TICKS
    return problem.flops() / (cycles * arch.sm.tensor.flops_per_cycle[problem.dtype] * arch.chip.sm_count)


def op_pipes(images: Sequence[Image]) -> dict[str, str]:
    """Operation of a role -> the pipe (of ``image.PIPES``) that it keeps busy longest, beside an MMA.

    "port" is the operand port that ALU and FMA instructions share with a running MMA.
    """
    busy: dict[str, im.IntArray] = {}
    for image in images:
        for row in image.code[image.code[:, im.K_KIND] == im.WORK]:
            name, ticks = image.names[row[im.K_NAME]], image.demand[row[im.W_DEMAND], 1] * row[im.W_CHUNKS]
            busy[name] = busy.get(name, 0) + ticks
    # From the back: where an MMA of mma.sync keeps its operands' port as busy as the tensor core, that is the limit.
    return {name: im.PIPES[len(im.PIPES) - 1 - int(ticks[::-1].argmax())] for name, ticks in busy.items()}


@dataclass(frozen=True)
class Launch:
    """One kernel of a run with its image and what the engine returned."""

    kernel: Kernel
    image: Image
    raw: RawResult

    @property
    def sms(self) -> int:
        """SMs of the chip (a remainder that no cluster fits on is left out)."""
        return self.image.machine.groups * self.image.machine.cluster

    def busy(self, first: int = 0, last: int | None = None) -> im.IntArray:
        """Busy ticks per unit in the histogram's bins ``first`` to ``last``, summed over SMs."""
        counts = self.raw.bins[first:last].sum(axis=0)
        busy: im.IntArray = counts[:-1] @ self.image.activity
        busy[im.U_HBM] += counts[-1]
        return busy


def _host_ticks(kernels: Sequence[Kernel], clock_mhz: float) -> list[int]:
    """Ticks the host needs to launch each kernel."""
    return [round(kernel.launch_us * clock_mhz * im.TICKS) for kernel in kernels]


def execute(
    images: Sequence[Image], engine: str, trace: TraceSpec | None = None, host_ticks: Sequence[int] = ()
) -> list[RawResult]:
    """Run images one after the other on the named engine; the L2 keeps its content in between.

    ``host_ticks``: time the host takes to launch each image (none where empty). An image that the host brings later
    than the end of the one before starts late, and waits in its launch ramp.
    """
    run = _engine(engine)
    memory = new_memory(images[0].lines, images[0].machine, images[0].slowest_line)
    results = []
    ended = brought = 0
    for image, host in zip(images, host_ticks or [0] * len(images), strict=True):
        brought += host
        late = max(0, brought - ended)
        if late:
            image = replace(image, machine=image.machine._replace(ramp=image.machine.ramp + late))
        results.append(run(image, _window(trace, image), memory))
        ended += results[-1].ticks
        next_launch(memory)
    return results


def _window(trace: TraceSpec | None, image: Image) -> TraceWindow:
    """``trace`` as an engine takes it, with whole clusters. Raises ConfigError for an SM that the chip has not."""
    if trace is None:
        return NO_TRACE
    cluster, sms = image.machine.cluster, image.machine.groups * image.machine.cluster
    if bad := [sm for sm in trace.sms if not 0 <= sm < sms]:
        raise ConfigError(f"cannot trace SM {bad[0]}: the chip has SMs 0 to {sms - 1}")
    first, last = trace.cycles or (0, 2**40)
    whole = dict.fromkeys(sm - sm % cluster + rank for sm in trace.sms for rank in range(cluster))
    return TraceWindow(tuple(whole), (first * im.TICKS, last * im.TICKS), trace.limit)


def _engine(name: str) -> Callable[[Image, TraceWindow, MemoryState], RawResult]:
    if name == "reference":
        from fasim.engine import reference

        return reference.run
    from fasim.engine import compiled

    return compiled.run


def _percent(launches: Sequence[Launch], busy: im.IntArray, ticks: float, tmem: bool) -> dict[str, float]:
    """Busy ticks as a percentage of ``ticks`` per unit of every SM (L2 and HBM: of the chip)."""
    values = dict(zip((*im.PIPES, "tma", "l2", "hbm"), busy.tolist(), strict=True))
    sms = launches[0].sms
    return {
        unit: 100.0 * values[unit] / (ticks * (1 if unit in ("l2", "hbm") else sms))
        for unit in UNITS
        if unit != "tmem" or tmem
    }


def _steady(launch: Launch, tmem: bool) -> dict[str, float] | None:
    """Utilisation over the whole bins in which every CTA slot had work; None if there is none."""
    raw = launch.raw
    width = 1 << raw.bin_shift
    first = -(-raw.full_from // width) + 1  # skip the bin in which pipelines fill
    last = min(raw.full_until, raw.ticks) // width
    if last - first < 2:
        return None
    return _percent([launch], launch.busy(first, last), float((last - first) * width), tmem)


def _summarise(
    problem: Problem, arch: Arch, launches: Sequence[Launch], clock: float, meta: dict[str, object], traced: bool
) -> Run:
    ticks = sum(launch.raw.ticks for launch in launches)
    cycles = ticks / im.TICKS
    time_us = cycles / clock
    tflops = problem.flops() / time_us / 1e6
    has_tmem = arch.sm.tmem is not None
    busy: im.IntArray = np.sum([launch.busy() for launch in launches], axis=0)
    whole = _percent(launches, busy, float(ticks), has_tmem)
    steady = _steady(launches[0], has_tmem) if len(launches) == 1 else None
    view = steady or whole
    top = max(view, key=lambda unit: view[unit])
    return Run(
        cycles=cycles,
        time_us=time_us,
        clock_mhz=clock,
        tflops=tflops,
        peak_percent=100.0 * _peak_share(problem, arch, launches),
        bottleneck=top if view[top] >= BOTTLENECK_PERCENT else "latency",
        utilisation=whole,
        utilisation_steady=steady,
        stalls=_stalls(launches),
        traffic={
            name: float(sum(launch.raw.memory[i] for launch in launches))
            for i, name in enumerate(COUNTERS)
            if name.endswith("bytes")
        },
        events=sum(launch.raw.events for launch in launches),
        meta=meta,
        trace=_trace(launches) if traced else None,
    )


def _label(launches: Sequence[Launch], launch: Launch, name: str) -> str:
    """Roles of several kernels carry the kernel's name."""
    return name if len(launches) == 1 else f"{launch.kernel.name}.{name}"


def _stalls(launches: Sequence[Launch]) -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for launch in launches:
        for role in dict.fromkeys(launch.image.agent_role):
            rows = [i for i, name in enumerate(launch.image.agent_role) if name == role]
            ticks = launch.raw.stalls[rows].sum(axis=0)
            result[_label(launches, launch, role)] = {
                reason: 100.0 * float(t) / float(ticks.sum()) for reason, t in zip(REASONS, ticks, strict=True)
            }
    return result


def _trace(launches: Sequence[Launch]) -> Trace:
    """The launches' traces on one time axis and one list of tracks and names."""
    tracks: list[str] = []
    names: list[tuple[str, str]] = []  # label and phase
    parts = []
    offset = rows = 0
    for launch in launches:
        own = [_label(launches, launch, agent) for agent in launch.image.agents] + ["tensor", "tma"]
        tracks += [track for track in own if track not in tracks]
        own_names = list(zip(launch.image.names, launch.image.phases, strict=True))
        names += [name for name in own_names if name not in names]
        t = launch.raw.trace.copy()
        track_index = np.array([tracks.index(track) for track in own] + [-1])
        name_index = np.array([names.index(name) for name in own_names])
        t[:, im.T_TRACK], t[:, im.T_OWNER] = track_index[t[:, im.T_TRACK]], track_index[t[:, im.T_OWNER]]
        t[:, im.T_NAME] = name_index[t[:, im.T_NAME]]
        t[:, [im.T_START, im.T_END]] += offset
        t[t[:, im.T_CAUSE] != im.NO_CAUSE, im.T_CAUSE] += rows
        offset += launch.raw.ticks
        rows += len(t)
        parts.append(t)
    t = np.concatenate(parts)
    return Trace(
        ticks_per_cycle=im.TICKS,
        tracks=tuple(tracks),
        names=tuple(label for label, _ in names),
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
        cause=t[:, im.T_CAUSE],
        truncated=any(launch.raw.truncated for launch in launches),
        phases=tuple(phase for _, phase in names),
    )
