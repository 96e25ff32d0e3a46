"""Forward kernels whose consumers are wgmma warpgroups (FA3, FA4 on Hopper): resolved choices, tensors and rings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fasim.errors import BudgetError, ConfigError
from fasim.kernels.attention import Attention
from fasim.kernels.blocks import WorkTiles
from fasim.kernels.layouts import kv_layout, partial_layout, query_layout
from fasim.program.builds import CompiledLoop
from fasim.program.language import Kernel, Ring, Shape, Smem, Tensor, Tile, register_tile
from fasim.program.tiles import FORMAT_BITS

#: How O leaves: by TMA from shared memory; by all threads, where rows of several heads lie in a tile; or as one split's
#: share in FP32 straight from registers.
Output = Literal["tma", "threads", "partial"]


@dataclass(frozen=True)
class Forward(Attention):
    """What a kernel does for a problem, every choice made.

    ``cut``: tiles and blocks. ``overlap``: QK of a block is issued before PV of the last. ``turns``: named barriers
    order the MMAs of the warpgroups (ping-pong). ``rescale_early``: O is rescaled between the first wgmma of QK, so
    that PV can follow at once. ``cluster``: CTAs that share K and V by multicast. ``two_level``: FP8's PV is summed
    apart and added to O. ``exp`` off: no exponentials. Raises ConfigError for choices without code, BudgetError where
    S, O and P do not fit a consumer's registers.
    """

    stages: int
    overlap: bool
    turns: bool
    p_in_registers: bool
    rescale_early: bool
    cluster: int = 1
    output: Output = "tma"
    two_level: bool = False
    exp: bool = True

    @property
    def m(self) -> int:
        """Query rows of a CTA."""
        return self.cut.tile_m

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups, of 64 query rows each."""
        return self.m // 64

    @property
    def fp8(self) -> bool:
        """Whether operands have 8 bits; V must then be transposed, because wgmma takes it keys first."""
        return self.problem.dtype == "fp8"

    @property
    def kind(self) -> str:
        """Which of a build's numbers hold."""
        return "fp8" if self.fp8 else "16 bit"

    @property
    def scores(self) -> float:
        """Elements of S per thread."""
        return self.n / 2

    @property
    def registers(self) -> Mapping[str, int]:
        """Registers per thread: ``launch``, ``producer``, ``consumer``."""
        row = self.build.row("registers", warpgroups=self.warpgroups)
        return {name: int(count) for name, count in row.items()}

    @property
    def s(self) -> Tile:
        """S of a warpgroup."""
        return register_tile("S", 64, self.n)

    @property
    def p(self) -> Tile:
        """P as operand of PV."""
        shape = Shape(64, self.n, self.format)
        return Tile(register_tile("P", *shape).place if self.p_in_registers else Smem("P"), shape)

    @property
    def pv(self) -> Tile:
        """Where PV accumulates: O, or apart."""
        return register_tile("PV" if self.two_level else "O", 64, self.dv)

    def softmax_order(self, overlap: bool) -> CompiledLoop:
        """The compiler's order of a block's softmax, with or without a PV in flight while it runs."""
        return self.build.loop(
            "softmax",
            overlap=overlap,
            dtype=self.problem.dtype,
            p_in_registers=self.p_in_registers,
            causal=self.problem.causal,
            head_dim=max(self.d, self.dv),
            head_dim_v=self.dv,
        )

    def __post_init__(self) -> None:
        """Refuse what there is no code for."""
        step = 32 if self.fp8 else 16
        for wrong, why in (
            (
                self.d % 16 or self.dv % 16,
                f"no tile for head_dim {self.d}, head_dim_v {self.dv}: multiples of 16 exist",
            ),
            (self.m not in (64, 128, 192), f"tile_m {self.m} is not 64 per warpgroup for 1 to 3 warpgroups"),
            (
                self.n % step or not 16 <= self.n <= 256,
                f"tile_n {self.n} is not a multiple of {step} (wgmma) up to 256",
            ),
            (self.fp8 and not self.p_in_registers, "p_in_registers=off does not exist for fp8"),
            (self.two_level and not self.fp8, f"two_level is an option of fp8, not {self.problem.dtype}"),
            (self.turns and self.warpgroups < 2, "pingpong needs two consumer warpgroups (tile_m >= 128)"),
            (
                self.cut.m_blocks % self.cluster,
                f"{self.cut.m_blocks} query tiles per head and clusters of {self.cluster}",
            ),
        ):
            if wrong:
                raise ConfigError(f"{self.build.schedule}: {why}")
        p = self.n * FORMAT_BITS[self.format] // 64 if self.p_in_registers else 0
        needed, limit = self.n / 2 + self.dv / 2 + p + 8, self.registers["consumer"]
        if needed > limit:
            parts = f"S {self.n // 2}, O {self.dv // 2}{f', P {p}' if self.p_in_registers else ''}"
            raise BudgetError(
                f"{self.build.schedule} on {self.arch.name}: a consumer needs {needed:.0f} registers per thread for "
                f"{parts}; it has {limit}: use a smaller tile_n"
            )


@dataclass(frozen=True)
class Operands:
    """Rings of Q, K and V as they are loaded, and the tensor that O goes to."""

    q: Ring
    k: Ring
    v: Ring
    o: Tensor


def operands(kernel: Kernel, f: Forward, tiles: WorkTiles | None, rows: int) -> Operands:
    """Tensors and rings; the CTAs of a cluster share K and V by multicast.

    ``tiles``: lines of Q and O are numbered in this order; None: in that of the tensor. ``rows``: query rows of a tile
    that are read and written, fewer than ``f.m`` where no more exist. In FP8 who transposes V releases its stages.
    """
    cut, cluster = f.cut, kernel.cluster
    whole = Shape(f.m, f.d, f.format)
    q = kernel.tensor(
        "Q", cut.pairs * cut.m_blocks, whole.bytes * rows // f.m, "q", layout=query_layout(cut, f.d, tiles)
    )
    q_ring = kernel.ring(q, whole, 1, consumers=f.warpgroups)
    kv = []
    for name, width in (("K", f.d), ("V", f.dv)):
        shape, lines = Shape(f.n, width, f.format), cut.kv_pairs * cut.n_blocks * cluster
        layout = kv_layout(cut, width, cluster)
        kv.append((kernel.tensor(name, lines, shape.bytes // cluster, "kv", -cluster, layout), shape))
    readers = f.warpgroups, 1 if f.fp8 else f.warpgroups
    k_ring, v_ring = (
        kernel.ring(tensor, shape, f.stages, consumers=consumers, multicast=cluster > 1)
        for (tensor, shape), consumers in zip(kv, readers, strict=True)
    )
    if f.output == "partial":
        lines = cut.pairs * cut.m_blocks * cut.num_splits
        o = kernel.tensor("O.partial", lines, 4 * rows * f.dv, "partial", layout=partial_layout(cut))
    else:
        o = kernel.tensor("O", kernel.tile_count, 2 * rows * f.dv, "q", layout=query_layout(cut, f.dv, tiles))
    return Operands(q_ring, k_ring, v_ring, o)


def staging(kernel: Kernel, f: Forward, over: Ring) -> None:
    """Shared memory of O on its way out, in the space of ``over``, and of P where it is an operand from there."""
    kernel.smem("O", 2 * f.m * f.dv, aliases=over.buffer.name)
    if not f.p_in_registers:
        kernel.smem("P", 2 * f.m * f.n)
