"""fasim check on FlashAttention-3: right on every shape and knob, and broken copies of it are caught."""

from __future__ import annotations

import pytest
from changes import At, drop, move, redeclare, replace_effect, retarget, together
from mutations import Mutation, caught, messages, run_check

from fasim.program.effects import Mask, Normalise, Rescale, RowMax
from fasim.program.language import Barrier, Tensor

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
        drop(At("consumer", "wait QK", behind="pass turn", which="all")),
        "race",
        "reads register S that consumer0 'QK' (",
    ),
    Mutation(
        "PV not waited for",
        drop(At("consumer", "wait PV", behind="release K", which="all")),
        "race",
        "writes: an MMA in flight, no wait for it",
    ),
    Mutation(
        "V released too early",
        move(At("consumer", "release V", inside="full"), before="wait PV"),
        "race",
        "overwrites V[0] that consumer0 'PV'",
    ),
    Mutation(
        "K not released",
        drop(At("consumer", "release K", inside="full")),
        "deadlock",
        "consumer0 waits for 'K.full[1]' of producer",
    ),
    Mutation(
        "turn passed to itself",
        retarget(At("consumer", "pass turn", which="all"), use={"barrier": "turn@own"}),
        "deadlock",
        "consumer1 waits for 'turn@1', at which no other role",
    ),
    Mutation(
        "V loaded over O",
        drop(At("producer", "wait O.free")),
        "race",
        "writes as V[0], which shares its space",
    ),
    Mutation(
        "O's space free in one CTA of the cluster only",
        together(retarget(At("consumer", "O stored"), scope="cta"), redeclare(Barrier, "O.free", arrivals=1)),
        "race",
        "'store O' of another CTA (",
    ),
    Mutation(
        "no barrier before O lands where V was",
        drop(At("consumer", "epilogue barrier", which="all")),
        "race",
        "overwrites O that consumer1 'PV' (",
    ),
    Mutation(
        "store not waited for",
        drop(At("consumer", "wait O store")),
        "race",
        "no wait until the store has read it",
    ),
    Mutation(
        "no rescale",
        replace_effect(At("consumer", "scale S and O, exp", behind="release V", which="all"), Rescale),
        "scale",
        "a rescale is missing or twice",
    ),
    Mutation(
        "no division by the row sum",
        replace_effect(At("consumer", "scale O"), Normalise, RowMax("S", "lse")),
        "scale",
        "were not divided by their row sum",
    ),
    Mutation(
        "no mask",
        replace_effect(At("consumer", "mask", which="all"), Mask),
        "data",
        "takes in scores that the mask hides",
        (("causal", True),),
    ),
    Mutation(
        "a K block twice",
        redeclare(Tensor, "K", step=0),
        "data",
        "multiplies columns 880 to 1023 with rows 704 to 879: not the same keys",
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_broken_copies_are_caught(mutation):
    caught("fa3", mutation, "h100", seqlen_q=1024)
