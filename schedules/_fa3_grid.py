"""Tiles of FlashAttention-3: their sizes, packed query heads, schedulers' orders, KV splits and their combine kernel.

The first release has its own FP8 tiles, masks a block more and hands out causal tiles dynamically but in their
natural order (flash_fwd_launch_template.h, tile_scheduler.hpp at 5018ac6a).

Sources: tile_size.h, heuristics.h, tile_scheduler.hpp, flash_fwd_combine_kernel.h in hopper/, Dao-AILab/flash-attention
at 0251105a.
"""

from __future__ import annotations

import math

import numpy as np

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.blocks import BlockInfo, WorkTiles
from fasim.kernels.grid import in_order, kv_heads_in_l2, kv_lines, longest_first, q_lines
from fasim.kernels.layouts import query_rows
from fasim.problem import Problem
from fasim.problem.masks import IntArray
from fasim.program.effects import AddSplit, Fetch, Layout, Load, Region, Round, SplitWeights, Store
from fasim.program.language import Kernel
from fasim.program.ops import BarrierUse, Copy, Wait
from fasim.program.tiles import Smem

#: (head_dim up to, head_dim_v up to, causal) -> tile_m, tile_n, P in registers. tile_size.h
TILES = {
    (64, 64, False): (192, 192, False),
    (64, 64, True): (192, 128, True),
    (96, 96, False): (192, 144, False),
    (96, 96, True): (192, 144, False),
    (128, 128, False): (128, 176, True),
    (128, 128, True): (128, 128, True),
    (192, 128, False): (128, 128, True),
    (192, 128, True): (128, 128, True),
    (192, 192, False): (128, 112, True),
    (192, 192, True): (128, 112, True),
    (256, 256, False): (128, 80, True),
    (256, 256, True): (128, 80, True),
}

#: The same for FP8, causal or not; P always stays in registers. tile_size.h
FP8_TILES = {(64, 64): (192, 160), (96, 96): (192, 128), (128, 128): (128, 224), (192, 192): (128, 160)}
FP8_TILES |= {(256, 256): (128, 128)}

#: The first release, causal or not: 16-bit at d64, and FP8 -> tile_m, tile_n, stages.
FIRST_D64_TILE = (192, 128, True)
FIRST_FP8_TILES = {(64, 64): (192, 128, 4), (128, 128): (128, 256, 2), (256, 256): (128, 128, 2)}

#: (b, h) pairs the causal scheduler keeps together so that their K and V stay in L2.
L2_SECTION_BYTES = 32 * 2**20

#: Threads of the combine kernel, splits it loads ahead.
COMBINE_WARPS, COMBINE_STAGES = 8, 4


def tile(problem: Problem, first_release: bool) -> tuple[int, int, bool, int]:
    """Tile table: tile_m, tile_n, P in registers, stages. Raises ConfigError where no kernel is built."""
    d, dv = problem.head_dim, problem.head_dim_v
    table = {dims: (*sizes, 2) for dims, sizes in TILES.items() if dims[2] == problem.causal}
    if problem.dtype == "fp8":
        table = {(*dims, problem.causal): (*sizes, True, 2) for dims, sizes in FP8_TILES.items()}
        if first_release:
            table = {(*dims, problem.causal): (m, n, True, s) for dims, (m, n, s) in FIRST_FP8_TILES.items()}
    elif first_release:
        table = {dims: sizes for dims, sizes in table.items() if dims[0] == dims[1] in (64, 128, 256)}
        table[64, 64, problem.causal] = (*FIRST_D64_TILE, 2)
    row = next((sizes for (a, b, _), sizes in table.items() if d <= a and dv <= b), None)
    if row is None or d % 16 or dv % 16:
        raise ConfigError(f"fa3: no tile for head_dim {d}, head_dim_v {dv}; multiples of 16 up to 256 exist")
    return row


def block_info(problem: Problem, arch: Arch, m: int, n: int, splits: int) -> BlockInfo:
    """Resolve ``splits`` (0: the heuristic) and whether the heads of a group share tiles.

    They do with splits, or where the rows of single heads fill less than 0.9 as much of their tiles.
    """
    if splits == 0:
        splits = choose_splits(problem, arch, m, n)

    def filled(rows: int) -> float:
        return rows / (-(-rows // m) * m)

    packed = splits > 1 or filled(problem.seqlen_q) < 0.9 * filled(problem.seqlen_q * problem.group)
    return BlockInfo(problem, m, n, packed, splits)


def choose_splits(problem: Problem, arch: Arch, m: int, n: int) -> int:
    """FlashAttention-3's number of KV splits.

    One when the tiles fill 0.8 of the SMs (unless a head's K and V outgrow a 50 MB L2 that many query tiles
    read) or there are at most 4 KV blocks; else the smallest number within 85 % of the best wave efficiency.
    """
    sms = arch.chip.sm_count
    m_blocks = -(-problem.seqlen_q * problem.group // m)
    n_blocks = problem.kv_tiles(n)
    tiles = problem.batch * problem.heads_kv * m_blocks
    if tiles >= 0.8 * sms:
        head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.element_bytes
        l2_bytes = 50 * 2**20
        if head_bytes > l2_bytes and m_blocks >= 2 * sms and not problem.causal:
            return min(128, math.ceil(head_bytes / l2_bytes))
        return 1
    if n_blocks <= 4:
        return 1
    waves = tiles * np.arange(1, min(128, sms, n_blocks) + 1) / sms
    efficiency = waves / np.ceil(waves)
    return int(np.argmax(efficiency >= 0.85 * efficiency.max())) + 1


def grid(k: Kernel, cut: BlockInfo, persistent: bool, first_release: bool) -> WorkTiles | None:
    """Work tiles in the scheduler's order, and their KV blocks, last to first.

    The first block of a tile is peeled and always masked, so ``masked`` and ``full`` count the others. Returns the
    tiles by which lines of Q and O are numbered, None where that is their order in the tensor.
    """
    problem, split = k.problem, cut.num_splits > 1
    if split or not problem.causal or first_release:
        tiles = in_order(cut)
    else:
        # FlashAttention-3 does not multiply by the group where its heads are packed
        tiles = longest_first(cut, kv_heads_in_l2(problem, L2_SECTION_BYTES) * problem.group)
    if persistent:
        k.mode = "dynamic" if problem.causal else "static"
    blocks = cut.kv_blocks(tiles, more_masked=int(first_release and problem.causal))
    k.tiles = {
        **blocks.after_first().columns(),
        "q": cut.q_line(tiles) if split else q_lines(tiles),
        "kv": kv_lines(cut, tiles, blocks.last, k.cluster),
        "partial": cut.partial_line(tiles),
    }
    return None if split else tiles


def combine(problem: Problem, arch: Arch, cut: BlockInfo) -> Kernel:
    """The second launch: scales and adds the splits' partial outputs, 8 to 32 rows a CTA.

    ``cp.async`` loads four splits ahead; the log-sum-exps come first. The partial outputs are in L2 where they fit.
    """
    dv = problem.head_dim_v
    rows = 8 if dv % 128 == 0 else 16 if dv % 64 == 0 else 32
    k = Kernel("fa3_combine", problem, arch, {})
    total = cut.pairs * cut.rows
    first = np.arange(0, total, rows, dtype=np.int64)
    tiles = WorkTiles(first // cut.rows, first % cut.rows // cut.tile_m, np.zeros_like(first))
    k.tiles = {"out": np.arange(len(first), dtype=np.int64), "partial": cut.partial_line(tiles)}

    def rows_of(tile: int) -> IntArray:
        row = int(first[tile]) + np.arange(rows, dtype=np.int64)
        return np.where(row < total, row, -1)

    def parts(line: int, tile: int) -> Region:
        row = rows_of(tile)
        return Region(np.where(row >= 0, line % cut.num_splits * total + row, -1))

    def outputs(line: int, tile: int) -> Region:
        row = rows_of(tile)
        return Region(np.where(row >= 0, query_rows(cut, row // cut.rows, row % cut.rows), -1))

    layouts = Layout(cut.num_splits * total, dv, parts), Layout(total, dv, outputs)
    lines = cut.pairs * cut.m_blocks * cut.num_splits
    partial = k.tensor("O.partial", lines, 4 * rows * dv, "partial", 1, layouts[0])
    out = k.tensor("O", len(first), 2 * rows * dv, "out", layout=layouts[1])
    k.smem("partial", partial.line_bytes, COMBINE_STAGES)
    full = k.barrier("partial.full", 1, COMBINE_STAGES)
    values = rows * dv / (32 * COMBINE_WARPS)
    ahead = min(COMBINE_STAGES - 1, cut.num_splits)

    use = BarrierUse(full.name, full.stages)

    with k.role("combine", warps=COMBINE_WARPS, registers=64) as c, c.tiles():
        into = (Load(Smem("partial")),)
        load = Copy("load partial", partial.name, partial.line_bytes, "load", "threads", use, effects=into)
        with c.loop(ahead, "prefetch"):
            c.record(load)
        c.delay("load LSE", arch.l2.latency_cycles, "memory")
        weights = (
            Fetch("lses", partial.name, cut.num_splits, "LSE.partial"),
            SplitWeights(),
            Store("lse", "O", array="LSE"),
        )
        mix = {"fmnmx": 4, "ffma": 4, "ex2": 4, "shfl": 8}
        c.vector("scales", mix, latency={"shfl": 8, "ex2": 2}, effects=weights)
        for trips, more in ((cut.num_splits - ahead, True), (ahead, False)):
            with c.loop(trips, "splits"):
                c.record(Wait("wait partial", use, "memory", named=True))
                mix = {"lds": values / 4 + 1, "ffma": values}
                effects = (AddSplit(Smem("partial")),)
                c.vector("add", mix, smem_bytes=partial.line_bytes, latency={"smem": 1}, effects=effects)
                if more:
                    c.record(load)
        converted = Round("O", "O", "fp16" if problem.dtype == "fp16" else "bf16")
        c.vector("convert", {"f2fp": values / 2}, effects=(converted,))
        c.copy("store O", out, out.line_bytes, "store", "threads", effects=(Store("O"),))
    return k
