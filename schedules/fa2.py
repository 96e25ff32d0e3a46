"""FlashAttention-2 forward: mma.sync kernels of four or eight warps, one query tile per CTA, two CTAs on an SM.

Read beside the paper (Dao 2023): `fa2` is algorithm 1 for one block of queries, from its last keys to its first; a warp
owns rows of the tile (section 3.3), so the softmax needs no exchange between warps, and O is divided once, at the end.
V of a block is copied while QK runs, the next K while softmax and PV run. What hides the softmax is the other CTA.

Source: csrc/flash_attn/src/flash_fwd_{launch_template,kernel}.h, kernel_traits.h, softmax.h, mask.h of
Dao-AILab/flash-attention at 0251105a. Numbers: builds/fa2, of the repository's build and of PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.blocks import BlockInfo, kv_loops
from fasim.kernels.grid import in_order, kv_lines
from fasim.kernels.layouts import kv_layout, query_layout
from fasim.kernels.mma_sync import LDSM_BYTES, load_async, product, syncthreads
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.effects import Mask, Matmul, Move, Normalise, Probabilities, Rescale, Round, RowMax, RowSum, Store
from fasim.program.language import Kernel, Role, Smem, Tensor
from fasim.program.library import schedule
from fasim.program.ops import add_mixes, scale_mix

KIB = 1024


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    tile_m: Annotated[int | None, "query rows per CTA; default: tile table"] = None
    tile_n: Annotated[int | None, "keys per iteration; default: tile table"] = None


@dataclass(frozen=True)
class Cta:
    """A CTA: m x n scores by a number of warps, at a padded head dimension."""

    arch: Arch
    build: Build
    m: int
    n: int
    d: int
    warps: int
    dtype: str

    @property
    def scores(self) -> float:
        """Scores per thread and iteration."""
        return self.m * self.n / (32 * self.warps)

    @property
    def rows(self) -> float:
        """Rows whose maximum and sum a thread holds."""
        return self.m / (8 * self.warps)

    @property
    def outputs(self) -> float:
        """Elements of O per thread."""
        return self.m * self.d / (32 * self.warps)


@schedule(architectures=("ampere", "hopper", "blackwell"), dtypes=("bf16", "fp16"))
def fa2(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> Kernel:
    """FlashAttention-2 forward with mma.sync: two CTAs on an SM hide each other's softmax."""
    d, smem = problem.head_dim, arch.sm.smem
    if d != problem.head_dim_v or d > 256 or d % 8:
        raise ConfigError(f"fa2: head_dim {d}, head_dim_v {problem.head_dim_v}: equal multiples of 8 up to 256 exist")
    one_cta = smem.max_cta_bytes >= 128 * KIB and smem.capacity_bytes < 192 * KIB  # of 128 KiB, but no two of 96
    row = build.tile(problem, one_cta=one_cta)
    c = Cta(
        arch, build, knobs.tile_m or row.tile_m, knobs.tile_n or row.tile_n,
        int(build.row("padded", problem)["head_dim"]), row.warps or 4, problem.dtype,
    )  # fmt: skip
    if c.m % (16 * c.warps) or c.n % 16:
        raise ConfigError(f"fa2: tile_m {c.m} is not a multiple of 16 x {c.warps} warps, or tile_n {c.n} not of 16")
    k = Kernel("fa2", problem, arch, {"tile_m": c.m, "tile_n": c.n, "build": build.name})
    cut = BlockInfo(problem, c.m, c.n)
    tiles = in_order(cut, heads_outside=True)
    blocks = cut.kv_blocks(tiles)
    before, last_masked = blocks.before_last()  # the last one is peeled: it loads no more K
    k.tiles = {**before.columns(), "last_masked": last_masked, "last_full": 1 - last_masked}
    k.tiles |= {"q": cut.q_line(tiles), "kv": kv_lines(cut, tiles, blocks.last)}
    q_layout, layout, lines = query_layout(cut, d), kv_layout(cut, d), cut.kv_pairs * cut.n_blocks
    q = k.tensor("Q", k.tile_count, 2 * c.m * c.d, "q", layout=q_layout)
    keys, values = (k.tensor(name, lines, 2 * c.n * c.d, "kv", -1, layout) for name in "KV")
    out = k.tensor("O", k.tile_count, 2 * c.m * c.d, "q", layout=q_layout)
    for tensor in q, keys, values:
        k.smem(tensor.name, tensor.line_bytes)
    k.smem("O", out.line_bytes, aliases="Q")

    with k.role("warps", warps=c.warps, registers=row.registers or 255) as w, w.tiles():
        w.delay("instruction fetch", build.cost("fetch"), "issue")
        w.vector("addresses", build.mix("addresses"))
        load_async(w, q)
        load_async(w, keys)
        for trips, masked in kv_loops(k.tiles):
            with w.loop(trips):
                iteration(w, c, masked, values, keys)
        for trips, masked in (("last_masked", True), ("last_full", False)):
            with w.loop(trips):
                iteration(w, c, masked, values)
        epilogue(w, c, out)
    return k


def iteration(w: Role, c: Cta, masked: bool, values: Tensor, keys: Tensor | None = None) -> None:
    """One KV block: V lands while QK runs, the next K (if there is one) while softmax and PV run."""
    build, flops = c.build, 2.0 * c.m * c.n * c.d
    w.wait_copies("load", "wait K")
    syncthreads(w, c.arch)
    load_next(w, c, values)
    ldsm = (c.m / c.warps + c.n) * c.d / 256  # Q is read anew in every iteration
    s = (Matmul("S", Smem("Q"), Smem("K"), transposed=True),)
    nbytes = LDSM_BYTES * ldsm * c.warps + values.line_bytes
    product(w, "QK", flops, s, ldsm=ldsm, smem_bytes=nbytes, latency={"smem": 1, "mma_sync": 1})
    w.wait_copies("load", "wait V")
    syncthreads(w, c.arch)
    if keys is not None:
        load_next(w, c, keys)
    if masked:
        w.vector("mask", scale_mix(build.mix("mask"), c.scores), effects=(Mask("S"),))
        w.delay("instruction fetch", build.cost("fetch"), "issue")
    w.vector("row max", build.total("row_max", element=c.scores, row=c.rows), latency={"shfl": 2, "alu": 2})
    w.vector("scale", scale_mix(build.mix("scale"), c.rows), latency={"fma": 2, "ex2": 1}, effects=(RowMax("S"),))
    w.vector("rescale O", {"fmul": c.outputs}, effects=(Rescale("O"),))
    exp = add_mixes(scale_mix(build.mix("exp"), c.scores), build.mix("moves", c.d), build.mix("spills", c.d))
    p = Probabilities("S"), RowSum("S"), Round("S", "P", c.dtype)
    w.vector("exp, sum, P", exp, latency={"ex2": 1}, effects=p)
    ldsm, fill = c.n * c.d / 256, keys.line_bytes if keys else 0.0
    o = (Matmul("O", "P", Smem("V"), add=True),)
    product(w, "PV", flops, o, ldsm=ldsm, smem_bytes=LDSM_BYTES * ldsm * c.warps + fill, latency={"smem": 1})


def load_next(w: Role, c: Cta, tensor: Tensor) -> None:
    """Half of an iteration's addresses, then the next block of K or V by cp.async, 16 bytes a thread."""
    addresses = scale_mix(add_mixes(c.build.mix("integer", c.d), c.build.mix("iteration")), 0.5)
    w.vector("addresses", add_mixes(addresses, {"misc": tensor.line_bytes / (16 * 32 * c.warps)}))
    load_async(w, tensor)


def epilogue(w: Role, c: Cta, out: Tensor) -> None:
    """Row sums over the quad, O / l to 16 bit, through Q's buffer into rows of 16-byte stores."""
    w.delay("instruction fetch", c.build.cost("fetch"), "issue")
    w.vector("row sum", scale_mix(c.build.mix("row_sum"), c.rows), latency={"shfl": 2, "ex2": 2})
    done = Normalise("O"), Round("O", "O", c.dtype), Store("lse", "O", array="LSE")
    w.vector("scale O", {"fmul": c.outputs, "f2fp": c.outputs / 2}, latency={"fma": 1}, effects=done)
    nbytes, staged, rows = out.line_bytes, (Move("O", Smem("O")),), (Move(Smem("O", share=(0, 1)), "rows of O"),)
    w.vector("O to SMEM", {"sts": c.outputs / 2}, smem_bytes=nbytes, latency={"smem": 1}, effects=staged)
    syncthreads(w, c.arch)
    w.vector("O from SMEM", {"lds": c.outputs / 8}, smem_bytes=nbytes, latency={"smem": 1}, effects=rows)
    w.copy("store O", out, nbytes, "store", "threads", effects=(Store("rows of O"),))
    w.wait_copies("store", "drain")  # a warp exits when its stores have left
