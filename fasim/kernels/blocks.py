"""Which KV blocks a query tile visits, and which of them run the code with the mask (and the reverse, for backward).

FlashAttention's ``block_info.py`` (flash_attn/cute) and ``block.h`` (hopper), of Dao-AILab/flash-attention at 0251105a;
its words are used here: ``m_block`` and ``n_block`` number blocks of ``tile_m`` queries and ``tile_n`` keys,
``pack_gqa`` puts the query heads of a group side by side into the rows of a tile, ``num_splits`` shares the KV blocks
of a tile among CTAs. Kernels of other families follow the same rules for what is masked.

The mask itself is :mod:`fasim.problem.masks`, lengths are :mod:`fasim.problem.sequences`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fasim.problem import Problem
from fasim.problem.masks import IntArray


class WorkTiles(NamedTuple):
    """Work tiles in the order in which a scheduler hands them out; arrays of one length.

    ``pair``: batch and head, numbered ``batch * heads + head``, where with ``pack_gqa`` the heads of a group count
    once. ``split``: which share of the tile's KV blocks, 0 where they are not split.
    """

    pair: IntArray
    m_block: IntArray
    split: IntArray


class KVBlocks(NamedTuple):
    """KV blocks of each work tile, as numbers of blocks in the order of a kernel that begins with the last keys.

    ``masked`` blocks first, at the end of the keys or on the diagonal; ``full`` ones that need no mask; ``left`` masked
    ones where the mask hides keys on the left as well (a sliding window). ``last`` is the number of the block with the
    highest keys; the lowest is ``last + 1 - masked - full - left``.
    """

    last: IntArray
    masked: IntArray
    full: IntArray
    left: IntArray

    @property
    def visited(self) -> IntArray:
        """How many blocks the tile visits; 0 for an empty split."""
        return self.masked + self.full + self.left

    @property
    def lowest(self) -> IntArray:
        """Number of the block with the lowest keys."""
        return self.last + 1 - self.visited

    def after_first(self) -> KVBlocks:
        """Without the block that is visited first (FA3, FA4: peeled, and always masked)."""
        masked = np.minimum(self.masked, 1)
        full = np.minimum(self.full, 1 - masked)
        return KVBlocks(self.last - 1, self.masked - masked, self.full - full, self.left - (1 - masked - full))

    def before_last(self) -> tuple[KVBlocks, IntArray]:
        """Without the block that is visited last (FA2: it loads no more K), and whether that one (1) is masked."""
        left = np.minimum(self.left, 1)
        full = np.minimum(self.full, 1 - left)
        masked = 1 - left - full
        return KVBlocks(self.last, self.masked - masked, self.full - full, self.left - left), 1 - full

    def all_masked(self) -> KVBlocks:
        """The same blocks where the kernel runs the masked code in all of them (FA4 on Hopper under a causal mask)."""
        none = np.zeros_like(self.full)
        return KVBlocks(self.last, self.visited, none, none)

    def columns(self, ascending: bool = False) -> dict[str, IntArray]:
        """Trip counts for the tile table: ``masked``, ``full`` and, only where a tile has such blocks, ``left``.

        In the order of :func:`kv_loops`, which has the loops that go with them.
        """
        columns = {"masked": self.masked, "full": self.full, **({"left": self.left} if self.left.any() else {})}
        return dict(reversed(columns.items())) if ascending else columns


def kv_loops(tiles: Mapping[str, IntArray], ascending: bool = False) -> list[tuple[str, bool]]:
    """The loops over KV blocks that a kernel records: their column of the tile table, and whether they mask.

    In the order of a kernel that begins with the last keys, or with the first ones (``ascending``: Triton).
    """
    loops = [("masked", True), ("full", False)] + [("left", True)] * ("left" in tiles)
    return loops[::-1] if ascending else loops


@dataclass(frozen=True)
class BlockInfo:
    """How a problem's queries and keys are cut into tiles."""

    problem: Problem
    tile_m: int
    tile_n: int
    pack_gqa: bool = False
    num_splits: int = 1

    @property
    def packed_heads(self) -> int:
        """Query heads that share a tile: those of a group with ``pack_gqa``, else 1."""
        return self.problem.group if self.pack_gqa else 1

    @property
    def rows(self) -> int:
        """Rows of a pair: queries of a head, or of all heads of a group."""
        return self.problem.seqlen_q * self.packed_heads

    @property
    def pairs(self) -> int:
        """(batch, head) pairs; with ``pack_gqa`` the heads of a group count once."""
        return self.problem.batch * self.problem.heads_q // self.packed_heads

    @property
    def m_blocks(self) -> int:
        """Query tiles of a pair."""
        return -(-self.rows // self.tile_m)

    @property
    def n_blocks(self) -> int:
        """KV blocks of a head's keys."""
        return -(-self.problem.seqlen_k // self.tile_n)

    @property
    def kv_pairs(self) -> int:
        """(batch, head) pairs of K and V."""
        return self.problem.batch * self.problem.heads_kv

    def kv_pair(self, pair: IntArray) -> IntArray:
        """The pair of K and V that query pair ``pair`` reads."""
        return pair // (self.problem.group // self.packed_heads)

    def kv_line(self, pair: IntArray, n_block: IntArray) -> IntArray:
        """Number of KV block ``n_block`` of query pair ``pair`` among all blocks of K or V."""
        return self.kv_pair(pair) * self.n_blocks + n_block

    def q_line(self, tiles: WorkTiles) -> IntArray:
        """Number of each query tile among those of Q or O, in the order of the tensor."""
        return tiles.pair * self.m_blocks + tiles.m_block

    def partial_line(self, tiles: WorkTiles) -> IntArray:
        """Number of each tile's partial output among those of all splits; a tile's splits follow each other."""
        return self.q_line(tiles) * self.num_splits + tiles.split

    def positions(self, m_block: IntArray) -> tuple[IntArray, IntArray]:
        """Positions of the first and the last query of a tile, the latter perhaps beyond the last query there is."""
        first = m_block * self.tile_m // self.packed_heads
        end = -(-(m_block + 1) * self.tile_m // self.packed_heads)
        sequences = self.problem.sequences
        return sequences.position(first), sequences.position(end - 1)

    def kv_blocks(self, tiles: WorkTiles, more_masked: int = 0) -> KVBlocks:
        """The KV blocks of each tile, with the rules of the FlashAttention kernels.

        A tile whose queries see no key visits one block and masks it. A block whose outermost key is the outermost that
        all rows see is masked for nothing: the kernels compare the wrong way round. ``more_masked``: blocks on the
        right that run the masked code beyond that (FA3's first release: 1 where causal). Splits take equal shares of a
        tile's blocks, rounded up, so the last ones of a short tile may be empty.
        """
        seqlen_k, n, mask = self.problem.seqlen_k, self.tile_n, self.problem.mask
        positions = self.positions(tiles.m_block)
        first, end = (np.clip(key, 0, seqlen_k) for key in mask.seen_by_any(*positions))
        n_max = np.maximum(-(-end // n), 1)
        n_min = np.minimum(first // n, n_max - 1)
        first, end = mask.seen_by_all(*positions)
        full_max = np.clip(np.minimum(end - 1, seqlen_k) // n - more_masked, n_min, n_max)
        full_min = np.clip(-(-(first + 1) // n), n_min, full_max)
        share = -(-(n_max - n_min) // self.num_splits)
        start = np.minimum(n_min + tiles.split * share, n_max)
        stop = np.minimum(start + share, n_max)
        full_min, full_max = (np.clip(limit, start, stop) for limit in (full_min, full_max))
        return KVBlocks(stop - 1, stop - full_max, full_max - full_min, full_min - start)

    def q_blocks(self, n_block: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Backward: first query block that KV block ``n_block`` visits, one beyond the last, and one beyond the masked.

        Blocks from the first on are masked up to the third number; where the mask hides keys on the left too, and in a
        ragged last KV block, all are.
        """
        problem, mask = self.problem, self.problem.mask
        position = problem.sequences.position(np.arange(problem.seqlen_q, dtype=np.int64))
        first, end = mask.first(position), mask.end(position)  # of each query, neither ever decreases
        key, last = n_block * self.tile_n, (n_block + 1) * self.tile_n - 1
        m_min = np.searchsorted(end, key, "right") // self.tile_m
        m_max = -(-np.searchsorted(first, np.minimum(last, problem.seqlen_k - 1), "right") // self.tile_m)
        masked = -(-np.searchsorted(end, last, "right") // self.tile_m)
        limited = (last >= problem.seqlen_k) | (np.searchsorted(first, key, "right") < problem.seqlen_q)
        return m_min, m_max, np.where(limited, m_max, np.clip(masked, m_min, m_max))
