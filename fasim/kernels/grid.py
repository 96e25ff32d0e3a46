"""The grid: which work tiles there are, in which order they are handed out, and the first line each one touches.

FlashAttention's ``tile_scheduler.py`` (flash_attn/cute) and ``tile_scheduler.hpp`` (hopper) at 0251105a. A kernel picks
an order here, and by ``Kernel.mode`` whether CTAs take one tile each (``single``: SingleTileScheduler), every
gridDim-th one (``static``: StaticPersistentTileScheduler) or the next one of a counter (``dynamic``).
"""

from __future__ import annotations

import math

import numpy as np

from fasim.kernels.blocks import BlockInfo, WorkTiles
from fasim.problem import Problem
from fasim.problem.masks import IntArray
from fasim.program.language import Kernel


def in_order(cut: BlockInfo, heads_outside: bool = False) -> WorkTiles:
    """All tiles as a CUDA grid numbers them: query tile fastest and ascending, then split, head and batch.

    ``heads_outside``: batch before head (FA2, whose head is gridDim.z). Splits of a short tile that are left without a
    KV block are not in the list.
    """
    heads = cut.problem.heads_q // cut.packed_heads
    shape = (heads, cut.problem.batch) if heads_outside else (cut.problem.batch, heads)
    outer, inner, split, m_block = (axis.ravel() for axis in np.indices((*shape, cut.num_splits, cut.m_blocks)))
    batch, head = (inner, outer) if heads_outside else (outer, inner)
    tiles = WorkTiles(batch * heads + head, m_block, split)
    if cut.num_splits == 1:
        return tiles
    kept = cut.kv_blocks(tiles).visited > 0
    return WorkTiles(*(column[kept] for column in tiles))


def longest_first(cut: BlockInfo, section: int = 1) -> WorkTiles:
    """Longest processing time first for causal masks: the last query tile of a pair has the most keys and comes first.

    ``section`` pairs are worked on together, tile by tile, so that their K and V stay in L2 (:func:`kv_heads_in_l2`);
    the pair is the fastest number within a section. Of 1, each pair's tiles descend on their own. Splits are not
    ordered this way.
    """
    pairs = np.arange(cut.pairs)
    descending = np.arange(cut.m_blocks)[::-1]
    sections = [pairs[start : start + section] for start in range(0, cut.pairs, section)]
    pair = np.concatenate([np.tile(part, cut.m_blocks) for part in sections])
    m_block = np.concatenate([np.repeat(descending, len(part)) for part in sections])
    return WorkTiles(pair, m_block, np.zeros_like(pair))


def kv_heads_in_l2(problem: Problem, l2_bytes: float) -> int:
    """The largest power of two of key/value heads whose K and V fit ``l2_bytes``, the space a scheduler counts on.

    A section of :func:`longest_first` has as many, times the query heads that read each (FA3: 32 MiB, FA4: 50 MB).
    """
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.element_bytes
    return 1 << int(math.log2(max(1.0, l2_bytes / head_bytes)))


def for_each_cta(tiles: WorkTiles, ctas: int) -> WorkTiles:
    """A row for every CTA of a cluster that computes a tile together (2-CTA MMA), one after the other."""
    return WorkTiles(*(np.repeat(column, ctas) for column in tiles))


def cluster_rank(tiles: WorkTiles, cluster: int) -> IntArray:
    """Number within its cluster of the CTA that takes each tile: consecutive tiles go to the CTAs of a cluster."""
    return np.arange(len(tiles.pair)) % cluster


def q_lines(tiles: WorkTiles, tiles_per_cta: int = 1) -> IntArray:
    """First line of Q and O of each tile where lines are numbered as tiles are handed out."""
    return np.arange(len(tiles.pair)) * tiles_per_cta


def kv_lines(cut: BlockInfo, tiles: WorkTiles, n_block: IntArray, cluster: int = 1, column_parts: int = 1) -> IntArray:
    """First line of K and V of tiles that begin with KV block ``n_block``.

    The lines of a block are those of its ``column_parts``, each one of every CTA of a ``cluster``; the last part is
    meant where a kernel descends from it with step -``cluster``.
    """
    part = cut.kv_line(tiles.pair, n_block) * column_parts + column_parts - 1
    return part * cluster + cluster_rank(tiles, cluster)


def peeled(k: Kernel, cut: BlockInfo, tiles: WorkTiles, more_masked: int = 0, mask_all: bool = False) -> None:
    """Fill the tile table of a kernel that peels the first KV block of a tile, the one with the last keys.

    Columns: ``masked``, ``full`` (and ``left``) count the other blocks, see :func:`kv_loops`; ``q``, ``kv``,
    ``partial`` are the first lines. Lines of Q are numbered as tiles are handed out, with splits as in the tensor.
    ``more_masked``: see :meth:`BlockInfo.kv_blocks`; ``mask_all``: see :meth:`KVBlocks.all_masked`.
    """
    blocks = cut.kv_blocks(tiles, more_masked)
    rest = blocks.after_first()
    k.tiles = {
        **(rest.all_masked() if mask_all else rest).columns(),
        "q": cut.q_line(tiles) if cut.num_splits > 1 else q_lines(tiles),
        "kv": kv_lines(cut, tiles, blocks.last, k.cluster),
        "partial": cut.partial_line(tiles),
    }
