"""Tiles of FlashAttention-3: their sizes, packed query heads, schedulers' orders, KV splits and their combine kernel.

The first release has its own FP8 tiles, masks a block more and hands out causal tiles dynamically but in their
natural order (flash_fwd_launch_template.h, tile_scheduler.hpp at 5018ac6a).

Sources: tile_size.h, heuristics.h, tile_scheduler.hpp, flash_fwd_combine_kernel.h in hopper/, Dao-AILab/flash-attention
at 0251105a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.problem import Problem
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


@dataclass(frozen=True)
class Plan:
    """How query rows and keys are cut into tiles."""

    m: int
    n: int
    group: int  # query heads in the rows of a tile, 1 when not packed
    splits: int

    def rows(self, problem: Problem) -> int:
        """Query rows of one head, or of all heads of a group."""
        return problem.seqlen_q * self.group

    def pairs(self, problem: Problem) -> int:
        """(batch, head) pairs, heads of a group counted once."""
        return problem.batch * problem.heads_q // self.group

    def m_blocks(self, problem: Problem) -> int:
        """Query tiles of a pair."""
        return -(-self.rows(problem) // self.m)


def plan(problem: Problem, arch: Arch, m: int, n: int, splits: int) -> Plan:
    """Resolve ``splits`` (0: the heuristic) and whether the heads of a group share tiles.

    They do with splits, or where the rows of single heads fill less than 0.9 as much of their tiles.
    """
    if splits == 0:
        splits = choose_splits(problem, arch, m, n)

    def filled(rows: int) -> float:
        return rows / (-(-rows // m) * m)

    packed = splits > 1 or filled(problem.seqlen_q) < 0.9 * filled(problem.seqlen_q * problem.group)
    return Plan(m, n, problem.group if packed else 1, splits)


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


IntArray = npt.NDArray[np.int64]


def query_layout(problem: Problem, cut: Plan, pair: IntArray, block: IntArray, columns: int) -> Layout:
    """Lines of Q or O: query tile ``block[line]`` of the heads ``pair[line]``."""
    rows = np.arange(cut.m, dtype=np.int64)

    def region(line: int, tile: int) -> Region:
        return Region(_query_rows(problem, cut, int(pair[line]), int(block[line]) * cut.m + rows))

    return Layout(problem.batch * problem.heads_q * problem.seqlen_q, columns, region)


def _query_rows(problem: Problem, cut: Plan, pair: int | IntArray, row: IntArray) -> IntArray:
    """(batch, head, token) numbers of rows of the heads ``pair``: where heads share tiles, their rows alternate."""
    head, token = pair * cut.group + row % cut.group, row // cut.group
    return np.where(row < cut.rows(problem), head * problem.seqlen_q + token, -1)


def partial_layout(problem: Problem, cut: Plan) -> Layout:
    """Lines of the splits' outputs: (pair, query tile, split), the rows of a split together."""
    m_blocks, length = cut.m_blocks(problem), cut.rows(problem)
    total = cut.pairs(problem) * length

    def region(line: int, tile: int) -> Region:
        (pair, block), split = divmod(line // cut.splits, m_blocks), line % cut.splits
        row = block * cut.m + np.arange(cut.m, dtype=np.int64)
        return Region(np.where(row < length, split * total + pair * length + row, -1))

    return Layout(cut.splits * total, problem.head_dim_v, region)


def grid(k: Kernel, cut: Plan, persistent: bool, first_release: bool) -> tuple[IntArray, IntArray]:
    """Work tiles: (m block, head, batch) in the scheduler's order, and their KV blocks, last to first.

    Returns the heads (pair) and the m block of each line of Q.

    The first block of a tile is peeled and always masked, so ``masked`` and ``full`` count the others.
    """
    problem = k.problem
    m_blocks, pairs = cut.m_blocks(problem), cut.pairs(problem)
    if cut.splits > 1:
        pair, split, block = (a.ravel() for a in np.mgrid[0:pairs, 0 : cut.splits, 0:m_blocks])
    elif not problem.causal or first_release:
        k.mode = "single" if not persistent else "dynamic" if problem.causal else "static"
        pair, block = (a.ravel() for a in np.mgrid[0:pairs, 0:m_blocks])
        split = np.zeros_like(pair)
    else:
        k.mode = "dynamic" if persistent else "single"
        pair, block = _longest_first(problem, pairs, m_blocks).T
        split = np.zeros_like(pair)
    total, masked = np.array([_kv_blocks(problem, cut, b) for b in range(m_blocks)], dtype=np.int64).T
    masked = np.minimum(masked + (first_release and problem.causal), total)
    share = -(-total // cut.splits)[block]
    start = split * share
    stop = np.minimum(start + share, total[block])
    kept = start < stop  # the last splits of a short tile are empty
    pair, split, block, start, stop = (a[kept] for a in (pair, split, block, start, stop))
    more_masked = np.clip(stop - np.maximum(start, (total - masked)[block]) - 1, 0, stop - start - 1)
    blocks = problem.kv_tiles(cut.n)
    heads = problem.heads_q // cut.group
    kv_head = pair // heads * problem.heads_kv + pair % heads // (problem.group // cut.group)
    rank = np.arange(len(pair)) % k.cluster
    k.tiles = {
        "masked": more_masked,
        "full": stop - start - 1 - more_masked,
        "q": pair * m_blocks + block if cut.splits > 1 else np.arange(len(pair), dtype=np.int64),
        "kv": (kv_head * blocks + stop - 1) * k.cluster + rank,
        "partial": (pair * m_blocks + block) * cut.splits + split,
    }
    if cut.splits > 1:
        lines = np.arange(pairs * m_blocks, dtype=np.int64)
        return lines // m_blocks, lines % m_blocks
    return pair, block


def _kv_blocks(problem: Problem, cut: Plan, block: int) -> tuple[int, int]:
    """KV blocks of a query tile (at least one) and how many of them, the last ones, need a mask."""
    first = block * cut.m // cut.group
    last = -(-(block + 1) * cut.m // cut.group)
    total = max(1, -(-problem.kv_range(first, last) // cut.n))
    end = first + problem.seqlen_k - problem.seqlen_q if problem.causal else problem.seqlen_k
    return total, total - min(max(end // cut.n, 0), total)


def _longest_first(problem: Problem, pairs: int, m_blocks: int) -> npt.NDArray[np.int64]:
    """(pair, block) rows: inside an L2 section block descending, pair fastest."""
    per_head = problem.seqlen_k * problem.element_bytes * (problem.head_dim + problem.head_dim_v)
    section = 2 ** int(np.log2(max(1.0, L2_SECTION_BYTES / per_head))) * problem.group
    order = [
        (h, b)
        for start in range(0, pairs, section)
        for b in range(m_blocks - 1, -1, -1)
        for h in range(start, min(start + section, pairs))
    ]
    return np.array(order, dtype=np.int64)


def combine(problem: Problem, arch: Arch, cut: Plan) -> Kernel:
    """The second launch: scales and adds the splits' partial outputs, 8 to 32 rows a CTA.

    ``cp.async`` loads four splits ahead; the log-sum-exps come first. The partial outputs are in L2 where they fit.
    """
    dv = problem.head_dim_v
    rows = 8 if dv % 128 == 0 else 16 if dv % 64 == 0 else 32
    k = Kernel("fa3_combine", problem, arch, {})
    total = cut.pairs(problem) * cut.rows(problem)
    first = np.arange(0, total, rows, dtype=np.int64)
    pair, row = first // cut.rows(problem), first % cut.rows(problem)
    m_blocks = cut.m_blocks(problem)
    k.tiles = {"out": np.arange(len(first), dtype=np.int64), "partial": (pair * m_blocks + row // cut.m) * cut.splits}

    def rows_of(tile: int) -> IntArray:
        row = int(first[tile]) + np.arange(rows, dtype=np.int64)
        return np.where(row < total, row, -1)

    def parts(line: int, tile: int) -> Region:
        row = rows_of(tile)
        return Region(np.where(row >= 0, line % cut.splits * total + row, -1))

    def outputs(line: int, tile: int) -> Region:
        row = rows_of(tile)
        of_pair = _query_rows(problem, cut, row // cut.rows(problem), row % cut.rows(problem))
        return Region(np.where(row >= 0, of_pair, -1))

    layouts = Layout(cut.splits * total, dv, parts), Layout(total, dv, outputs)
    lines = cut.pairs(problem) * m_blocks * cut.splits
    partial = k.tensor("O.partial", lines, 4 * rows * dv, "partial", 1, layouts[0])
    out = k.tensor("O", len(first), 2 * rows * dv, "out", layout=layouts[1])
    k.smem("partial", partial.line_bytes, COMBINE_STAGES)
    full = k.barrier("partial.full", 1, COMBINE_STAGES)
    values = rows * dv / (32 * COMBINE_WARPS)
    ahead = min(COMBINE_STAGES - 1, cut.splits)

    use = BarrierUse(full.name, full.stages)

    with k.role("combine", warps=COMBINE_WARPS, registers=64) as c, c.tiles():
        into = (Load(Smem("partial")),)
        load = Copy("load partial", partial.name, partial.line_bytes, "load", "threads", use, effects=into)
        with c.loop(ahead, "prefetch"):
            c.record(load)
        c.delay("load LSE", arch.l2.latency_cycles, "memory")
        weights = Fetch("lses", partial.name, cut.splits, "LSE.partial"), SplitWeights(), Store("lse", "O", array="LSE")
        mix = {"fmnmx": 4, "ffma": 4, "ex2": 4, "shfl": 8}
        c.vector("scales", mix, latency={"shfl": 8, "ex2": 2}, effects=weights)
        for trips, more in ((cut.splits - ahead, True), (ahead, False)):
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
