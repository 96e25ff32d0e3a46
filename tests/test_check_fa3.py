"""fasim check on FlashAttention-3: right on every shape and knob, and broken copies of it are caught."""

from __future__ import annotations

import pytest
from mutations import Mutation, messages, mutate, run_check

SHAPES = [
    ({}, {}),
    ({"causal": True}, {}),
    ({"seqlen_q": 333, "seqlen_k": 777, "causal": True}, {}),
    ({"seqlen_q": 777, "seqlen_k": 333, "causal": True}, {}),  # the first queries see no key
    ({"seqlen_q": 300, "heads_q": 4, "heads_kv": 2, "batch": 2}, {}),
    ({"seqlen_q": 70, "heads_q": 8, "heads_kv": 2}, {}),  # heads of a group share tiles
    ({"head_dim": 64}, {}),  # P through shared memory, three warpgroups
    ({"head_dim": 64, "causal": True, "dtype": "fp16"}, {}),
    ({"head_dim": 96}, {}),
    ({"head_dim": 192, "head_dim_v": 128}, {}),  # O is rescaled before PV
    ({"head_dim": 256, "causal": True}, {}),
    ({"dtype": "fp8"}, {}),
    ({"dtype": "fp8", "head_dim": 256, "causal": True}, {"two_level": "on"}),
    ({"dtype": "fp8"}, {"two_level": "on", "overlap": "off"}),
    ({}, {"overlap": "off"}),
    ({}, {"overlap": "off", "pingpong": "off", "cluster": "1"}),
    ({}, {"pingpong": "off", "stages": "1"}),
    ({}, {"p_in_registers": "off", "tile_n": "128"}),
    ({}, {"persistent": "off", "cluster": "1"}),
    ({"seqlen_q": 4, "seqlen_k": 2048, "heads_q": 8, "heads_kv": 2}, {"splits": "0"}),
    ({"seqlen_q": 200, "seqlen_k": 700, "causal": True}, {"splits": "3"}),
    ({"seqlen_q": 1, "seqlen_k": 700, "heads_q": 4, "heads_kv": 1, "dtype": "fp8"}, {"splits": "2"}),
]


@pytest.mark.parametrize(("shape", "knobs"), SHAPES)
def test_right_within_rounding(shape, knobs):
    result = run_check("fa3", "h100", shape, knobs)
    assert messages(result) == {}
    assert result["passed"]
    out, lse = result["values"]
    assert (out["output"], lse["output"]) == ("O", "LSE")
    assert 0 < out["rmse"] <= 1.05 * out["straightforward_rmse"]
    assert lse["max_abs"] < 2e-6
    if shape.get("dtype") != "fp8":
        assert out["max_abs"] < 2e-2


def test_two_level_fp8_differs_from_one_level_in_rounding_only():
    one, two = (run_check("fa3", "h100", {"dtype": "fp8"}, {"two_level": on}) for on in ("off", "on"))
    assert one["values"][0]["rmse"] == pytest.approx(two["values"][0]["rmse"], rel=1e-3)


def test_leaving_the_exponential_out_is_no_attention_but_has_no_races():
    result = run_check("fa3", "h100", {}, {"exp": "off"})
    assert result["passed"]
    assert result["values"] is None
    assert result["values_reason"] == "exp=off leaves the exponential out"


MUTATIONS = [
    Mutation(
        "QK not waited for",
        "fa3.py",
        '    c.wait_mma(1, "wait QK")\n',
        "",
        "race",
        "reads register S that consumer0 'QK' (",
    ),
    Mutation(
        "PV not waited for",
        "fa3.py",
        '        c.wait_mma(0, "wait PV")\n        c.release(v_ring)\n\n    softmax',
        "        c.release(v_ring)\n\n    softmax",
        "race",
        "writes: an MMA in flight, no wait for it",
    ),
    Mutation(
        "V released too early",
        "fa3.py",
        '        c.wait_mma(0, "wait PV")\n        c.release(v_ring)\n\n    softmax',
        '        c.release(v_ring)\n        c.wait_mma(0, "wait PV")\n\n    softmax',
        "race",
        "overwrites V[0] that consumer0 'PV'",
    ),
    Mutation(
        "K not released",
        "fa3.py",
        '        c.release(k_ring)\n        c.wait_mma(0, "wait PV")\n',
        '        c.wait_mma(0, "wait PV")\n',
        "deadlock",
        "consumer0 waits for 'K.full[1]' of producer",
    ),
    Mutation(
        "turn passed to itself",
        "fa3.py",
        '        c.arrive(turn, "next", label="pass turn")\n    c.wait_mma(1',
        '        c.arrive(turn, "own", label="pass turn")\n    c.wait_mma(1',
        "deadlock",
        "consumer1 waits for 'turn@1', at which no other role",
    ),
    Mutation(
        "V loaded over O",
        "fa3.py",
        '            p.wait_barrier(o_free, reason="empty", ahead=1)\n',
        "",
        "race",
        "writes as V[0], which shares its space",
    ),
    Mutation(
        "O's space free in one CTA of the cluster only",
        "_fa3_parts.py",
        '        c.arrive(o_free, scope="cluster", label="O stored")\n',
        '        c.arrive(o_free, label="O stored")\n        c.arrive(o_free, label="O stored")\n',
        "race",
        "'store O' of another CTA (",
    ),
    Mutation(
        "no barrier before O lands where V was",
        "_fa3_parts.py",
        '        c.sync(epilogue, label="epilogue barrier")',
        "        pass",
        "race",
        "overwrites O that consumer1 'PV' (",
    ),
    Mutation(
        "store not waited for",
        "_fa3_parts.py",
        '            c.wait_copies("store", "wait O store")',
        "            pass",
        "race",
        "no wait until the store has read it",
    ),
    Mutation(
        "no rescale",
        "_fa3_parts.py",
        '    on_o += (Rescale("O"),) if rescale else ()\n',
        "",
        "scale",
        "a rescale is missing or twice",
    ),
    Mutation(
        "no division by the row sum",
        "_fa3_parts.py",
        '    effects += (Normalise("O"),)\n',
        '    effects += (RowMax("S", "lse"),)\n',
        "scale",
        "were not divided by their row sum",
    ),
    Mutation(
        "no mask",
        "_fa3_parts.py",
        'effects=(Mask("S"),)',
        "effects=()",
        "data",
        "takes in scores that the mask hides",
        (("causal", True),),
    ),
    Mutation(
        "a K block twice",
        "fa3.py",
        'kv_rows * d // cluster, "kv", -cluster, keys)',
        'kv_rows * d // cluster, "kv", 0, keys)',
        "data",
        "multiplies columns 880 to 1023 with rows 704 to 879: not the same keys",
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_broken_copies_are_caught(tmp_path, mutation):
    broken = mutate(tmp_path, "fa3", mutation)
    result = run_check(broken, "h100", {"seqlen_q": 1024, **dict(mutation.problem)}, dict(mutation.knobs))
    found = messages(result)
    assert not result["passed"]
    assert any(mutation.caught in text for text in found[mutation.by]), found
