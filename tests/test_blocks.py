"""Masks, the blocks that tiles visit, the orders of tiles; and a new mask that no kernel knows of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import messages

from fasim.arch import load_arch
from fasim.checker.check import check
from fasim.kernels.blocks import BlockInfo, KVBlocks, WorkTiles, kv_loops
from fasim.kernels.grid import cluster_rank, for_each_cta, in_order, kv_heads_in_l2, kv_lines, longest_first
from fasim.kernels.layouts import key_layout, kv_layout, partial_layout, query_layout, value_layout
from fasim.problem import CAUSAL, FULL, Mask, Problem
from fasim.problem.masks import IntArray
from fasim.program.library import load_schedule

SMALL = st.integers(1, 40)
TILE = st.integers(1, 12)


class Window(Mask):
    """A causal sliding window: the last ``keys`` keys up to the query's position."""

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def first(self, position: IntArray) -> IntArray:
        return position + 1 - self.keys

    def end(self, position: IntArray) -> IntArray:
        return position + 1


def problem_with(mask: Mask, **shape: object) -> Problem:
    """A problem whose mask is ``mask``; it counts as causal for kernels with tables for that."""

    class Masked(Problem):
        @property
        def mask(self) -> Mask:
            return mask

    return Masked(causal=mask is not FULL, **shape)


MASKS = st.one_of(st.sampled_from((FULL, CAUSAL)), st.integers(1, 30).map(Window))


def by_hand(mask: Mask, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """The score matrix, element by element."""
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    position = i + seqlen_k - seqlen_q
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if mask is not FULL:
        seen &= j <= position
    if isinstance(mask, Window):
        seen &= j > position - mask.keys
    return seen


def all_tiles(cut: BlockInfo) -> WorkTiles:
    """The query tiles of the first pair."""
    zeros = np.zeros(cut.m_blocks, np.int64)
    return WorkTiles(zeros, np.arange(cut.m_blocks), zeros)


# --- masks ----------------------------------------------------------------------------------------------------------
@given(sq=SMALL, sk=SMALL, mask=MASKS)
def test_masks_element_by_element(sq, sk, mask):
    expected = by_hand(mask, sq, sk)
    assert (mask.matrix(sq, sk) == expected).all()
    assert mask.visible_scores(sq, sk) == expected.sum()


def test_what_published_flops_count():
    assert FULL.counted_scores(6, 4) == 24
    assert CAUSAL.counted_scores(6, 4) == 12  # half, though queries 0 and 1 see nothing
    assert Window(2).counted_scores(4, 4) == 1 + 2 + 2 + 2


# --- blocks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, tile, expected",
    [
        ({"seqlen_q": 1024}, (3, 128, 128), (8, 0)),
        ({"seqlen_q": 1024}, (0, 128, 176), (6, 1)),  # 1024 = 5 x 176 + 144
        ({"seqlen_q": 1024, "causal": True}, (0, 128, 128), (1, 1)),
        ({"seqlen_q": 1024, "causal": True}, (7, 128, 128), (8, 1)),
        ({"seqlen_q": 1024, "causal": True}, (2, 128, 64), (6, 2)),
        ({"seqlen_q": 1024, "causal": True}, (3, 128, 176), (3, 1)),  # keys 0..511; row 384 covers two blocks
        ({"seqlen_q": 128, "seqlen_k": 1024, "causal": True}, (0, 128, 128), (8, 1)),
        ({"seqlen_q": 1024, "seqlen_k": 128, "causal": True}, (0, 128, 128), (1, 1)),  # sees no key, visits a block
        ({"seqlen_q": 1, "seqlen_k": 256, "causal": True}, (0, 64, 128), (2, 1)),
    ],
)
def test_kv_blocks_by_hand(shape, tile, expected):
    m_block, tile_m, tile_n = tile
    cut = BlockInfo(Problem(**shape), tile_m, tile_n)
    blocks = cut.kv_blocks(all_tiles(cut))
    assert (blocks.visited[m_block], blocks.masked[m_block]) == expected
    assert blocks.lowest[m_block] == 0
    assert not blocks.left.any()


@given(sq=SMALL, sk=SMALL, mask=MASKS, tile_m=TILE, tile_n=TILE, group=st.integers(1, 3), splits=st.integers(1, 3))
def test_kv_blocks_agree_with_the_mask(sq, sk, mask, tile_m, tile_n, group, splits):
    """What a tile visits is what it sees, and what is not masked is visible."""
    problem = problem_with(mask, batch=1, seqlen_q=sq, seqlen_k=sk, heads_q=group, heads_kv=1)
    cut = BlockInfo(problem, tile_m, tile_n, pack_gqa=True, num_splits=splits)
    seen = np.repeat(by_hand(mask, sq, sk), group, axis=0)  # rows of a tile: the heads of a group take turns
    tiles = in_order(cut)
    blocks = cut.kv_blocks(tiles)
    assert (blocks.visited > 0).all()
    for m_block in range(cut.m_blocks):
        rows = seen[m_block * tile_m : (m_block + 1) * tile_m]
        needed = [n for n in range(cut.n_blocks) if rows[:, n * tile_n : (n + 1) * tile_n].any()]
        mine = np.flatnonzero(tiles.m_block == m_block)
        visited = sorted(n for i in mine for n in range(blocks.lowest[i], blocks.last[i] + 1))
        assert set(needed) <= set(visited)  # a last tile beyond the queries visits for rows that do not exist
        assert len(visited) == len(set(visited))
        if (m_block + 1) * tile_m <= cut.rows and (m_block + 1) * tile_m % group == m_block * tile_m % group == 0:
            assert visited == (needed or [0])
        for i in mine:
            full_max = blocks.last[i] + 1 - blocks.masked[i]
            for n in range(full_max - blocks.full[i], full_max):
                assert rows[:, n * tile_n : (n + 1) * tile_n].all()
                assert (n + 1) * tile_n <= sk


@given(sq=SMALL, sk=SMALL, mask=MASKS, tile_m=TILE, tile_n=TILE)
def test_one_block_more_than_needed_is_masked_on_each_side(sq, sk, mask, tile_m, tile_n):
    cut = BlockInfo(problem_with(mask, seqlen_q=sq, seqlen_k=sk), tile_m, tile_n)
    blocks = cut.kv_blocks(all_tiles(cut))
    for m_block in range(sq // tile_m):
        rows = by_hand(mask, sq, sk)[m_block * tile_m : (m_block + 1) * tile_m]
        partly = [rows[:, n : n + tile_n] for n in range(0, sk, tile_n)]
        needed = sum(bool(b.any() and not (b.all() and b.shape[1] == tile_n)) for b in partly)
        spare = blocks.masked[m_block] + blocks.left[m_block] - needed
        assert 0 <= spare <= (0 if mask is FULL else 1 if mask is CAUSAL or not rows.any() else 2)


def test_the_first_release_masks_a_block_more():
    cut = BlockInfo(Problem(seqlen_q=512, causal=True), 128, 128)
    assert cut.kv_blocks(all_tiles(cut), more_masked=1).masked.tolist() == [1, 2, 2, 2]


def test_loops_are_those_of_the_columns_in_the_kernel_s_order():
    some, none = np.array([1]), np.array([0])
    for left, names in ((none, ["masked", "full"]), (some, ["masked", "full", "left"])):
        blocks = KVBlocks(some, some, some, left)
        for ascending, order in ((False, names), (True, names[::-1])):
            columns = blocks.columns(ascending)
            assert list(columns) == [name for name, _ in kv_loops(columns, ascending)] == order
    assert dict(kv_loops(columns)) == {"masked": True, "full": False, "left": True}


def test_blocks_without_the_first_and_without_the_last():
    masked, full, left = np.array([[2, 1, 1], [0, 3, 0], [1, 0, 0], [0, 0, 2]]).T
    blocks = KVBlocks(np.array([9, 9, 0, 9]), masked, full, left)
    rest = blocks.after_first()
    assert [rest.masked.tolist(), rest.full.tolist(), rest.left.tolist()] == [[1, 0, 0, 0], [1, 2, 0, 0], [1, 0, 0, 1]]
    assert rest.lowest.tolist() == blocks.lowest.tolist()
    before, last_masked = blocks.before_last()
    assert (before.visited == blocks.visited - 1).all()
    assert last_masked.tolist() == [1, 0, 1, 1]
    assert (before.last == blocks.last).all()


@given(sq=SMALL, sk=SMALL, mask=MASKS, tile_m=TILE, tile_n=TILE)
def test_q_blocks_agree_with_the_mask(sq, sk, mask, tile_m, tile_n):
    cut = BlockInfo(problem_with(mask, seqlen_q=sq, seqlen_k=sk), tile_m, tile_n)
    m_min, m_max, masked = cut.q_blocks(np.arange(cut.n_blocks))
    seen = by_hand(mask, sq, sk)
    for n in range(cut.n_blocks):
        columns = seen[:, n * tile_n : (n + 1) * tile_n]
        parts = [columns[m : m + tile_m] for m in range(0, sq, tile_m)]
        visited = [m for m, part in enumerate(parts) if part.any()]
        assert visited == list(range(m_min[n], m_max[n]))
        needed = [m for m in visited if not (parts[m].all() and parts[m].shape[1] == tile_n)]
        if needed:
            assert max(needed) < masked[n]
        if not isinstance(mask, Window):
            assert masked[n] - m_min[n] == len(needed)


# --- the grid -------------------------------------------------------------------------------------------------------
def test_orders_of_tiles():
    problem = Problem(batch=2, seqlen_q=256, heads_q=2, causal=True)
    cut = BlockInfo(problem, 128, 128)
    tiles = in_order(cut)
    assert tiles.pair.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert tiles.m_block.tolist() == [0, 1] * 4
    assert in_order(cut, heads_outside=True).pair.tolist() == [0, 0, 2, 2, 1, 1, 3, 3]
    longest = longest_first(cut, section=3)
    assert longest.pair.tolist() == [0, 1, 2, 0, 1, 2, 3, 3]
    assert longest.m_block.tolist() == [1, 1, 1, 0, 0, 0, 1, 0]
    assert longest_first(cut).m_block.tolist() == [1, 0] * 4


def test_splits_of_a_short_tile_that_are_empty_are_no_tiles():
    cut = BlockInfo(Problem(batch=1, seqlen_q=256, heads_q=1, causal=True), 64, 64, num_splits=2)
    tiles = in_order(cut)
    assert list(zip(tiles.split.tolist(), tiles.m_block.tolist(), strict=True)) == [
        *((0, m) for m in range(4)),
        *((1, m) for m in range(1, 4)),
    ]
    assert cut.kv_blocks(tiles).last.tolist() == [0, 0, 1, 1, 1, 2, 3]
    assert cut.partial_line(tiles).tolist() == [0, 2, 4, 6, 3, 5, 7]


@pytest.mark.parametrize("megabytes, heads", [(1, 1), (2, 1), (7, 2), (8, 4), (50, 16)])
def test_key_value_heads_in_l2(megabytes, heads):
    assert kv_heads_in_l2(Problem(seqlen_k=4096), megabytes * 2**20) == heads  # 2 MiB each


def test_lines_of_a_cluster_and_of_column_parts():
    cut = BlockInfo(Problem(batch=1, seqlen_q=256, seqlen_k=512, heads_q=4, heads_kv=2), 128, 128)
    tiles = for_each_cta(in_order(cut), 2)
    assert cluster_rank(tiles, 2).tolist() == [0, 1] * 8
    lines = kv_lines(cut, tiles, np.full(16, 3), cluster=2, column_parts=2)
    assert lines[:2].tolist() == [14, 15]  # block 3 of head 0: lines 12 to 15, from the last part down
    assert lines[-2:].tolist() == [30, 31]


def test_layouts_cover_every_row_once():
    problem = Problem(batch=2, seqlen_q=50, seqlen_k=70, heads_q=4, heads_kv=2, head_dim=8)
    cut = BlockInfo(problem, 32, 16, pack_gqa=True, num_splits=3)
    lines = cut.pairs * cut.m_blocks
    blocks = cut.kv_pairs * cut.n_blocks
    for layout, count, times in (
        (query_layout(cut, 8), lines, 1),
        (query_layout(cut, 8, longest_first(cut, 3), ctas=2, tiles_per_cta=2), 4 * lines, 1),
        (kv_layout(cut, 8, cluster=2), 2 * blocks, 1),
        (key_layout(cut, ctas=2, column_parts=2), 4 * blocks, 2),
        (value_layout(cut, ctas=2, column_parts=2), 4 * blocks, 4),
        (partial_layout(cut), 3 * lines, 1),
    ):
        rows = np.concatenate([layout.region(line, 0).rows for line in range(count)])
        assert (np.bincount(rows[rows >= 0], minlength=layout.rows) == times).all()


# --- a mask that no kernel knows ------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule, chip", [("fa3", "h100"), ("fa2", "h100"), ("fa4", "b200"), ("triton", "h100")])
@pytest.mark.parametrize("window", [100, 400])
def test_a_sliding_window_needs_no_change_of_a_kernel(schedule, chip, window):
    shape = dict(batch=1, seqlen_q=512, seqlen_k=1100, heads_q=1)
    windowed, causal = problem_with(Window(window), **shape), problem_with(CAUSAL, **shape)
    arch, kernel = load_arch(chip), load_schedule(schedule)
    tiles, of_causal = (kernel.build(problem, arch, {})[0].tiles for problem in (windowed, causal))
    names = ("masked", "full", "left", "last_masked", "last_full")
    visited, all_of_causal = (sum(found[name].sum() for name in names if name in found) for found in (tiles, of_causal))
    assert visited < all_of_causal
    assert "left" not in of_causal
    assert window == 100 or "left" in tiles  # wide enough for blocks between the diagonal and the window's other end
    result = check(kernel, windowed, arch, {})
    assert messages(result) == {}
    assert result["passed"]
    out, _ = result["values"]
    assert 0 < out["rmse"] <= 1.05 * out["straightforward_rmse"]
