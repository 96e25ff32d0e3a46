"""The part of the architecture model that describes one SM (table ``sm`` of a file).

Rates are per SM and cycle, ``*_cycles`` are SM clock cycles, ``ops`` of the vector pipes are thread operations
("lanes": one warp instruction is 32), FLOP counts a multiply-add as two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fasim.files import Table, keyed_by, one_of

#: Operand types of the tensor core, the keys of ``sm.tensor.flops_per_cycle`` and ``chip.datasheet_tflops``.
MMA_DTYPES = ("fp16", "bf16", "tf32", "fp8", "fp4")


DtypeTable = Annotated[Mapping[Annotated[str, AfterValidator(one_of(MMA_DTYPES))], PositiveFloat], keyed_by(MMA_DTYPES)]


class Issue(Table):
    """Warp schedulers."""

    ops_per_cycle: PositiveFloat
    """Warp instructions (not lanes) per SM and cycle, all sub-cores together."""
    stall_cycles: NonNegativeFloat
    """What one warp loses per vector instruction to result latencies that its own instructions do not cover;
    other warps can use the pipes meanwhile."""


class Fma(Table):
    """The FP32 multiply-add pipe: FFMA, FMUL, FADD, IMAD."""

    ops_per_cycle: PositiveFloat
    latency_cycles: PositiveFloat
    imad_ops_per_cycle: PositiveFloat
    packed_ops_per_cycle: NonNegativeFloat
    """Instruction lanes of the packed f32x2 forms, each two operations; 0 where the chip has none."""


class Alu(Table):
    """The integer and compare pipe: FMNMX, LOP3, ISETP, SEL, F2FP."""

    ops_per_cycle: PositiveFloat
    latency_cycles: PositiveFloat
    convert_ops_per_cycle: PositiveFloat
    """Instruction lanes of F2FP, which packs two FP32 values into one 16-bit pair."""
    convert_fp8_ops_per_cycle: PositiveFloat | None = None
    """The same for a pair of FP8 values; absent where the chip has no FP8."""


class Mufu(Table):
    """The special-function unit."""

    ops_per_cycle: PositiveFloat
    """Base-2 exponential."""
    other_ops_per_cycle: PositiveFloat
    """Reciprocal, logarithm, square root."""
    latency_cycles: PositiveFloat
    """Dependent exponentials."""


class Lsu(Table):
    """The load/store unit's register-to-register part."""

    shuffle_ops_per_cycle: PositiveFloat
    shuffle_latency_cycles: PositiveFloat


class Smem(Table):
    """Shared memory. One port serves MMA operands, loads and stores, and fills."""

    capacity_bytes: PositiveInt
    max_cta_bytes: PositiveInt
    reserved_cta_bytes: NonNegativeInt
    """Taken by the driver for every resident CTA."""
    bytes_per_cycle: PositiveFloat
    latency_cycles: PositiveFloat


class AsyncMma(Table):
    """Asynchronous tensor instructions: wgmma (Hopper), tcgen05.mma (Blackwell)."""

    kind: Literal["wgmma", "tcgen05"]
    issue_interval_cycles: PositiveFloat
    """Between two instructions of one warp while the queue has room."""
    max_in_flight: Annotated[int, Field(gt=0, le=32)]
    """Instructions in flight at which the next one blocks at issue."""
    completion_cycles: NonNegativeFloat
    """From the last multiply-add to the waiting warp running again, commit and wait included."""
    overhead_cycles: NonNegativeFloat
    """Tensor time per instruction on top of its FLOPs."""
    two_cta_completion_cycles: NonNegativeFloat | None = None
    """``completion_cycles`` of the instruction that spans two SMs."""


class TensorCore(Table):
    """The tensor cores."""

    flops_per_cycle: DtypeTable
    """Dense FLOP per SM and cycle by operand type, FP32 accumulation."""
    mma_sync_flops_per_cycle: PositiveFloat
    """Dense 16-bit rate of the synchronous mma.sync, below ``flops_per_cycle`` where that is of asynchronous MMA."""
    mma_sync_latency_cycles: PositiveFloat
    async_mma: AsyncMma | None = None


class Interference(Table):
    """What vector instructions and a running wgmma do to each other.

    Cycles of a sub-core per warp instruction. ``*_cycles`` replace the pipe's initiation interval while an MMA
    runs; ``*_port_cycles`` occupy an operand port that all vector instructions then share.
    """

    alu_cycles: PositiveFloat
    mufu_cycles: PositiveFloat
    alu_port_cycles: NonNegativeFloat
    fsel_port_cycles: NonNegativeFloat
    """Of ALU instructions with one register operand (FSEL of a mask)."""
    mufu_port_cycles: NonNegativeFloat
    ffma_port_cycles: NonNegativeFloat
    """Three-operand instructions of the FMA pipe."""
    fmul_port_cycles: NonNegativeFloat
    """FMUL, which takes one register and a reused one."""
    fadd_port_cycles: NonNegativeFloat
    """FADD of a row sum, two registers."""
    ex2_wait_cycles: NonNegativeFloat
    """Time for which an ALU, FMUL or FADD instruction that keeps the port busy holds up the EX2 of another warp."""
    ex2_wait_ffma_cycles: NonNegativeFloat
    """The same for three-operand instructions."""
    shuffle_cycles: PositiveFloat
    shuffle_latency_cycles: PositiveFloat
    """Of a dependent shuffle; the MMA has priority at the shared-memory port."""
    ffma_delay_cycles: NonNegativeFloat
    """Delay of the running MMA per three-operand FMA-pipe warp instruction, where none is absorbed."""
    fmul_delay_cycles: NonNegativeFloat
    """The same for FMUL in a run."""
    fadd_delay_cycles: NonNegativeFloat
    """The same for FADD of a row sum."""
    alu_delay_cycles: NonNegativeFloat
    """The same for the ALU pipe."""
    fmul_stop_cycles: NonNegativeFloat
    """Delay of the running MMA, of any width, per FMUL that goes out between exponentials."""
    mma_n: Annotated[tuple[PositiveInt, ...], Field(strict=False)]
    """Widths n of a wgmma m64nNk16 at which the next is given; linear in between, constant outside."""
    absorbed_per_cycle: Annotated[tuple[NonNegativeFloat, ...], Field(strict=False)]
    """Delay that a running MMA makes up for per cycle, by width: sparse FMA instructions cost it nothing."""
    absorbed_ahead_cycles: NonNegativeFloat
    """An MMA stream can have absorbed in advance what it absorbs in this time: a short burst costs it little."""

    @model_validator(mode="after")
    def _widths(self) -> Self:
        if len(self.mma_n) != len(self.absorbed_per_cycle) or sorted(set(self.mma_n)) != list(self.mma_n):
            raise PydanticCustomError("widths", "mma_n must ascend and be as long as absorbed_per_cycle")
        return self


class MmaSyncInterference(Table):
    """Cycles an mma.sync stream is stopped per vector warp instruction on the same sub-core, by pipe."""

    fma_mma_cycles: NonNegativeFloat
    alu_mma_cycles: NonNegativeFloat
    mufu_mma_cycles: NonNegativeFloat
    ldsm_mma_cycles: NonNegativeFloat
    """By a ldmatrix of four registers."""


class Tma(Table):
    """Bulk tensor copies."""

    issue_interval_cycles: PositiveFloat
    latency_cycles: PositiveFloat
    """Issue to data visible for an L2 hit, extrapolated to size 0."""
    bytes_per_cycle: PositiveFloat
    """Largest fill rate of one SM."""
    multicast_extra_cycles: NonNegativeFloat
    store_bytes_per_cycle: PositiveFloat
    """Rate at which a store reads shared memory."""
    store_latency_cycles: PositiveFloat
    """Issue of a store to its source being free again, without the transfer time."""


class CpAsync(Table):
    """cp.async (LDGSTS), 16 bytes per thread."""

    issue_cycles: PositiveFloat
    """Per warp instruction."""
    latency_extra_cycles: NonNegativeFloat
    """On top of the latency of L2 or HBM."""


class Sync(Table):
    """Barriers."""

    mbarrier_wake_cycles: NonNegativeFloat
    """Last arrival to the waiting warp running again."""
    mbarrier_try_cycles: NonNegativeFloat
    """A wait on a phase that is already complete."""
    remote_arrive_cycles: NonNegativeFloat
    """An arrival at an mbarrier of another CTA of the cluster."""
    named_barrier_cycles: NonNegativeFloat
    syncthreads_base_cycles: NonNegativeFloat
    syncthreads_per_warp_cycles: NonNegativeFloat


class Tmem(Table):
    """Tensor memory."""

    columns: PositiveInt
    load_bytes_per_cycle: PositiveFloat
    store_bytes_per_cycle: PositiveFloat
    load_latency_cycles: PositiveFloat
    """tcgen05.ld and its wait, without the transfer time."""
    store_latency_cycles: NonNegativeFloat = 0.0
    """tcgen05.st and its wait, without the transfer time."""


class Sm(Table):
    """One streaming multiprocessor."""

    sub_cores: PositiveInt
    registers: PositiveInt
    """32-bit registers."""
    max_registers_per_thread: PositiveInt
    max_threads: PositiveInt
    max_ctas: PositiveInt
    named_barriers: PositiveInt
    """Per CTA."""
    issue: Issue
    fma: Fma
    alu: Alu
    mufu: Mufu
    lsu: Lsu
    smem: Smem
    tensor: TensorCore
    interference: Interference | None = None
    mma_sync_interference: MmaSyncInterference
    tma: Tma | None = None
    cp_async: CpAsync
    sync: Sync
    tmem: Tmem | None = None
