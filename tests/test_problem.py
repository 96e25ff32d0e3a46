import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim.errors import ConfigError
from fasim.problem import Problem

SMALL = st.integers(1, 40)
TILE = st.integers(1, 12)


def mask_of(problem):
    """Visible score elements of one head, ``(seqlen_q, seqlen_k)``."""
    i, j = np.ogrid[: problem.seqlen_q, : problem.seqlen_k]
    seen = j <= i + problem.seqlen_k - problem.seqlen_q
    return seen if problem.causal else np.ones_like(seen)


def test_defaults_follow_the_query_side():
    p = Problem(seqlen_q=512, heads_q=8, head_dim=64)
    assert (p.seqlen_k, p.heads_kv, p.head_dim_v, p.group) == (512, 8, 64, 1)
    assert Problem(heads_q=32, heads_kv=8).group == 4


def test_is_immutable_hashable_and_replaceable():
    p = Problem()
    assert {p: 1}[Problem()] == 1
    assert dataclasses.replace(p, causal=True) == Problem(causal=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.batch = 1


@pytest.mark.parametrize("dtype, bits, size", [("bf16", 16, 2), ("fp16", 16, 2), ("fp8", 8, 1), ("fp4", 4, 0.5)])
def test_element_sizes(dtype, bits, size):
    p = Problem(dtype=dtype)
    assert (p.bits, p.element_bytes, p.output_bytes) == (bits, size, 2)


@pytest.mark.parametrize(
    "shape, flops",
    [
        ({}, 4 * 4 * 16 * 4096**2 * 128),
        ({"causal": True}, 2 * 4 * 16 * 4096**2 * 128),
        ({"direction": "bwd"}, 10 * 4 * 16 * 4096**2 * 128),
        ({"head_dim": 192, "head_dim_v": 128}, 2 * 4 * 16 * 4096**2 * 320),
        ({"batch": 1, "seqlen_q": 1, "seqlen_k": 8, "heads_q": 2, "heads_kv": 1, "head_dim": 4}, 2 * 2 * 8 * 8),
    ],
)
def test_flops_by_convention(shape, flops):
    assert Problem(**shape).flops() == flops


def test_exact_flops_counts_the_triangle():
    # 4 queries of 3 keys, bottom right: rows see 0, 1, 2, 3 keys.
    p = Problem(batch=2, seqlen_q=4, seqlen_k=3, heads_q=1, head_dim=8, causal=True)
    assert p.visible_scores() == 6
    assert p.exact_flops() == 2 * 2 * 6 * 16
    # 2 queries of 5 keys: rows see 4 and 5.
    assert Problem(seqlen_q=2, seqlen_k=5, causal=True).visible_scores() == 9


def test_exact_flops_of_the_backward_pass():
    p = Problem(batch=1, seqlen_q=2, seqlen_k=3, heads_q=1, head_dim=10, head_dim_v=7, direction="bwd")
    assert p.exact_flops() == 2 * 6 * (3 * 10 + 2 * 7)
    square = Problem(direction="bwd")
    assert square.exact_flops() == square.flops()


def test_minimal_hbm_bytes():
    # Q 2x4x8x16, K and V 2x2x6x16 elements, O as Q, 2x4x8 rows of log-sum-exp.
    shape = {"batch": 2, "seqlen_q": 8, "seqlen_k": 6, "heads_q": 4, "heads_kv": 2, "head_dim": 16}
    q, kv, rows = 1024, 384, 64
    assert Problem(**shape).minimal_hbm_bytes() == 2 * (q + 2 * kv) + 2 * q + 4 * rows
    assert Problem(**shape, dtype="fp8").minimal_hbm_bytes() == (q + 2 * kv) + 2 * q + 4 * rows
    assert Problem(**shape, dtype="fp4").minimal_hbm_bytes() == (q + 2 * kv) // 2 + 2 * q + 4 * rows
    gradients = 2 * (q + 2 * kv)
    backward = Problem(**shape, direction="bwd").minimal_hbm_bytes()
    assert backward == 2 * (q + 2 * kv) + 2 * 2 * q + 4 * rows + gradients


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
        ({"seqlen_q": 1024, "seqlen_k": 128, "causal": True}, (0, 128, 128), (0, 0)),
        ({"seqlen_q": 1, "seqlen_k": 256, "causal": True}, (0, 64, 128), (2, 1)),
    ],
)
def test_kv_blocks_by_hand(shape, tile, expected):
    assert Problem(**shape).kv_blocks(*tile) == expected


@given(sq=SMALL, sk=SMALL, causal=st.booleans(), tile_m=TILE, tile_n=TILE)
def test_kv_blocks_agree_with_the_mask(sq, sk, causal, tile_m, tile_n):
    p = Problem(seqlen_q=sq, seqlen_k=sk, causal=causal)
    mask = mask_of(p)
    assert p.visible_scores() == mask.sum()
    for m in range(p.q_tiles(tile_m)):
        row = m * tile_m
        rows = mask[row : row + tile_m]
        assert p.kv_range(row, row + tile_m) == rows.any(axis=0).sum()
        blocks = [rows[:, n : n + tile_n] for n in range(0, sk, tile_n)]
        visited = [b for b in blocks if b.any()]
        needed = sum(not (b.all() and b.shape[1] == tile_n) for b in visited)
        total, masked = p.kv_blocks(m, tile_m, tile_n)
        assert total == len(visited)
        diagonal = row + sk - sq + 1  # keys that the first row sees
        spare = causal and total > 0 and diagonal > 0 and diagonal % tile_n == 0
        assert masked == needed + spare


@given(sq=SMALL, sk=SMALL, causal=st.booleans(), tile_m=TILE, tile_n=TILE)
def test_q_blocks_agree_with_the_mask(sq, sk, causal, tile_m, tile_n):
    p = Problem(seqlen_q=sq, seqlen_k=sk, causal=causal)
    mask = mask_of(p)
    for n in range(p.kv_tiles(tile_n)):
        columns = mask[:, n * tile_n : (n + 1) * tile_n]
        blocks = [columns[m : m + tile_m] for m in range(0, sq, tile_m)]
        visited = [b for b in blocks if b.any()]
        needed = sum(not (b.all() and b.shape[1] == tile_n) for b in visited)
        assert p.q_blocks(n, tile_m, tile_n) == (len(visited), needed)


@pytest.mark.parametrize(
    "shape, message",
    [
        ({"batch": 0}, "batch: expected an integer of at least 1, got 0"),
        ({"seqlen_k": -1}, "seqlen_k: .* got -1"),
        ({"head_dim": 1.5}, "head_dim: .* got 1.5"),
        ({"heads_q": 16, "heads_kv": 3}, "heads_q 16 is not a multiple of heads_kv 3"),
        ({"dtype": "bf15"}, "dtype: unknown value 'bf15'; did you mean 'bf16'"),
        ({"direction": "forward"}, r"direction: unknown value 'forward'.*\(choices: bwd, fwd\)"),
        ({"causal": 1}, "causal: expected true or false, got 1"),
    ],
)
def test_bad_shapes_name_the_key(shape, message):
    with pytest.raises(ConfigError, match=message):
        Problem(**shape)


def test_bad_tiles_are_refused():
    p = Problem(seqlen_q=256)
    with pytest.raises(ValueError, match="query tile 2 of 2"):
        p.kv_blocks(2, 128, 128)
    with pytest.raises(ValueError, match="KV tile -1 of 2"):
        p.q_blocks(-1, 128, 128)
    with pytest.raises(ValueError, match=r"rows \[5, 5\)"):
        p.kv_range(5, 5)


def test_describe():
    assert Problem().describe() == "B4 S4096 H16 d128 bf16 forward"
    p = Problem(1, 1, 8192, 32, 8, 192, 128, causal=True, dtype="fp8", direction="bwd")
    assert p.describe() == "B1 S1/8192 H32/8 d192/128 fp8 causal backward"
