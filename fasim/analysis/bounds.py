"""Bounds of a run, and the arithmetic behind FlashAttention.

Two kinds of bound. *Executed*: the cycles a unit would need, always at its peak rate, for the work this schedule gave
it (masked elements, padding and recomputation included); no run is shorter than its busiest unit. *Needed*: what any
kernel has to do, the unmasked FLOPs on the tensor cores and every tensor across HBM once; and one exponential per
unmasked score on the MUFU, unless FMA instructions compute some of them (FA4), so that one is not in the bound.

The arithmetic of :class:`Story` follows Dao et al. 2022 (arXiv 2205.14135) for one head with all keys visible. Naive
attention writes S, reads it, writes P and reads it: 4 passes over the score matrix. What it keeps for backward per
score is P, the dropout mask of one byte and the dropped-out P (Korthikanti et al. 2022, arXiv 2205.05198: "5as^2b").
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fasim.analysis.compare import busy_cycles
from fasim.arch import Arch
from fasim.problem import BACKWARD_FACTOR, Problem
from fasim.results.run import Run

#: Passes of naive attention over the score matrix in HBM: S out, S in, P out, P in.
NAIVE_PASSES = 4

#: Query rows and keys of a tile where the schedule has no knobs ``tile_m`` and ``tile_n``.
TILE = 128


@dataclass(frozen=True)
class UnitBound:
    """Cycles one unit needs at its peak rate; ``needed`` is None where it depends on the kernel."""

    unit: str
    needed_cycles: float | None
    executed_cycles: float
    steady_percent: float | None  # utilisation while every SM has work


@dataclass(frozen=True)
class Story:
    """Naive against fused attention for one head, in FLOP per byte of HBM traffic, seconds and bytes."""

    naive_intensity: float
    fused_intensity: float
    ridge: float  # FLOP per byte at which tensor cores and HBM take equally long
    arithmetic_s: float  # of one head at the whole chip's dense peak
    naive_traffic_s: float  # of one head's passes over S and P at the achieved HBM bandwidth
    tile_bytes: int  # one tile each of Q, K and V, and its FP32 scores
    smem_bytes: int
    naive_kept_bytes: int  # per head, for backward
    fused_kept_bytes: int  # O and the FP32 log-sum-exp
    backward_flops_ratio: float


@dataclass(frozen=True)
class Bounds:
    """Bounds of one run. ``limit`` is the unit with the most executed cycles."""

    cycles: float
    units: tuple[UnitBound, ...]
    minimal_hbm_bytes: float
    simulated_hbm_bytes: float
    simulated_intensity: float  # useful FLOP per byte of HBM traffic
    story: Story

    @property
    def limit(self) -> UnitBound:
        """The bound of the run: the busiest unit."""
        return max(self.units, key=lambda bound: bound.executed_cycles)

    @property
    def needed_cycles(self) -> float:
        """Cycles that no kernel for this problem can beat on this chip: tensor cores or HBM."""
        return max(b.needed_cycles or 0.0 for b in self.units if b.unit in ("tensor", "hbm"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the fields, ``limit`` (a unit's name) and ``needed_cycles``."""
        return {"schema_version": 1, **asdict(self), "limit": self.limit.unit, "needed_cycles": self.needed_cycles}


def problem_of(run: Run) -> Problem:
    """The problem a run solved."""
    fields: dict[str, Any] = run.meta["problem"]
    return Problem(**fields)


def bounds(run: Run, arch: Arch) -> Bounds:
    """Bounds of ``run``, which was simulated on ``arch``."""
    problem = problem_of(run)
    needed = _needed_cycles(problem, arch, run.clock_mhz)
    steady = run.utilisation_steady or {}
    units = tuple(
        UnitBound(unit, needed.get(unit), cycles, steady.get(unit)) for unit, cycles in busy_cycles(run).items()
    )
    traffic = run.traffic["hbm_read_bytes"] + run.traffic["hbm_write_bytes"]
    knobs = run.meta.get("knobs", {})
    tile = (int(knobs.get("tile_m") or TILE), int(knobs.get("tile_n") or TILE))
    return Bounds(
        cycles=run.cycles,
        units=units,
        minimal_hbm_bytes=float(problem.minimal_hbm_bytes()),
        simulated_hbm_bytes=traffic,
        simulated_intensity=problem.exact_flops() / traffic if traffic else float("inf"),
        story=story(problem, arch, run.clock_mhz, tile),
    )


def _needed_cycles(problem: Problem, arch: Arch, clock_mhz: float) -> dict[str, float]:
    sms, sm = arch.chip.sm_count, arch.sm
    scores = problem.batch * problem.heads_q * problem.visible_scores()
    hbm = arch.hbm.achieved_bytes_per_second / (clock_mhz * 1e6)
    return {
        "tensor": problem.exact_flops() / (sm.tensor.flops_per_cycle[problem.dtype] * sms),
        "mufu": scores / (sm.mufu.ops_per_cycle * sms),
        "hbm": problem.minimal_hbm_bytes() / hbm,
    }


def story(problem: Problem, arch: Arch, clock_mhz: float, tile: tuple[int, int] = (TILE, TILE)) -> Story:
    """The arithmetic of one head; ``tile`` is query rows x keys. The chip's peak is that at ``clock_mhz``."""
    n, keys, d, dv = problem.seqlen_q, problem.seqlen_k, problem.head_dim, problem.head_dim_v
    element = problem.element_bytes
    flops = 2.0 * n * keys * (d + dv)
    score_pass = element * n * keys
    tensors = element * (n * d + keys * d + keys * dv) + problem.output_bytes * n * dv
    peak = arch.sm.tensor.flops_per_cycle[problem.dtype] * arch.chip.sm_count * clock_mhz * 1e6
    bandwidth = arch.hbm.achieved_bytes_per_second
    m, t = tile
    return Story(
        naive_intensity=flops / (NAIVE_PASSES * score_pass),
        fused_intensity=flops / tensors,
        ridge=peak / bandwidth,
        arithmetic_s=flops / peak,
        naive_traffic_s=NAIVE_PASSES * score_pass / bandwidth,
        tile_bytes=round(element * (m * d + t * d + t * dv) + 4 * m * t),
        smem_bytes=arch.sm.smem.max_cta_bytes,
        naive_kept_bytes=round((2 * element + 1) * n * keys),
        fused_kept_bytes=problem.output_bytes * n * dv + 4 * n,
        backward_flops_ratio=BACKWARD_FACTOR,
    )
