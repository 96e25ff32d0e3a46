"""Splitting the keys of a tile among CTAs: how many splits, and the kernel that combines them.

Source: heuristics.h and flash_fwd_combine_kernel.h in hopper/ of Dao-AILab/flash-attention at 0251105a.
"""

from __future__ import annotations

import math

import numpy as np

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.blocks import BlockInfo, WorkTiles
from fasim.kernels.layouts import query_rows
from fasim.problem import Problem
from fasim.problem.masks import IntArray
from fasim.program.builds import Build
from fasim.program.effects import AddSplit, ArrayRegion, Fetch, Layout, Round, SplitWeights, Store
from fasim.program.language import Kernel, Smem
from fasim.program.ops import Mix


def cut_tiles(problem: Problem, arch: Arch, tile_m: int, tile_n: int, splits: int) -> BlockInfo:
    """How queries and keys are cut. ``splits`` 0: the heuristic, :func:`choose_splits`.

    The heads of a group share tiles with splits, or where the rows of single heads fill less than 0.9 as much of their
    tiles. Raises ConfigError for a negative number.
    """
    if splits < 0:
        raise ConfigError(f"splits {splits}: 0 (heuristic), 1 (off) or more")
    if splits == 0:
        splits = choose_splits(problem, arch, tile_m, tile_n)

    def filled(rows: int) -> float:
        return rows / (-(-rows // tile_m) * tile_m)

    pack_gqa = splits > 1 or filled(problem.seqlen_q) < 0.9 * filled(problem.seqlen_q * problem.group)
    return BlockInfo(problem, tile_m, tile_n, pack_gqa, splits)


def choose_splits(problem: Problem, arch: Arch, tile_m: int, tile_n: int) -> int:
    """FlashAttention-3's number of KV splits.

    One when the tiles fill 0.8 of the SMs (unless a head's K and V outgrow a 50 MB L2 that many query tiles read) or
    there are at most 4 KV blocks; else the smallest number within 85 % of the best wave efficiency.
    """
    sms = arch.chip.sm_count
    m_blocks = -(-problem.seqlen_q * problem.group // tile_m)
    n_blocks = problem.kv_tiles(tile_n)
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


def combine(name: str, cut: BlockInfo, arch: Arch, build: Build) -> Kernel:
    """The second launch: scales and adds the splits' partial outputs, 8 to 32 rows a CTA.

    ``cp.async`` loads splits ahead; the log-sum-exps come first. The partial outputs are in L2 where they fit.
    """
    problem, dv, splits = cut.problem, cut.problem.head_dim_v, cut.num_splits
    rows = 8 if dv % 128 == 0 else 16 if dv % 64 == 0 else 32
    k = Kernel(name, problem, arch, {})
    total = cut.pairs * cut.rows
    first = np.arange(0, total, rows, dtype=np.int64)
    tiles = WorkTiles(first // cut.rows, first % cut.rows // cut.tile_m, np.zeros_like(first))
    k.tiles = {"out": np.arange(len(first), dtype=np.int64), "partial": cut.partial_line(tiles)}
    parts, outputs = _layouts(cut, first, rows)
    lines = cut.pairs * cut.m_blocks * splits
    partial = k.tensor("O.partial", lines, 4 * rows * dv, "partial", 1, parts)
    out = k.tensor("O", len(first), 2 * rows * dv, "out", layout=outputs)
    stages, warps = int(build.cost("combine_stages")), int(build.cost("combine_warps"))
    buffers = k.stages(partial, partial.line_bytes, stages, name="partial")
    values = rows * dv / (32 * warps)
    ahead = min(stages - 1, splits)
    with k.role("combine", warps=warps, registers=64) as c, c.tiles():
        with c.loop(ahead, "prefetch"):
            c.fill(buffers, "threads")
        c.delay("load LSE", arch.l2.latency_cycles, "memory")
        weights = Fetch("lses", partial.name, splits, "LSE.partial"), SplitWeights(), Store("lse", "O", array="LSE")
        c.vector("scales", {"fmnmx": 4, "ffma": 4, "ex2": 4, "shfl": 8}, latency={"shfl": 8, "ex2": 2}, effects=weights)
        for trips, more in ((splits - ahead, True), (ahead, False)):
            with c.loop(trips, "splits"):
                c.wait_filled(buffers)
                add = (AddSplit(Smem(buffers.buffer.name)),)
                mix: Mix = {"lds": values / 4 + 1, "ffma": values}
                c.vector("add", mix, smem_bytes=partial.line_bytes, latency={"smem": 1}, effects=add)
                if more:
                    c.fill(buffers, "threads")
        converted = Round("O", "O", "fp16" if problem.dtype == "fp16" else "bf16")
        c.vector("convert", {"f2fp": values / 2}, effects=(converted,))
        c.copy("store O", out, out.line_bytes, "store", "threads", effects=(Store("O"),))
    return k


def _layouts(cut: BlockInfo, first: IntArray, rows: int) -> tuple[Layout, Layout]:
    """Lines of the splits' outputs and of O as CTAs of ``rows`` rows take them, beginning with rows ``first``."""
    total = cut.pairs * cut.rows

    def rows_of(tile: int) -> IntArray:
        row = int(first[tile]) + np.arange(rows, dtype=np.int64)
        return np.where(row < total, row, -1)

    def parts(line: int, tile: int) -> ArrayRegion:
        row = rows_of(tile)
        return ArrayRegion(np.where(row >= 0, line % cut.num_splits * total + row, -1))

    def outputs(line: int, tile: int) -> ArrayRegion:
        row = rows_of(tile)
        return ArrayRegion(np.where(row >= 0, query_rows(cut, row // cut.rows, row % cut.rows), -1))

    return Layout(cut.num_splits * total, cut.problem.head_dim_v, parts), Layout(total, cut.problem.head_dim_v, outputs)
