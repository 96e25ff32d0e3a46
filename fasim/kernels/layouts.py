"""Which rows and columns of Q, K, V and O a line of global memory holds: for execution on values.

Tensors are cut into lines of one copy each (:class:`fasim.program.language.Tensor`); the numbers of the lines are those
of :mod:`fasim.kernels.grid`.
"""

from __future__ import annotations

import numpy as np

from fasim.kernels.blocks import BlockInfo, WorkTiles
from fasim.problem.masks import IntArray
from fasim.program.effects import ArrayRegion, Layout


def query_rows(cut: BlockInfo, pair: int | IntArray, row: IntArray) -> IntArray:
    """Rows of Q and O of rows of a pair; -1 beyond the last. With ``pack_gqa`` the heads of a group take turns."""
    heads = cut.packed_heads
    return cut.problem.sequences.q_rows(pair * heads + row % heads, row // heads)


def query_layout(
    cut: BlockInfo, columns: int, tiles: WorkTiles | None = None, *, ctas: int = 1, tiles_per_cta: int = 1
) -> Layout:
    """Q or O: a line for every query tile of ``tiles``, or of (pair, m_block) in order without them.

    A tile that ``ctas`` CTAs compute together has ``tiles_per_cta`` lines for each of them: MMAs of all CTAs take
    consecutive rows, so the lines of a CTA are ``ctas`` lines apart in the tile.
    """
    if tiles is None:
        pair, m_block = np.divmod(np.arange(cut.pairs * cut.m_blocks, dtype=np.int64), cut.m_blocks)
    else:
        pair, m_block = tiles.pair, tiles.m_block
    rows = cut.tile_m // (tiles_per_cta * ctas)

    def region(line: int, tile: int) -> ArrayRegion:
        cta, number = divmod(line, tiles_per_cta)
        work, rank = divmod(cta, ctas)
        row = m_block[work] * cut.tile_m + (number * ctas + rank) * rows + np.arange(rows, dtype=np.int64)
        return ArrayRegion(query_rows(cut, int(pair[work]), row))

    return Layout(cut.problem.sequences.q_row_count, columns, region)


def kv_layout(cut: BlockInfo, columns: int, cluster: int = 1) -> Layout:
    """K or V by blocks of ``tile_n`` keys, each cut into a line for every CTA of a cluster that multicasts it."""
    part = cut.tile_n // cluster

    def region(line: int, tile: int) -> ArrayRegion:
        block, rank = divmod(line, cluster)
        return ArrayRegion(_key_rows(cut, block)[rank * part :][:part])

    def share(line: int) -> tuple[float, float]:
        return line % cluster / cluster, (line % cluster + 1) / cluster

    return Layout(cut.problem.sequences.k_row_count, columns, region, share=share)


def key_layout(cut: BlockInfo, ctas: int = 1, column_parts: int = 1) -> Layout:
    """K of a 2-CTA MMA: ``column_parts`` of each block, of which a CTA loads its share of the keys."""
    part, width = cut.tile_n // ctas, cut.problem.head_dim // column_parts

    def region(line: int, tile: int) -> ArrayRegion:
        line, rank = divmod(line, ctas)
        block, half = divmod(line, column_parts)
        return ArrayRegion(_key_rows(cut, block)[rank * part :][:part], slice(half * width, (half + 1) * width))

    return Layout(cut.problem.sequences.k_row_count, cut.problem.head_dim, region)


def value_layout(cut: BlockInfo, ctas: int = 1, column_parts: int = 1) -> Layout:
    """V of a 2-CTA MMA: ``column_parts`` of each block, of which a CTA loads its share of the columns."""
    parts = column_parts * ctas
    width = cut.problem.head_dim_v // parts

    def region(line: int, tile: int) -> ArrayRegion:
        block, part = divmod(line, parts)
        return ArrayRegion(_key_rows(cut, block), slice(part * width, (part + 1) * width))

    return Layout(cut.problem.sequences.k_row_count, cut.problem.head_dim_v, region)


def partial_layout(cut: BlockInfo) -> Layout:
    """Outputs of the splits, before they are combined: lines (pair, m_block, split), rows (split, pair, row)."""
    total = cut.pairs * cut.rows

    def region(line: int, tile: int) -> ArrayRegion:
        (pair, block), split = divmod(line // cut.num_splits, cut.m_blocks), line % cut.num_splits
        row = block * cut.tile_m + np.arange(cut.tile_m, dtype=np.int64)
        return ArrayRegion(np.where(row < cut.rows, split * total + pair * cut.rows + row, -1))

    return Layout(cut.num_splits * total, cut.problem.head_dim_v, region)


def _key_rows(cut: BlockInfo, block: int) -> IntArray:
    """Rows of K and V in a block, of those of all heads; -1 beyond the last key."""
    pair, n_block = divmod(block, cut.n_blocks)
    return cut.problem.sequences.k_rows(pair, n_block * cut.tile_n + np.arange(cut.tile_n, dtype=np.int64))
