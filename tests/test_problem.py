import dataclasses

import pytest

from fasim.errors import ConfigError
from fasim.problem import Problem


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


def test_describe():
    assert Problem().describe() == "B4 S4096 H16 d128 bf16 forward"
    p = Problem(1, 1, 8192, 32, 8, 192, 128, causal=True, dtype="fp8", direction="bwd")
    assert p.describe() == "B1 S1/8192 H32/8 d192/128 fp8 causal backward"
