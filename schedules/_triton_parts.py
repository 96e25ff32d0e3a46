"""Parts of the Triton schedule that all its variants share: resolved knobs, copies, prologue and epilogue.

Counts are from Triton's SASS, see :mod:`triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasim.arch import Arch
from fasim.kernels.blocks import BlockInfo
from fasim.kernels.layouts import kv_layout, query_layout
from fasim.program.effects import Effect, Load, Move, Normalise, Round, Store, Syncthreads
from fasim.program.language import Barrier, Kernel, Role, Tensor
from fasim.program.ops import BarrierUse, Copy, Wait
from fasim.program.tiles import Smem

#: Instructions per thread outside the loops, from SASS within 6 % over four kernels: before the first loop
#: SETUP plus 2.4 for each element of O, between the loops BETWEEN, after them 8.7 for each element of O (its division).
SETUP, SETUP_PER_OUTPUT, BETWEEN, EPILOGUE_PER_OUTPUT = 210.0, 2.4, 90.0, 8.7

#: Cycles of a program per such instruction: instruction fetch and dependent integer chains. Fitted to the
#: H200's non-causal d128 rows of 512 to 4096 tokens (h200_triton.csv), whose programs cost 7700 cycles beside the loop.
COLD_CYCLES = 3.7

#: Instructions per iteration besides softmax and MMA: buffer indices, loop counter, copy addresses. SASS: 30 to 45
#: outside the stretches in which MMAs are issued.
OVERHEAD = 35.0

#: Cycles per iteration in branches and wgmma fences and waits, as in FlashAttention-3: branch_resolving stalls
#: of 37, two wgmma waits of 24 to 30 each (Nsight Compute and cycle stamps on an H200).
LOOP_CYCLES = 90.0

#: Issue slots per wgmma: two descriptor updates on the uniform datapath and two moves. SASS.
SLOTS_PER_WGMMA = 5.0

#: Instructions per score of a masked block: compare, select and the column's index. SASS: 138 for 32 scores.
MASK_PER_SCORE = 4.3


@dataclass(frozen=True)
class Config:
    """Resolved knobs and what follows from them."""

    arch: Arch
    m: int
    n: int
    d: int
    dv: int
    stages: int
    warps: int
    element: int  # bytes
    dtype: str
    specialized: bool
    tma: bool

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a program."""
        return max(1, self.warps // 4)

    @property
    def rows(self) -> int:
        """Rows a warpgroup computes; with fewer than 64 each, two warpgroups compute the same scores."""
        return max(self.m // self.warpgroups, min(64, self.m)) if self.arch.architecture == "hopper" else self.m

    @property
    def scores(self) -> float:
        """Scores per thread and iteration."""
        if self.arch.architecture == "hopper":
            return self.rows * self.n / 128
        return self.m * self.n / (32 * self.warps)

    @property
    def thread_rows(self) -> float:
        """Rows per thread whose maximum and sum it keeps; tcgen05 gives a thread whole rows."""
        if self.arch.architecture == "blackwell":
            return max(1.0, self.m / 128)
        return self.scores * 4 / self.n

    @property
    def outputs(self) -> float:
        """Elements of O per thread."""
        return self.m * self.dv / (32 * self.warps)

    @property
    def live_registers(self) -> float:
        """Registers per thread of scores, P and O."""
        return (1 + self.element / 4) * self.scores + self.outputs

    @property
    def mma_dtype(self) -> Literal["bf16", "fp8"]:
        """Operand type of the MMAs; both 16-bit types run at one rate."""
        return "fp8" if self.element == 1 else "bf16"

    @property
    def formats(self) -> tuple[str, str]:
        """Formats of P and O."""
        return ("e4m3", "bf16") if self.element == 1 else (self.dtype, self.dtype)

    @property
    def convert(self) -> dict[str, float]:
        """P to operands of PV: conversions, two scores each.

        An FP8 operand of wgmma has four neighbouring keys in a register where the accumulator has two, so pairs of
        threads exchange halves: per four scores a select, a shuffle and a permute. SASS.
        """
        if self.element == 2:
            return {"f2fp": self.scores / 2}
        moves = self.scores / 4 if self.arch.architecture == "hopper" else 0.0
        return {"f2fp8": self.scores / 2, "shfl": moves, "alu": 2 * moves}

    @property
    def wanted_registers(self) -> float:
        """Registers per thread the code would like: scores, P, O, what is live beside them, copy addresses.

        On the same side of every occupancy limit as what Triton 3.9 reports for 48 kernels on Hopper.
        mma.sync holds operand fragments as well.
        """
        if self.arch.architecture == "ampere":
            return 1.5 * self.live_registers + 60
        if self.tma:
            return 1.25 * self.live_registers
        return 1.5 * self.live_registers + 2 * self.n * (self.d + self.dv) * self.element / (512 * self.warps)

    @property
    def registers(self) -> int:
        """Registers per thread that it gets."""
        return min(255, int(self.wanted_registers))

    @property
    def spilled(self) -> float:
        """Registers stored and loaded again in every iteration; the compiler gets by with 305 wanted ones.

        Triton 3.6 on Hopper: 20, 72, 34, 204 and 364 spills for 23, 63, 111, 239 and 287 by this rule, 0 for 0.
        """
        return max(0.0, self.wanted_registers - 305)


def tensors(k: Kernel, cfg: Config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V and O; a line is one copy's worth."""
    cut = BlockInfo(k.problem, cfg.m, cfg.n)
    lines = cut.kv_pairs * cut.n_blocks
    q, o = (query_layout(cut, columns) for columns in (cfg.d, cfg.dv))
    keys, values = (kv_layout(cut, columns) for columns in (cfg.d, cfg.dv))
    return (
        k.tensor("Q", k.tile_count, cfg.m * cfg.d * cfg.element, "q", layout=q),
        k.tensor("K", lines, cfg.n * cfg.d * cfg.element, "kv", 1, keys),
        k.tensor("V", lines, cfg.n * cfg.dv * cfg.element, "kv", 1, values),
        k.tensor("O", k.tile_count, 2 * cfg.m * cfg.dv, "q", layout=o),
    )


def output_buffer(k: Kernel, q: Tensor, o: Tensor) -> None:
    """Where O passes on its way out: in the space of Q, or of K where it does not fit."""
    k.smem("O", o.line_bytes, aliases="Q" if o.line_bytes <= q.line_bytes else "K")


def cold(c: Role, label: str, instructions: float, effects: tuple[Effect, ...] = ()) -> None:
    """Straight-line code that runs once."""
    c.delay(label, COLD_CYCLES * instructions, "work", effects=effects)


def load_q(c: Role, cfg: Config, q: Tensor) -> None:
    """Q by ordinary loads and through registers into shared memory, or by TMA."""
    cold(c, "setup", SETUP + SETUP_PER_OUTPUT * cfg.outputs)
    into = Smem("Q") if cfg.tma else "Q"
    c.copy("load Q", q, q.line_bytes, "load", "tma" if cfg.tma else "threads", effects=(Load(into),))
    c.wait_copies("load", "wait Q")
    if not cfg.tma:
        mix, effect = {"sts": q.line_bytes / (512 * c.warps)}, Move("Q", Smem("Q", share=(0, 1)))
        c.vector("store Q", mix, smem_bytes=q.line_bytes, latency={"smem": 1}, effects=(effect,))
    barrier(c, cfg)


def prefetch(c: Role, cfg: Config, tensor: Tensor, full: dict[str, Barrier]) -> None:
    """Start the copy of the next block into the buffer that the last but one iteration has left."""
    use = BarrierUse(full[tensor.name].name, full[tensor.name].stages)
    engine: Literal["tma", "threads"] = "tma" if cfg.tma else "threads"
    boxes = -(-tensor.line_bytes // (cfg.n * 128)) if cfg.tma else 1
    into = (Load(Smem(tensor.name)),)
    c.record(
        Copy(f"load {tensor.name}", tensor.name, tensor.line_bytes, "load", engine, use, boxes=boxes, effects=into)
    )


def wait_copy(c: Role, cfg: Config, name: str, full: dict[str, Barrier]) -> None:
    """Wait for the oldest copy: an mbarrier (TMA), or cp.async.wait_group, which costs no polling."""
    use = BarrierUse(full[name].name, full[name].stages)
    c.record(Wait(f"wait {name}", use, "full", named=not cfg.tma))


def barrier(c: Role, cfg: Config) -> None:
    """__syncthreads of warps that arrive together."""
    sync = cfg.arch.sm.sync
    cycles = sync.syncthreads_base_cycles + sync.syncthreads_per_warp_cycles * c.warps
    c.delay("barrier", cycles, "barrier", effects=(Syncthreads(),))


def overhead(c: Role, cfg: Config) -> None:
    c.vector("loop overhead", {"misc": OVERHEAD})
    if cfg.arch.architecture == "hopper":
        c.delay("branch, fences", LOOP_CYCLES)


def store_output(c: Role, cfg: Config, o: Tensor, together: Barrier | None = None) -> None:
    """1/l, O to 16 bit, through shared memory and out; the program ends without waiting for plain stores.

    ``together``: the barrier of the instances that share the tile, of which the last one stores.
    """
    share = o.line_bytes / c.count
    done = Normalise("O"), Round("O", "O", cfg.formats[1]), Store("lse", "O", array="LSE")
    cold(c, "1/l, scale O", EPILOGUE_PER_OUTPUT * cfg.outputs, done)
    mix = {"sts": share / (512 * c.warps)}
    c.vector("O to SMEM", mix, smem_bytes=share, latency={"smem": 1}, effects=(Move("O", Smem("O")),))
    if together is None:
        barrier(c, cfg)
    else:
        c.sync(together, label="O complete")
    if not cfg.tma:
        mix, rows = {"lds": share / (512 * c.warps)}, (Move(Smem("O", share=(0, 1)), "rows of O"),)
        c.vector("O from SMEM", mix, smem_bytes=share, latency={"smem": 1}, effects=rows)
    with c.only(-1):
        engine: Literal["tma", "threads"] = "tma" if cfg.tma else "threads"
        store = (Store(Smem("O") if cfg.tma else "rows of O"),)
        c.copy("store O", o, o.line_bytes, "store", engine, boxes=-(-cfg.dv // 64), effects=store)
        if cfg.tma:
            c.wait_copies("store", "wait O store")
