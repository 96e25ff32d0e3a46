"""FlashAttention-2 forward: mma.sync kernels of four or eight warps, one query tile per CTA, two CTAs on an SM.

Source: Dao-AILab/flash-attention, csrc/flash_attn/src/flash_fwd_{launch_template,kernel}.h, kernel_traits.h,
softmax.h, mask.h at commit 0251105a2fb1 (2026-08-15); instruction counts of the reference build from its SASS
(nvcc 13.0, sm_80), of PyTorch's build from the executed opcodes in validation/data/h200_opcodes.csv and
h200_fa2_loop.csv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.blocks import BlockInfo, kv_loops
from fasim.kernels.grid import in_order, kv_lines
from fasim.kernels.layouts import kv_layout, query_layout
from fasim.problem import Problem
from fasim.program.effects import (
    Effect,
    Load,
    Mask,
    Matmul,
    Move,
    Normalise,
    Probabilities,
    Rescale,
    Round,
    RowMax,
    RowSum,
    Store,
    Syncthreads,
)
from fasim.program.language import Kernel, Role, Tensor
from fasim.program.library import schedule
from fasim.program.ops import Mix, add_mixes
from fasim.program.tiles import Smem

#: head_dim limit -> (tile_m, tile_n, warps, registers per thread); flash_fwd_launch_template.h, registers from SASS.
TILES: dict[int, tuple[int, int, int, int]] = {
    32: (128, 128, 4, 255),
    64: (128, 128, 4, 255),
    96: (128, 64, 4, 255),
    128: (128, 64, 4, 255),
    192: (128, 64, 8, 222),
    256: (64, 64, 4, 255),
}
#: d256 where a CTA of 128 KiB fits but two of 96 KiB do not (A100): one CTA of eight warps.
TILE_256_WIDE = (128, 64, 8, 250)
KIB = 1024

#: Cycles without an instruction whenever straight-line code is met for the first time: start, every masked iteration
#: (unrolled) and epilogue. Counters of PyTorch's build on an H200, no_instruction stalls per CTA: 1580 at d128, 2710 at
#: d64, 1250 at d256 causal, for two or three such pieces each.
FETCH_CYCLES = 750.0

#: Addresses and parameters before and after the iterations, instructions per thread: means of PyTorch's build at d64,
#: d128 and d256 (h200_fa2_loop.csv: 227 to 354, 128 to 162, 109 to 250).
ADDRESSES: Mix = {"alu": 300, "imad": 150, "misc": 155}
#: The same of an iteration: IMAD (12, 9, 6), and LDS of parameters, uniform datapath, barriers, branches (18, 15, 29).
IMAD, OTHER = 9.0, 20.0


@dataclass(frozen=True)
class Build:
    """Softmax instructions of a build per score element, per row of a thread, and per iteration (by head dim)."""

    ffma: float  # x scale - max scale
    fmul: float
    fadd: float  # the sum; apart from the scale where multiply and add are not fused
    compare: float  # FSETP: exponents of small numbers are scaled
    row_fmul: float
    row_select: float
    moves: dict[int, float]
    spills: dict[int, float]  # LDL and STL
    integer: dict[int, float]  # IADD3, LEA, ISETP ... of an iteration: addresses of its two copies


BUILDS = {
    "reference": Build(
        1.0, 0.0, 1.0, 0.0, 2.0, 0.0, {32: 4, 64: 17, 96: 4, 128: 61, 192: 2, 256: 2}, {64: 78, 128: 9},
        {32: 22, 64: 35, 96: 22, 128: 31, 192: 16, 256: 11},
    ),
    "pytorch": Build(
        0.0, 3.0, 2.0, 1.0, 4.0, 1.0, {32: 4, 64: 25, 96: 4, 128: 67, 192: 2, 256: 2}, {64: 32, 128: 28},
        {32: 25, 64: 41, 96: 25, 128: 25, 192: 21, 256: 21},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Tile, build and the counts per thread that follow from them."""

    m: int
    n: int
    warps: int
    d: int  # padded to the kernel's head dim
    build: Build
    dtype: str  # of P and O

    @property
    def elements(self) -> float:
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


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    tile_m: Annotated[int | None, "query rows per CTA; default: tile table"] = None
    tile_n: Annotated[int | None, "keys per iteration; default: tile table"] = None
    build: Annotated[
        Literal["reference", "pytorch"], "instruction counts: the repository's build, or PyTorch's without fused FMA"
    ] = "reference"


@schedule(architectures=("ampere", "hopper", "blackwell"), dtypes=("bf16", "fp16"))
def fa2(problem: Problem, arch: Arch, knobs: Knobs) -> Kernel:
    """FlashAttention-2 forward with mma.sync: two CTAs on an SM hide each other's softmax."""
    tile_m = knobs.tile_m
    tile_n = knobs.tile_n
    build = knobs.build
    d = problem.head_dim
    if d != problem.head_dim_v or d > 256 or d % 8:
        raise ConfigError(f"fa2: head_dim {d}, head_dim_v {problem.head_dim_v}: equal multiples of 8 up to 256 exist")
    limit = min(size for size in TILES if size >= d)
    m, n, warps, registers = TILES[limit]
    smem = arch.sm.smem
    if limit == 256 and smem.max_cta_bytes >= 128 * KIB and smem.capacity_bytes < 192 * KIB:
        m, n, warps, registers = TILE_256_WIDE
    m, n = tile_m or m, tile_n or n
    if m % (16 * warps) or n % 16:
        raise ConfigError(f"fa2: tile_m {m} is not a multiple of 16 x {warps} warps, or tile_n {n} not of 16")
    cfg = Config(m, n, warps, limit, BUILDS[build], problem.dtype)

    k = Kernel("fa2", problem, arch, {"tile_m": m, "tile_n": n, "build": build})
    cut = BlockInfo(problem, m, n)
    _grid(k, cut)
    lines = cut.kv_pairs * cut.n_blocks
    rows, block = query_layout(cut, d), kv_layout(cut, d)
    q = k.tensor("Q", k.tile_count, 2 * m * limit, "q", layout=rows)
    keys = k.tensor("K", lines, 2 * n * limit, "kv", -1, block)
    values = k.tensor("V", lines, 2 * n * limit, "kv", -1, block)
    out = k.tensor("O", k.tile_count, 2 * m * limit, "q", layout=rows)
    k.smem("Q", 2 * m * limit)
    k.smem("K", 2 * n * limit)
    k.smem("V", 2 * n * limit)
    k.smem("O", 2 * m * limit, aliases="Q")

    with k.role("warps", warps=warps, registers=registers) as w, w.tiles():
        w.delay("instruction fetch", FETCH_CYCLES, "issue")
        w.vector("addresses", ADDRESSES)
        for tensor in q, keys:
            w.copy(f"load {tensor.name}", tensor, tensor.line_bytes, "load", "threads", effects=_into(tensor))
        for trips, masked in kv_loops(k.tiles):
            with w.loop(trips):
                _iteration(w, cfg, arch, keys, values, masked)
        for trips, masked in (("last_masked", True), ("last_full", False)):
            with w.loop(trips):
                _iteration(w, cfg, arch, None, values, masked)
        _epilogue(w, cfg, arch, out)
    return k


def _iteration(w: Role, cfg: Config, arch: Arch, keys: Tensor | None, values: Tensor, masked: bool) -> None:
    """One KV block: V lands while QK runs, the next K while softmax and PV run."""
    w.wait_copies("load", "wait K")
    _syncthreads(w, cfg, arch)
    _load(w, cfg, values)
    ldsm = (cfg.m / cfg.warps + cfg.n) * cfg.d / 256  # Q is read anew in every iteration
    scores = Matmul("S", Smem("Q"), Smem("K"), transposed=True)
    _gemm(w, cfg, "QK", ldsm, cfg.d, {"smem": 1, "mma_sync": 1}, values.line_bytes, scores)
    w.wait_copies("load", "wait V")
    _syncthreads(w, cfg, arch)
    if keys is not None:
        _load(w, cfg, keys)
    if masked:
        mask = {"alu": 2.5 * cfg.elements, "imad": cfg.elements, "misc": cfg.elements}
        w.vector("mask", mask, effects=(Mask("S"),))
        w.delay("instruction fetch", FETCH_CYCLES, "issue")
    b, e, rows = cfg.build, cfg.elements, cfg.rows
    row_max = {"fmnmx": e + 2 * rows, "alu": b.compare * 2 * rows, "shfl": 2 * rows}
    w.vector("row max", row_max, latency={"shfl": 2, "alu": 2})
    scale = {"ffma": rows, "fmul": b.row_fmul * rows, "ex2": rows, "alu": b.row_select * rows}
    w.vector("scale", scale, latency={"fma": 2, "ex2": 1}, effects=(RowMax("S"),))
    w.vector("rescale O", {"fmul": cfg.outputs}, effects=(Rescale("O"),))
    exp = {"ffma": b.ffma * e, "fmul": b.fmul * e, "fadd": b.fadd * e, "alu": b.compare * e, "ex2": e, "f2fp": e / 2}
    spill = b.spills.get(cfg.d, 0.0)
    p = Probabilities("S"), RowSum("S"), Round("S", "P", cfg.dtype)
    w.vector("exp, sum, P", add_mixes(exp, {"alu": b.moves[cfg.d], "lds": spill}), latency={"ex2": 1}, effects=p)
    fill, product = keys.line_bytes if keys else 0.0, Matmul("O", "P", Smem("V"), add=True)
    _gemm(w, cfg, "PV", cfg.n * cfg.d / 256, cfg.d, {"smem": 1}, fill, product)


def _gemm(
    w: Role, cfg: Config, label: str, ldsm: float, d: int, latency: dict[str, float], fill: float, effect: Effect
) -> None:
    """All m x n x d multiply-adds as m16n8k16, operands by ldmatrix (512 bytes a warp instruction)."""
    hmma = cfg.m * cfg.n * d / (16 * 8 * 16 * cfg.warps)
    w.vector(
        label,
        {"ldsm": ldsm, "misc": hmma},
        smem_bytes=512 * ldsm * cfg.warps + fill,
        mma_sync_flops=2.0 * cfg.m * cfg.n * d,
        latency=latency,
        effects=(effect,),
    )


def _load(w: Role, cfg: Config, tensor: Tensor) -> None:
    """Half of an iteration's addresses, then the next block of K or V by cp.async."""
    copies = tensor.line_bytes / (16 * 32 * cfg.warps)
    w.vector("addresses", {"alu": cfg.build.integer[cfg.d] / 2, "imad": IMAD / 2, "misc": copies + OTHER / 2})
    w.copy(f"load {tensor.name}", tensor, tensor.line_bytes, "load", "threads", effects=_into(tensor))


def _into(tensor: Tensor) -> tuple[Effect, ...]:
    return (Load(Smem(tensor.name)),)


def _syncthreads(w: Role, cfg: Config, arch: Arch) -> None:
    sync = arch.sm.sync
    cycles = sync.syncthreads_base_cycles + sync.syncthreads_per_warp_cycles * cfg.warps
    w.delay("syncthreads", cycles, "barrier", effects=(Syncthreads(),))


def _epilogue(w: Role, cfg: Config, arch: Arch, out: Tensor) -> None:
    """Row sums over the quad, O / l to 16 bit, through Q's buffer into rows of 16-byte stores."""
    w.delay("instruction fetch", FETCH_CYCLES, "issue")
    w.vector(
        "row sum", {"shfl": 2 * cfg.rows, "fadd": 2 * cfg.rows, "mufu": 2 * cfg.rows}, latency={"shfl": 2, "ex2": 2}
    )
    done = Normalise("O"), Round("O", "O", cfg.dtype), Store("lse", "O", array="LSE")
    w.vector("scale O", {"fmul": cfg.outputs, "f2fp": cfg.outputs / 2}, latency={"fma": 1}, effects=done)
    sts, lds = {"sts": cfg.outputs / 2}, {"lds": cfg.outputs / 8}
    w.vector("O to SMEM", sts, smem_bytes=out.line_bytes, latency={"smem": 1}, effects=(Move("O", Smem("O")),))
    _syncthreads(w, cfg, arch)
    rows = (Move(Smem("O", share=(0, 1)), "rows of O"),)
    w.vector("O from SMEM", lds, smem_bytes=out.line_bytes, latency={"smem": 1}, effects=rows)
    w.copy("store O", out, out.line_bytes, "store", "threads", effects=(Store("rows of O"),))
    w.wait_copies("store", "drain")  # a warp exits when its stores have left


def _grid(k: Kernel, cut: BlockInfo) -> None:
    """One CTA per query tile, (tile, batch, head) with the tile fastest; KV blocks descend, the last one is peeled."""
    tiles = in_order(cut, heads_outside=True)
    blocks = cut.kv_blocks(tiles)
    before, last_masked = blocks.before_last()
    k.tiles = {
        **before.columns(),
        "last_masked": last_masked,
        "last_full": 1 - last_masked,
        "q": cut.q_line(tiles),
        "kv": kv_lines(cut, tiles, blocks.last),
    }
