"""One query tile of FlashAttention-4's Blackwell kernels: resolved knobs, barriers, and where its numbers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasim.program.language import Barrier, Kernel, committed, waited
from fasim.program.tiles import Smem, Tmem

ROWS = 128  # query rows of a softmax warpgroup: one a thread, one a lane of tensor memory

Share = tuple[float, float]
WHOLE: Share = (0.0, 1.0)


@dataclass(frozen=True)
class Config:
    """Resolved knobs of a Blackwell kernel and what follows from them."""

    d: int
    dv: int
    n: int  # keys per block
    dtype: str
    bits: int
    queries: int  # query tiles of 128 rows per CTA
    ctas: int  # that share MMAs
    registers: tuple[int, int]  # softmax, correction
    threshold: float  # powers of two that a maximum may grow by without a rescale
    emulated: tuple[int, ...]  # pairs of emulated exponentials per fragment
    early: int  # fragments of P released first
    hardware_max: bool
    softmax: bool
    tmem: bool
    grouped: bool

    @property
    def depth(self) -> int:
        """K of one MMA instruction: 256 bits of operand."""
        return 256 // self.bits

    @property
    def scope(self) -> Literal["cta", "leader"]:
        """Where the MMA role waits for the other roles."""
        return "leader" if self.ctas > 1 else "cta"

    @property
    def formats(self) -> tuple[str, str]:
        """Number formats of P and O."""
        return {"fp8": ("e4m3", "bf16"), "fp4": ("nvfp4", "bf16")}.get(self.dtype, (self.dtype, self.dtype))

    def size(self, elements: int) -> int:
        """Bytes of operand elements."""
        return elements * self.bits // 8


@dataclass(frozen=True)
class Tile:
    """Barriers of one query tile, and the places of its numbers."""

    index: int  # in the CTA
    suffix: str
    scores: Barrier  # S complete: MMA -> softmax
    ready: Barrier  # first part of P written, O rescaled: softmax, correction -> MMA
    last: Barrier  # rest of P written: softmax -> MMA
    stats: Barrier  # scale of O in shared memory: softmax -> correction
    read: Barrier  # and read: correction -> softmax
    output: Barrier  # PV complete: MMA -> correction
    staged: Barrier  # O in shared memory: correction -> epilogue
    stored: Barrier  # O stored: epilogue -> correction
    scale: Smem  # of O; after the last block the row sum
    row_max: Smem  # that the row sum is relative to
    staged_o: Smem

    def q(self, columns: Share = WHOLE) -> Smem:
        """Columns of Q."""
        return Smem("Q", stage=self.index, columns=columns)

    @property
    def next_s(self) -> Tmem:
        """The S that QK fills, whose completion it will commit next."""
        return Tmem(f"S{self.suffix}", after=committed(self.scores), back=-1)

    @property
    def s(self) -> Tmem:
        """The S that the softmax waited for."""
        return Tmem(f"S{self.suffix}", after=waited(self.scores))

    def p(self, columns: Share) -> Tmem:
        """Columns of P where the softmax writes it, in the place of its S."""
        return Tmem(f"P{self.suffix}", after=waited(self.scores), share=columns)

    def ready_p(self, columns: Share) -> Tmem:
        """Columns of the P that the MMA role waited for."""
        return Tmem(f"P{self.suffix}", after=waited(self.ready), share=columns)

    def o(self, columns: Share = WHOLE) -> Tmem:
        """Columns of O."""
        return Tmem(f"O{self.suffix}", share=columns)


def query_tile(k: Kernel, c: Config, index: int = 0, suffix: str = "", stages: int = 1) -> Tile:
    """A query tile whose S has ``stages`` buffers.

    In tensor memory S and, in its place, P are below column 256, O above. Without tensor memory the same names stand
    for the registers of a softmax warpgroup that MMAs accumulate in.
    """
    for name, first, columns, buffers in (("S", 0, c.n, stages), ("P", 0, c.n, stages), ("O", 256, c.dv, 1)):
        k.region(f"{name}{suffix}", first + ROWS * index, columns, buffers)
    scales = f"scale{suffix}"
    if c.tmem:
        k.smem(scales, 2 * ROWS * 4)
    return Tile(
        index=index,
        suffix=suffix,
        scores=k.barrier(f"S{suffix}.full", 1, stages),
        ready=k.barrier(f"P{suffix}.ready", c.ctas * (2 if c.tmem else 1), stages),
        last=k.barrier(f"P{suffix}.last", c.ctas),
        stats=k.barrier(f"{scales}.full", 1, named=True),
        read=k.barrier(f"{scales}.empty", 1),
        output=k.barrier(f"O{suffix}.full", 1),
        staged=k.barrier(f"O{suffix}.staged", 1),
        stored=k.barrier(f"O{suffix}.stored", 1),
        scale=Smem(scales, share=(0, 0.5)),
        row_max=Smem(scales, share=(0.5, 1)),
        staged_o=Smem("O", share=(index / c.queries, (index + 1) / c.queries)),
    )
