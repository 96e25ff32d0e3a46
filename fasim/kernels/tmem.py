"""Forward kernels whose accumulators live in tensor memory (FA4 on Blackwell): choices, grid, operands, query tiles.

A query tile is 128 rows, one a thread of its softmax warpgroup and one a lane of tensor memory. S, P and O of up to two
tiles share the 512 columns; P takes the place of its S.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from fasim.kernels.attention import Attention
from fasim.kernels.grid import cluster_rank, for_each_cta, in_order, kv_heads_in_l2, kv_lines, longest_first, q_lines
from fasim.kernels.layouts import key_layout, query_layout, value_layout
from fasim.program.language import (
    Barrier,
    GridMode,
    Kernel,
    Ring,
    Role,
    Shape,
    Smem,
    Tensor,
    Tile,
    Tmem,
    committed,
    waited,
)
from fasim.program.ops import Scope
from fasim.program.tiles import WHOLE, Share

#: Query rows of a tile.
ROWS = 128

#: A TMA box is up to 128 rows of 128 bytes.
BOX_BYTES = 128 * 128

#: static: persistent, tiles in turn. lpt: a CTA per tile, longest first. clc: persistent, longest first, drawn (cluster
#: launch control). single: a CTA per tile.
Order = Literal["static", "lpt", "clc", "single"]
MODES: dict[Order, GridMode] = {"static": "static", "lpt": "single", "clc": "dynamic", "single": "single"}


class Registers(NamedTuple):
    """Registers per thread of a softmax warpgroup and of the correction warpgroup."""

    softmax: int
    correction: int

    @property
    def others(self) -> int:
        """What two softmax warpgroups and the correction leave for a fourth warpgroup, which loads and issues."""
        return 512 - 2 * self.softmax - self.correction


NO_REGISTERS = Registers(0, 0)


@dataclass(frozen=True)
class TmemForward(Attention):
    """What a kernel does for a problem, every choice made.

    ``cut``: query rows of all CTAs that share MMAs, and blocks of keys. ``queries``: query tiles of a CTA; ``ctas``: 2
    where MMAs are over pairs. ``emulated``: per fragment of a row, pairs of exponentials that are polynomials;
    ``early``: fragments of P with which PV begins. ``threshold``: powers of two that a row maximum may grow by before
    O is rescaled. ``hardware_max``: the row maximum comes with the load of S. ``softmax`` off leaves its arithmetic
    out. ``tmem`` off: the same names stand for registers of the softmax warpgroups that MMAs accumulate in.
    """

    queries: int
    ctas: int
    early: int
    threshold: float = 0.0
    tmem: bool = True
    emulated: tuple[int, ...] = ()
    hardware_max: bool = False
    softmax: bool = True
    registers: Registers = NO_REGISTERS

    @property
    def fragment(self) -> int:
        """Columns of S that are converted to P and stored together."""
        return int(self.build.cost("fragment"))

    @property
    def fragments(self) -> int:
        """Fragments of a block."""
        return self.n // self.fragment

    @property
    def q_shape(self) -> Shape:
        """Q of a query tile."""
        return Shape(ROWS, self.d, self.format)

    @property
    def k_shape(self) -> Shape:
        """A block of K."""
        return Shape(self.n, self.d, self.format)

    @property
    def v_shape(self) -> Shape:
        """A block of V."""
        return Shape(self.n, self.dv, self.format)

    @property
    def o_bytes(self) -> int:
        """Bytes of O of a query tile."""
        return Shape(ROWS, self.dv, self.output_format).bytes

    @property
    def scope(self) -> Scope:
        """Where the MMA role waits for the other roles."""
        return "leader" if self.ctas > 1 else "cta"


def begin(f: TmemForward, knobs: object) -> Kernel:
    """A kernel without roles, of one CTA an SM. ``knobs``: a dataclass of what was chosen."""
    chosen = {**vars(knobs), "build": f.build.name}
    kernel = Kernel("fa4", f.problem, f.arch, chosen, cluster=f.ctas, max_ctas_per_sm=1, launch_registers=128)
    if not f.softmax:
        kernel.not_attention = "softmax=off leaves maximum, exponential and sum out"
    return kernel


# --- grid and operands ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    """Rings of Q, and of K and V in turn; the tensors K and V, and O."""

    q: Ring
    kv: Ring
    k: Tensor
    v: Tensor
    o: Tensor
    keys: Tile
    values: Tile


def operands(kernel: Kernel, f: TmemForward, order: Order, stage_bytes: int, stages: int, parts: int = 1) -> Operands:
    """Fill the tile table, a row per CTA and work tile, and declare what is loaded and stored.

    Columns: ``lead`` and ``follow`` (first CTA of the cluster or not), ``steps`` (blocks after the first), ``masked``
    and ``full`` of these, ``q`` and ``kv`` (first lines). A CTA of a pair loads half of every block; a block has
    ``parts`` copies, of K and of V, by columns.
    """
    cut, ctas, problem = f.cut, f.ctas, f.problem
    kernel.mode = MODES[order]
    if order in ("lpt", "clc"):
        in_l2 = kv_heads_in_l2(problem, f.build.cost("l2_section")) * (problem.group // cut.packed_heads)
        tiles = longest_first(cut, in_l2 if order == "lpt" else cut.pairs)
    else:
        tiles = in_order(cut)
    of_cta = for_each_cta(tiles, ctas)
    blocks, rank = cut.kv_blocks(of_cta), cluster_rank(of_cta, ctas)
    rest = blocks.after_first()
    kernel.tiles = {
        "lead": (rank == 0).astype(np.int64),
        "follow": (rank != 0).astype(np.int64),
        "steps": rest.visited,
        **rest.columns(),
        "q": q_lines(of_cta, f.queries),
        "kv": kv_lines(cut, of_cta, blocks.last, ctas, parts),
    }
    of_q, of_o = (query_layout(cut, x, tiles, ctas=ctas, tiles_per_cta=f.queries) for x in (f.d, f.dv))
    lines = kernel.tile_count * f.queries
    q = kernel.ring(kernel.tensor("Q", lines, f.q_shape.bytes, "q", 1, of_q), f.q_shape, f.queries, consumers=1)
    pieces = ctas * parts  # of a block, a copy each
    k, v = (
        kernel.tensor(
            name, cut.kv_pairs * cut.n_blocks * pieces, shape.bytes // pieces, "kv", -ctas, layout(cut, ctas, parts)
        )
        for name, shape, layout in (("K", f.k_shape, key_layout), ("V", f.v_shape, value_layout))
    )
    kv = kernel.ring(replace(k, name="KV"), stage_bytes, stages, consumers=1)
    o = kernel.tensor("O", lines, f.o_bytes, "q", 1, of_o)
    return Operands(q, kv, k, v, o, Tile(Smem("KV"), f.k_shape), Tile(Smem("KV"), f.v_shape))


def setup(r: Role, f: TmemForward) -> None:
    """What every role waits for at the start of a CTA."""
    r.delay("setup", f.build.cost("prologue"), "launch")


def load(r: Role, ring: Ring, tensor: Tensor) -> None:
    """Fill the ring's next stage from ``tensor``."""
    r.load(ring, tensor, boxes=-(-tensor.line_bytes // BOX_BYTES))


# --- query tiles ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueryTile:
    """Barriers of one query tile, and the places of its numbers. ``suffix``: of their names."""

    f: TmemForward
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

    @property
    def q(self) -> Tile:
        """Q."""
        return Tile(Smem("Q", stage=self.index), self.f.q_shape)

    @property
    def next_s(self) -> Tile:
        """The S that QK fills, whose completion it will commit next."""
        place = Tmem(f"S{self.suffix}", after=committed(self.scores), back=-1)
        return Tile(place, Shape(ROWS * self.f.ctas, self.f.n, "fp32"))

    @property
    def ready_p(self) -> Tile:
        """The P that the MMA role waited for."""
        place = Tmem(f"P{self.suffix}", after=waited(self.ready), share=WHOLE)
        return Tile(place, Shape(ROWS * self.f.ctas, self.f.n, self.f.format))

    @property
    def o(self) -> Tile:
        """O."""
        return Tile(Tmem(f"O{self.suffix}", share=WHOLE), Shape(ROWS * self.f.ctas, self.f.dv, "fp32"))

    @property
    def s(self) -> Tmem:
        """The S that the softmax waited for."""
        return Tmem(f"S{self.suffix}", after=waited(self.scores))

    def p(self, columns: Share) -> Tmem:
        """Columns of P where the softmax writes it, in the place of its S."""
        return Tmem(f"P{self.suffix}", after=waited(self.scores), share=columns)

    @property
    def scale(self) -> Smem:
        """What O must be multiplied by; after the last block the row sum."""
        return Smem(f"scale{self.suffix}", share=(0, 0.5))

    @property
    def row_max(self) -> Smem:
        """The row maximum that the row sum is relative to."""
        return Smem(f"scale{self.suffix}", share=(0.5, 1))

    @property
    def staged_o(self) -> Smem:
        """O in shared memory."""
        return Smem("O", share=(self.index / self.f.queries, (self.index + 1) / self.f.queries))


def query_tile(kernel: Kernel, f: TmemForward, index: int = 0, suffix: str = "", stages: int = 1) -> QueryTile:
    """Declare a query tile whose S has ``stages`` buffers: S and P below column 256 of tensor memory, O above."""
    for name, first, columns, buffers in (("S", 0, f.n, stages), ("P", 0, f.n, stages), ("O", 256, f.dv, 1)):
        kernel.region(f"{name}{suffix}", first + ROWS * index, columns, buffers)
    if f.tmem:
        kernel.smem(f"scale{suffix}", 2 * ROWS * 4)
    return QueryTile(
        f,
        index,
        suffix,
        scores=kernel.barrier(f"S{suffix}.full", 1, stages),
        ready=kernel.barrier(f"P{suffix}.ready", f.ctas * (2 if f.tmem else 1), stages),
        last=kernel.barrier(f"P{suffix}.last", f.ctas),
        stats=kernel.barrier(f"scale{suffix}.full", 1, named=True),
        read=kernel.barrier(f"scale{suffix}.empty", 1),
        output=kernel.barrier(f"O{suffix}.full", 1),
        staged=kernel.barrier(f"O{suffix}.staged", 1),
        stored=kernel.barrier(f"O{suffix}.stored", 1),
    )
