"""The cost model: operation x architecture -> demand in ticks.

Vector work is described per warp instruction on one sub-core. A pipe of ``r`` lanes per SM and
cycle accepts a warp instruction every ``32 * sub_cores / r`` cycles of a sub-core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from fasim.arch import Arch
from fasim.arch.instructions import INSTRUCTIONS, InstructionClass
from fasim.engine.image import (
    P_ALU,
    P_FMA,
    P_ISSUE,
    P_LSU,
    P_MUFU,
    P_PORT,
    P_SMEM,
    P_TENSOR,
    P_TMEM,
    PIPES,
    TICKS,
    IntArray,
)
from fasim.errors import ConfigError, ModelError
from fasim.problem import DTYPE_BITS
from fasim.program.ops import LatencyKind, Mma, Vector

#: Bits of an MMA operand in shared memory; TF32 is stored as FP32.
OPERAND_BITS = {**DTYPE_BITS, "tf32": 32}

_PIPE_INDEX = {"issue": P_ISSUE, "fma": P_FMA, "alu": P_ALU, "mufu": P_MUFU, "lsu": P_LSU}


def ticks(cycles: float) -> int:
    """Cycles as integer ticks, to nearest."""
    return round(cycles * TICKS)


@dataclass(frozen=True)
class VectorDemand:
    """Demand of a whole operation: ticks per pipe without and with an MMA beside it."""

    alone: IntArray  # (len(PIPES),)
    beside: IntArray  # (len(PIPES),)
    counted: IntArray  # (len(PIPES),) busy time as hardware counters show it
    mma_delay: int  # by which it delays an MMA that absorbs nothing
    mma_stop: int  # by which it delays every MMA
    stall: tuple[int, int]  # lost to result latencies inside, without and with an MMA beside it
    latency: tuple[int, int]  # exposed at the end, without and with an MMA beside it

    @property
    def span(self) -> int:
        """Ticks of the busiest pipe, the time the operation takes on an idle SM."""
        return int(max(self.alone.max(), self.beside.max()))


def interval(arch: Arch, instruction: InstructionClass) -> float:
    """Initiation interval of a warp instruction on its sub-core's pipe, in cycles."""
    sm = arch.sm
    path = INSTRUCTIONS[instruction].lanes
    lanes = attrgetter(path)(sm) if path else 32 * sm.issue.ops_per_cycle
    if not lanes:
        raise ModelError(f"{arch.name} has no instruction of class '{instruction}'")
    return float(32 * sm.sub_cores / lanes)


def result_latency(arch: Arch, kind: LatencyKind) -> float:
    """Latency in cycles from issue to a dependent instruction."""
    sm = arch.sm
    table = {
        "fma": sm.fma.latency_cycles,
        "alu": sm.alu.latency_cycles,
        "ex2": sm.mufu.latency_cycles,
        "shfl": sm.lsu.shuffle_latency_cycles,
        "smem": sm.smem.latency_cycles,
        "mma_sync": sm.tensor.mma_sync_latency_cycles,
        "tmem": sm.tmem.load_latency_cycles if sm.tmem else 0.0,
        "tmem_store": sm.tmem.store_latency_cycles if sm.tmem else 0.0,
    }
    return float(table[kind])


def vector_demand(op: Vector, arch: Arch, warps: int, mma_share: float, mma_sync: bool = False) -> VectorDemand:
    """Demand of ``op`` executed by ``warps`` warps spread evenly over the sub-cores.

    ``mma_share`` in [0, 1) is the part of the shared-memory port that the kernel's MMAs take while
    they run; ld/st get the rest (measured: the MMA has priority, and TMA fills do not take from it).

    ``counted`` is what Nsight's pipe counters show: one base-rate issue per instruction, though FFMA2, IMAD and slow
    F2FP hold the pipe for longer. FA4's counters add up only this way (Dao-AILab/flash-attention issue 2701). The times
    are those of the busiest sub-core.

    ``mma_sync``: the kernel has synchronous tensor instructions. FMA, ALU and MUFU instructions and ldmatrix stop
    those of any warp on the sub-core, so all of them share the operand port with the MMAs.
    """
    sm = arch.sm
    width = (op.warps or warps) / sm.sub_cores  # warp instructions per sub-core; < 1 leaves sub-cores idle
    per_core = max(width, 1.0)
    alone = np.zeros(len(PIPES))
    beside = np.zeros(len(PIPES))
    counted = np.zeros(len(PIPES))
    inter = sm.interference
    sync = sm.mma_sync_interference
    slot = interval(arch, "misc")
    exponentials = op.mix.get("ex2", 0.0) > 0
    delay = stop = stalled = kept = 0.0
    for name, count in op.mix.items():
        if name not in INSTRUCTIONS:
            raise ConfigError(f"operation '{op.label}': unknown instruction class '{name}'")
        instruction = INSTRUCTIONS[name]
        n = count * per_core
        pipe = _PIPE_INDEX[instruction.pipe]
        ii = interval(arch, name)
        alone[P_ISSUE] += n * slot
        beside[P_ISSUE] += n * slot
        if pipe == P_ISSUE:
            continue
        alone[pipe] += n * ii
        counted[pipe] += n * {P_FMA: interval(arch, "ffma"), P_ALU: interval(arch, "alu")}.get(pipe, ii)
        stalled += count
        slowed = ii
        if inter is not None:
            if pipe == P_ALU:
                slowed = max(ii, inter.alu_cycles * ii / interval(arch, "alu"))
            elif pipe == P_MUFU:
                slowed = max(ii, inter.mufu_cycles * ii / interval(arch, "ex2"))
            elif name == "shfl":
                slowed = max(ii, inter.shuffle_cycles)
            if instruction.port:
                beside[P_PORT] += n * getattr(inter, instruction.port)
            if instruction.mma_delay and instruction.ex2_wait:
                if name == "fmul" and exponentials:  # several at once after an EX2: no MMA makes up for them
                    stop += n * inter.fmul_stop_cycles
                else:  # a run of FMUL is paced by the port
                    delay += n * getattr(inter, instruction.mma_delay)
                kept += n * getattr(inter, instruction.ex2_wait)
        beside[pipe] += n * slowed
        if mma_sync or op.mma_sync_flops:
            by_pipe = {P_FMA: sync.fma_mma_cycles, P_ALU: sync.alu_mma_cycles, P_MUFU: sync.mufu_mma_cycles}
            held = sync.ldsm_mma_cycles if name == "ldsm" else by_pipe.get(pipe, 0.0)
            alone[P_PORT] += n * held
            beside[P_PORT] += n * held
    if op.mma_sync_flops:
        mma = op.mma_sync_flops / sm.tensor.mma_sync_flops_per_cycle
        for state in (alone, beside):
            state[P_TENSOR] += mma
            state[P_PORT] += mma
    alone[P_SMEM] = op.smem_bytes / sm.smem.bytes_per_cycle
    beside[P_SMEM] = alone[P_SMEM] / (1.0 - mma_share)
    # Where the port sets the pace, its instructions keep the EX2 of other warps waiting.
    beside[P_MUFU] = max(beside[P_MUFU], min(beside[P_PORT], beside[P_MUFU] + kept))
    if op.tmem_load_bytes or op.tmem_store_bytes:
        if sm.tmem is None:
            raise ModelError(f"operation '{op.label}' uses tensor memory, which {arch.name} does not have")
        tmem = op.tmem_load_bytes / sm.tmem.load_bytes_per_cycle + op.tmem_store_bytes / sm.tmem.store_bytes_per_cycle
        alone[P_TMEM] = beside[P_TMEM] = tmem
    for pipe in (P_ISSUE, P_SMEM, P_TMEM, P_TENSOR):
        counted[pipe] = alone[pipe]
    counted[P_PORT] = beside[P_PORT]
    if width < 1.0:  # percentages are of all sub-cores, of which fewer warps use only some
        counted[[P_ISSUE, P_FMA, P_ALU, P_MUFU, P_LSU, P_PORT]] *= width
    latency = sum(result_latency(arch, kind) * count for kind, count in op.latency.items())
    chain, issue_stall = op.chain * result_latency(arch, "alu"), stalled * sm.issue.stall_cycles
    slower = latency
    if inter is not None and "shfl" in op.latency:
        slower += op.latency["shfl"] * (inter.shuffle_latency_cycles - result_latency(arch, "shfl"))
    return VectorDemand(
        np.rint(alone * TICKS).astype(np.int64),
        np.rint(beside * TICKS).astype(np.int64),
        np.rint(counted * TICKS).astype(np.int64),
        ticks(delay),
        ticks(stop),
        (ticks(max(issue_stall, chain - alone.max())), ticks(max(issue_stall, chain - beside.max()))),
        (ticks(latency), ticks(slower)),
    )


@dataclass(frozen=True)
class MmaDemand:
    """One instruction of an MMA group, in cycles."""

    tensor: float  # occupancy of the tensor core
    smem: float  # operand reads at the shared-memory port


def mma_demand(op: Mma, arch: Arch) -> MmaDemand:
    """Occupancy of one asynchronous MMA instruction.

    The tensor core takes ``2 m n k / flops_per_cycle`` cycles unless reading the operands takes
    longer: B (n x k) always comes from shared memory, A (m x k) where ``op.a`` says so. On Hopper
    this is ``max(N/2, 16 + N/4)`` for SS m64nNk16, which fits every published row. A 2-CTA
    instruction splits B between the two SMs.
    """
    tensor = arch.sm.tensor
    if tensor.async_mma is None:
        raise ModelError(f"{arch.name} has no asynchronous MMA (operation '{op.label}')")
    if op.dtype not in tensor.flops_per_cycle:
        known = ", ".join(sorted(tensor.flops_per_cycle))
        raise ModelError(f"{arch.name}: no tensor rate for dtype '{op.dtype}' (has {known})")
    share = 2 if op.two_cta else 1
    flops = 2.0 * op.m * op.n * op.k / share
    math_cycles = flops / tensor.flops_per_cycle[op.dtype]
    element = OPERAND_BITS[op.dtype] / 8
    operand = op.n * op.k * element / share
    if op.a == "smem":
        operand += op.m * op.k * element / share
    smem = operand / arch.sm.smem.bytes_per_cycle
    return MmaDemand(max(math_cycles, smem) + tensor.async_mma.overhead_cycles, smem)


def mma_absorption(op: Mma, arch: Arch) -> float:
    """Delay by vector work that this MMA absorbs per cycle, by its width."""
    inter = arch.sm.interference
    return float(np.interp(op.n, inter.mma_n, inter.absorbed_per_cycle)) if inter else 0.0


def mma_port_share(ops: list[Mma], arch: Arch) -> float:
    """Part of the shared-memory port taken by a kernel's MMAs while the tensor core is busy."""
    tensor = smem = 0.0
    for op in ops:
        demand = mma_demand(op, arch)
        tensor += op.count * demand.tensor
        smem += op.count * demand.smem
    return min(0.9, smem / tensor) if tensor else 0.0


def chunk_count(span: int, chunk_cycles: float) -> int:
    """Number of equal chunks of about ``chunk_cycles`` in a span of ticks."""
    return max(1, math.ceil(span / (chunk_cycles * TICKS) - 1e-9))
