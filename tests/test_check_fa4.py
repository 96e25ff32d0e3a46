"""fasim check on FlashAttention-4: right on every shape and knob of its three kernels, and broken copies are caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from changes import (
    At,
    Change,
    add_effect,
    drop,
    move,
    redeclare,
    replace_effect,
    restage,
    retarget,
    retarget_effect,
    retile,
    together,
)
from mutations import Mutation, caught, messages, run_check

from fasim.program.effects import Mask, Matmul, Move, Normalise, Probabilities, Rescale, RowMax, Store
from fasim.program.language import Kernel, Tensor, TmemRegion

#: Chip, shape, knobs, and the spread of Q: with 8, maxima grow past the threshold of the conditional rescale.
CASES = [
    ("b200", {}, {}, 1),  # pairs of CTAs, two query tiles
    ("b200", {}, {}, 8),
    ("b200", {"causal": True}, {}, 8),
    ("b200", {"seqlen_q": 333, "seqlen_k": 777, "causal": True}, {}, 1),
    ("b200", {"seqlen_q": 777, "seqlen_k": 333, "causal": True}, {}, 1),  # the first queries see no key
    ("b200", {"seqlen_q": 300, "heads_q": 4, "heads_kv": 2, "batch": 2}, {}, 1),  # heads of a group share tiles
    ("b200", {"seqlen_q": 300, "heads_q": 6, "heads_kv": 2, "causal": True}, {}, 1),
    ("b200", {"seqlen_q": 300, "heads_q": 4, "heads_kv": 2}, {"pack_gqa": "off"}, 1),
    ("b200", {"seqlen_q": 1, "seqlen_k": 900, "heads_q": 8, "heads_kv": 1}, {}, 1),
    ("b200", {"head_dim": 64}, {}, 1),
    ("b200", {"head_dim": 96, "causal": True, "dtype": "fp16"}, {}, 1),
    ("b200", {"head_dim": 192, "head_dim_v": 128}, {}, 1),
    ("b200", {"head_dim": 192, "head_dim_v": 128}, {"two_cta": "off"}, 1),  # O takes the place of Q
    ("b200", {"head_dim": 256}, {}, 8),
    ("b200", {"head_dim": 256, "seqlen_q": 333, "seqlen_k": 450, "causal": True}, {}, 1),
    ("b200", {"dtype": "fp8"}, {}, 1),
    ("b200", {"dtype": "fp8", "causal": True}, {}, 8),
    ("b200", {"dtype": "fp4"}, {}, 1),
    ("b200", {}, {"conditional_rescale": "off"}, 8),
    ("b200", {}, {"rescale_threshold": "2", "rescale_rate": "1"}, 8),
    ("b200", {}, {"accumulator": "registers"}, 8),
    ("b200", {}, {"mma_order": "grouped"}, 1),
    ("b200", {}, {"query_tiles": "1", "early_p": "0.25"}, 1),
    ("b200", {}, {"early_p": "1", "two_cta": "off"}, 1),
    ("b200", {"causal": True}, {"scheduler": "clc"}, 1),
    ("b300", {}, {}, 1),  # no emulation, maxima from the load
    ("b300", {"dtype": "fp4", "causal": True}, {}, 1),
    ("h100", {}, {}, 1),
    ("h100", {"seqlen_q": 333, "seqlen_k": 777, "causal": True}, {}, 8),
    ("h100", {"seqlen_q": 300, "heads_q": 4, "heads_kv": 2, "head_dim": 64}, {}, 1),  # three warpgroups
    ("h100", {"head_dim": 96, "dtype": "fp16", "causal": True}, {}, 1),  # P through shared memory
    ("h100", {"head_dim": 192, "head_dim_v": 128}, {}, 1),
    ("h100", {"head_dim": 256, "causal": True}, {}, 1),
]


@pytest.mark.parametrize(("arch", "shape", "knobs", "spread"), CASES)
def test_right_within_rounding(arch, shape, knobs, spread):
    result = run_check("fa4", arch, shape, knobs, spread)
    assert messages(result) == {}
    assert result["passed"]
    out, lse = result["values"]
    assert (out["output"], lse["output"]) == ("O", "LSE")
    assert 0 < out["rmse"] <= (1.2 if spread > 1 else 1.05) * out["straightforward_rmse"]
    assert lse["max_abs"] < 1e-4
    if result["problem"]["dtype"] in ("bf16", "fp16"):
        assert out["max_abs"] < 2e-2


def test_emulated_exponentials_show_in_the_sum_but_not_in_the_output():
    emulated, exact = (run_check("fa4", "b200", {}, {"exp2_emulation": on})["values"] for on in ("on", "off"))
    assert emulated[0]["rmse"] == pytest.approx(exact[0]["rmse"], rel=1e-2)  # P has 8 bits, the cubic 13
    assert emulated[1]["rmse"] > 3 * exact[1]["rmse"]


def test_threshold_changes_rounding_only():
    never, always = (
        run_check("fa4", "b200", {}, {"rescale_threshold": str(threshold)}, spread=8)["values"][0]["rmse"]
        for threshold in (8, 0)
    )
    assert never != always
    assert never < 1.25 * always


def test_a_threshold_too_high_for_fp8_is_seen():
    result = run_check("fa4", "b200", {"dtype": "fp8"}, {"rescale_threshold": "8"}, spread=8)
    assert "values" in messages(result)  # P beyond 1.75 saturates


@pytest.mark.parametrize("knobs", [{}, {"accumulator": "registers"}])
def test_leaving_the_softmax_out_is_no_attention_but_has_no_races(knobs):
    result = run_check("fa4", "b200", {}, {"softmax": "off", **knobs})
    assert result["passed"]
    assert result["values_reason"] == "softmax=off leaves maximum, exponential and sum out"


#: Every block rescales.
ALWAYS = (("rescale_threshold", "0"),)
ALONE = (("two_cta", "off"),)
CAUSAL = (("causal", True),)
D256 = (("head_dim", 256),)


def for_both(change: Callable[[int], Change]) -> Change:
    """The change of one query tile, made to both."""
    return together(change(0), change(1))


#: The second tile multiplies P with K, of which the wait came after that for V.
K_FOR_V = together(
    *(
        retarget_effect(At("mma", "PV", inside="steps", behind=behind), Matmul, b={"back": 0})
        for behind in ("wait P1.ready", "wait P1.last")
    )
)

MUTATIONS = [
    # --- MMAs and tensor memory
    Mutation(
        "S not waited for",
        for_both(lambda tile: drop(At(f"softmax{tile}", "wait S", which="all"))),
        "race",
        "reads S0 that mma 'QK'",
    ),
    Mutation(
        "P released before its part is written",
        for_both(lambda tile: move(At(f"softmax{tile}", f"arrive P{tile}.ready", which="all"), before="exp, P")),
        "race",
        "reads P0 that softmax0 'exp, P' (",
    ),
    Mutation(
        "rest of P not waited for",
        for_both(lambda tile: drop(At("mma", f"wait P{tile}.last", which="all"))),
        "race",
        "reads P0 that softmax0 'exp, P' (",
    ),
    Mutation(
        "QK before the PV whose P it overwrites",
        move(At("mma", "QK", inside="steps", barrier="S1.full"), before="wait P1.ready"),
        "race",
        "writes as P1, which shares its space",
        knobs=ALONE,
    ),
    Mutation(
        "S of one tile over S of the other",
        together(redeclare(TmemRegion, "S1", first=64), redeclare(TmemRegion, "P1", first=64)),
        "race",
        "as S0, which shares its space",
    ),
    Mutation(
        "more columns than there are",
        redeclare(Kernel, "fa4", tmem_columns=640),
        "structure",
        "640 TMEM columns exceed 512",
    ),
    Mutation(
        "O beyond the columns allocated",
        redeclare(TmemRegion, "O1", first=448),
        "structure",
        "region 'O1' of tensor memory ends at column 576, the kernel allocates 512",
    ),
    Mutation(
        "O not committed",
        for_both(lambda tile: drop(At("mma", "commit", barrier=f"O{tile}.full"))),
        "structure",
        "waits for 'O0.full', at which nothing arrives",
    ),
    Mutation(
        "V not released",
        drop(At("mma", "commit", inside="steps", behind="PV", barrier="KV.empty")),
        "deadlock",
        "load waits for 'KV.empty[0]' of mma; mma waits for 'KV.full[0]' of load",
        knobs=ALONE,
    ),
    # --- operands
    Mutation(
        "query tiles swapped",
        for_both(
            lambda tile: retarget_effect(
                At("mma", "QK", barrier=f"S{tile}.full", which="all"), Matmul, a={"stage": 1 - tile}
            )
        ),
        "race",
        "reads Q[1] that load 'load Q' (",
    ),
    Mutation(
        "K in the place of V",
        K_FOR_V,
        "data",
        "not the same keys",
        knobs=ALONE,
    ),
    Mutation(
        "K of a pair in the place of V",
        K_FOR_V,
        "data",
        "Matmul: shapes do not fit",
    ),
    Mutation(
        "one stage of K and V",
        restage(1, "KV", "KV.full", "KV.empty", "KV.peer"),
        "deadlock",
        "load waits for 'KV.empty' of mma; mma waits for 'KV.full' of load",
    ),
    Mutation(
        "operands of the other CTA of a pair not waited for",
        together(drop(At("mma", "wait Q.peer", which="all")), drop(At("mma", "wait KV.peer", which="all"))),
        "race",
        "reads Q[0] that load 'load Q' of another CTA (",
    ),
    Mutation(
        "P of a pair announced in its own CTA only",
        for_both(lambda tile: retarget(At(f"softmax{tile}", f"arrive P{tile}.ready", which="all"), scope="cta")),
        "deadlock",
        "mma waits for 'P0.ready'",
    ),
    Mutation(
        "columns of V swapped in a pair",
        together(retile("kv swapped", lambda tiles: tiles["kv"] ^ 1), redeclare(Tensor, "V", start="kv swapped")),
        "values",
        "all rows are wrong",
    ),
    # --- softmax
    Mutation(
        "no mask",
        for_both(lambda tile: replace_effect(At(f"softmax{tile}", "mask", which="all"), Mask)),
        "data",
        "takes in scores that the mask hides",
        CAUSAL,
    ),
    Mutation(
        "exponentials by a straight line",
        for_both(
            lambda tile: retarget_effect(
                At(f"softmax{tile}", "exp, P", which="all"), Probabilities, method={"coefficients": (1.0, 1.0)}
            )
        ),
        "values",
        "all rows are a little off",
    ),
    Mutation(
        "scale published before the last one was read",
        for_both(
            lambda tile: drop(
                At(f"softmax{tile}", f"wait scale{tile}.empty", behind=f"arrive P{tile}.last", which="all")
            )
        ),
        "race",
        "overwrites scale0 that correction 'vote' (",
    ),
    Mutation(
        "maximum published as the scale",
        for_both(lambda tile: retarget_effect(At(f"softmax{tile}", "scale of O", which="all"), Move, source="m")),
        "scale",
        "applies a correction that starts from another row maximum",
    ),
    Mutation(
        "threshold ignored at the end",
        for_both(lambda tile: add_effect(At(f"softmax{tile}", "publish sum"), RowMax("S"))),
        "scale",
        "divides by a row sum relative to another row maximum",
    ),
    # --- correction and output
    Mutation(
        "no rescale",
        together(
            replace_effect(At("correction", "rescale O", inside="rescaled", which="all"), Rescale),
            replace_effect(At("correction", "vote", inside="kept", which="all"), Rescale),
        ),
        "scale",
        "a rescale is missing or twice",
        knobs=ALWAYS,
    ),
    Mutation(
        "O announced before it is rescaled",
        for_both(lambda tile: move(At("correction", f"arrive P{tile}.ready", inside="rescaled"), before="rescale O")),
        "race",
        "overwrites O0 that correction 'rescale O' (",
        knobs=ALWAYS,
    ),
    Mutation(
        "second tile not corrected",
        together(
            drop(At("correction", "rescale O", inside="rescaled", which=1)),
            *(
                drop(At("correction", label, inside=loop, which=-1))
                for loop in ("rescaled", "kept")
                for label in ("wait scale1.full", "vote", "arrive P1.ready", "arrive scale0.empty")
            ),
        ),
        "deadlock",
        "mma waits for 'P1.ready'",
    ),
    Mutation(
        "scale of O not waited for",
        together(
            *(
                drop(At("correction", f"wait scale{tile}.full", inside=loop))
                for loop in ("rescaled", "kept")
                for tile in (0, 1)
            )
        ),
        "race",
        "overwrites O0 that correction 'vote' (",
    ),
    Mutation(
        "no division by the row sum",
        together(
            replace_effect(At("correction", "normalise O", which="all"), Normalise),
            replace_effect(At("correction", "normalise O", which="all"), Store),
        ),
        "scale",
        "were not divided by their row sum",
    ),
    Mutation(
        "O given back before it was read",
        for_both(
            lambda tile: move(
                At("correction", "O free", inside="tiles", barrier=f"P{tile}.ready"), before=f"wait O{tile}.stored"
            )
        ),
        "race",
        "overwrites O0 that correction 'normalise O' (",
    ),
    Mutation(
        "staged over an O that is being stored",
        for_both(lambda tile: drop(At("correction", f"wait O{tile}.stored"))),
        "race",
        "no wait until the store has read it",
    ),
    Mutation(
        "first O waits for a store",
        for_both(lambda tile: retarget(At("correction", f"wait O{tile}.stored"), use={"ahead": 0})),
        "deadlock",
        "correction waits for 'O0.stored'",
    ),
    Mutation(
        "store of O not waited for",
        drop(At("epilogue", "wait O store")),
        "race",
        "no wait until the store has read it",
    ),
    # --- head dim 256
    Mutation(
        "O rescaled under PV",
        drop(At("correction", "wait PV")),
        "race",
        "overwrites O that mma 'PV' (",
        D256,
    ),
    Mutation(
        "one S for QK a block ahead",
        restage(1, "S", "P", "S.full", "P.ready"),
        "race",
        "overwrites S that softmax 'load S' (",
        D256,
    ),
    Mutation(
        "the same half of Q twice",
        retarget_effect(At("mma", "QK", barrier="S.full", which="all"), Matmul, a={"columns": (0.5, 1.0)}),
        "values",
        "all rows are wrong",
        D256,
    ),
    # --- Hopper
    Mutation(
        "no rescale on Hopper",
        replace_effect(At("consumer", "scale S and O, exp", inside="full", behind="release V"), Rescale),
        "scale",
        "a rescale is missing or twice",
        arch="h100",
    ),
    Mutation(
        "P packed while PV reads it",
        drop(At("consumer", "wait PV", inside="full", behind="release K")),
        "race",
        "overwrites register P that consumer0 'PV' (",
        arch="h100",
    ),
    Mutation(
        "O over a Q that the other warpgroup still reads",
        drop(At("consumer", "Q read", which="all")),
        "race",
        "overwrites O that consumer0 'QK' (",
        (("head_dim", 192), ("head_dim_v", 128)),  # rows of Q are longer than those of O
        arch="h100",
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_broken_copies_are_caught(mutation):
    caught("fa4", mutation, "b200")
