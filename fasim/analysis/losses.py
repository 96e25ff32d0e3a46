"""From the chip's peak to what was achieved: where each share of the time goes.

The cycles of a run are split into the useful ones (unmasked FLOPs at the dense peak on all SMs) and losses. Most losses
are counterfactuals: the run is repeated on machines from which one cause after another has been taken away, and a loss
is what its removal saves *after the ones before it are gone*. So the losses add up exactly, and the order matters:
what two causes share is charged to the earlier one. A loss is negative where a removal makes others collide that
were out of each other's way before; real schedules have such anomalies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fasim.analysis.bounds import problem_of
from fasim.analysis.compare import busy_cycles
from fasim.analysis.whatif import INFINITE, RESOURCES, Resource, faster, scaled
from fasim.arch import Arch
from fasim.results.run import Run

_DISTANCE = Resource("the way to L2", (), ("l2.latency_cycles",))

#: Machines in the order in which causes are taken away; each keeps what the ones before it took.
STEPS: tuple[tuple[str, str], ...] = (
    ("launch and ramp", "launch, CTA start and turnover take no time"),
    ("memory", "HBM, L2 and copies infinitely fast, no latency"),
    ("MMA interference", "MMA and vector work do not slow each other down"),
    ("barriers and dependencies", "barriers and result latencies (MMA completion too) take no time"),
    ("unit contention", "vector pipes, schedulers, shared and tensor memory infinitely fast"),
    ("MMA rate", "mma.sync as fast as the peak, no overhead or issue interval per MMA"),
)

#: The step that is split into what grows with the keys and what does not (fill and drain of each work tile).
SPLIT_STEP = 4


@dataclass(frozen=True)
class Loss:
    """Cycles of a run that went into one cause; ``how`` is the counterfactual or accounting behind it."""

    name: str
    cycles: float
    percent: float
    how: str


def machines(arch: Arch, dtype: str) -> list[tuple[str, ...]]:
    """Overrides of the machine of each of STEPS, on top of what ``arch`` was loaded with."""
    tensor = arch.sm.tensor
    peak = tensor.flops_per_cycle.get("bf16" if dtype in ("fp8", "fp4") else dtype, tensor.mma_sync_flops_per_cycle)
    overhead = Resource("MMA overhead", (), RESOURCES["tensor"].times)
    takes: tuple[tuple[str, ...], ...] = (
        faster(arch, "launch"),
        (*(text for name in ("hbm", "l2", "tma") for text in faster(arch, name)), *scaled(arch, _DISTANCE, INFINITE)),
        faster(arch, "interference"),
        (*faster(arch, "barriers"), *faster(arch, "latency")),
        tuple(text for name in ("mufu", "fma", "alu", "issue", "lsu", "smem", "tmem") for text in faster(arch, name)),
        (*scaled(arch, overhead, INFINITE), f"sm.tensor.mma_sync_flops_per_cycle={peak!r}"),
    )
    return [tuple(text for take in takes[: i + 1] for text in take) for i in range(len(takes))]


def losses(run: Run, arch: Arch, without: Sequence[Run], longer: tuple[Run, Run]) -> tuple[float, tuple[Loss, ...]]:
    """Useful per cent of the cycles of ``run`` on ``arch``, and its losses; together 100.

    ``without[i]`` is the run on the machine of STEPS[i], ``longer`` those before and after ``SPLIT_STEP`` with more
    keys.
    """
    problem = problem_of(run)
    useful = problem.exact_flops() / (arch.sm.tensor.flops_per_cycle[problem.dtype] * arch.chip.sm_count)
    cycles = [run.cycles, *(other.cycles for other in without)]
    found = []
    for i, (name, how) in enumerate(STEPS):
        saved = cycles[i] - cycles[i + 1]
        if i == SPLIT_STEP:
            fill = _constant_cycles(without[i - 1], longer[0]) - _constant_cycles(without[i], longer[1])
            found.append(("fill and drain", fill, "the part of unit contention that does not grow with the keys"))
            saved -= fill
        found.append((name, saved, how))
    tensor = busy_cycles(without[-1])["tensor"]
    idle = cycles[-1] - tensor
    tail = min(idle, _tail_cycles(without[-1]))
    found += [
        ("tail wave", tail, "SMs that are done while others still run, with all of the above gone"),
        ("code", idle - tail, "what is left: fixed delays of the schedule (branches, instruction fetch)"),
        ("masked waste", tensor - useful, "FLOPs on masked and padded elements, recomputation"),
    ]
    shares = (Loss(name, lost, 100 * lost / run.cycles, how) for name, lost, how in found)
    return 100 * useful / run.cycles, tuple(shares)


def _tail_cycles(run: Run) -> float:
    """Cycles in which a CTA slot has run out of work, averaged over slots; kernels of a sequence add up."""
    kernels = run.meta["kernels"]
    total = 0.0
    for kernel, cycles in zip(kernels, run.meta["kernel_cycles"], strict=True):
        roles = [role for role in run.stalls if len(kernels) == 1 or role.startswith(f"{kernel}.")]
        total += cycles * min(run.stalls[role]["tail"] for role in roles) / 100
    return total


def _constant_cycles(run: Run, longer: Run) -> float:
    """Time of ``run`` that does not grow with the tensor work of its tiles: the line through it and a run with more."""
    work, more = busy_cycles(run)["tensor"], busy_cycles(longer)["tensor"]
    tiles, others = run.meta["tiles"], longer.meta["tiles"]
    per_work = (longer.cycles / others - run.cycles / tiles) / (more / others - work / tiles)
    return float(run.cycles - per_work * work)
