"""fasim check on the mma.sync kernels: right on every shape, and broken copies of them are caught."""

from __future__ import annotations

import pytest
from changes import At, add_effect, drop, move, redeclare, replace_effect, retile, together
from mutations import Mutation, caught, right, run_check

from fasim.program.effects import Mask, Move, Normalise, Rescale, RowMax
from fasim.program.language import Tensor

#: Broken copies of FlashAttention-2.
FA2 = [
    Mutation(
        "K not waited for",
        drop(At("warps", "wait K", which="all")),
        "race",
        "reads K that warps 'load K' (",
    ),
    Mutation(
        "no __syncthreads after the wait for K",
        drop(At("warps", "syncthreads", behind="wait K", which="all")),
        "race",
        "no barrier of the warps between",
    ),
    Mutation(
        "V loaded while the last PV reads it",
        move(At("warps", "syncthreads", behind="wait K", which="all"), after="load V"),
        "race",
        "overwrites V that warps 'PV' (",
    ),
    Mutation(
        "next K loaded before all warps have done QK",
        together(
            move(At("warps", "syncthreads", inside="masked", behind="wait V"), after="load K"),
            move(At("warps", "syncthreads", inside="full", behind="wait V"), after="load K"),
        ),
        "race",
        "overwrites K that warps 'QK' (",
    ),
    Mutation(
        "O read by other warps before it is complete",
        drop(At("warps", "syncthreads", behind="O to SMEM")),
        "race",
        "reads O that warps 'O to SMEM' (",
    ),
    Mutation(
        "V of the block after",
        redeclare(Tensor, "V", step=0),
        "data",
        "not the same keys",
    ),
    Mutation(
        "no mask on the ragged end",
        together(
            retile("full", lambda tiles: tiles["full"] + tiles["masked"]),
            retile("masked", lambda tiles: 0 * tiles["masked"]),
        ),
        "data",
        "takes in scores that the mask hides",
        (("seqlen_q", 300),),
    ),
    Mutation(
        "no rescale",
        replace_effect(At("warps", "rescale O", which="all"), Rescale),
        "scale",
        "a rescale is missing or twice",
    ),
    Mutation(
        "maximum updated before the correction is taken",
        add_effect(At("warps", "scale", which="all"), RowMax("S", "m", "unused")),
        "scale",
        "applies a correction that starts from another row maximum",
    ),
]


SHAPES = [
    ("a100", {}, {}),
    ("a100", {"causal": True, "dtype": "fp16"}, {}),
    ("h100", {"seqlen_q": 333, "seqlen_k": 577, "causal": True}, {}),
    ("a100", {"seqlen_q": 577, "seqlen_k": 333, "causal": True, "heads_q": 1}, {}),  # the first queries see no key
    ("b200", {"seqlen_q": 300, "head_dim": 64, "heads_q": 4, "heads_kv": 2, "batch": 2}, {"build": "pytorch"}),
    ("a100", {"seqlen_q": 100, "head_dim": 80}, {}),  # padded to 96
    ("a100", {"seqlen_q": 200, "seqlen_k": 65, "head_dim": 256}, {}),
]


@pytest.mark.parametrize(("arch", "shape", "knobs"), SHAPES)
def test_fa2_is_right_within_rounding(arch, shape, knobs):
    right(run_check("fa2", arch, shape, knobs))


@pytest.mark.parametrize("mutation", FA2, ids=lambda m: m.name)
def test_broken_copies_of_fa2_are_caught(mutation):
    caught("fa2", mutation, "a100", heads_q=1)


#: Broken copies of FlashAttention-1.
FA1 = [
    Mutation(
        "V lands where other warps still read parts of O",
        drop(At("warps", "syncthreads", behind="wait Q, K and V", which="all")),
        "race",
        "overwrites KV that warps 'sum O' (",
    ),
    Mutation(
        "row maxima read before all warps have written theirs",
        drop(At("warps", "syncthreads", behind="row max", which="all")),
        "race",
        "reads parts that warps 'row max' (",
    ),
    Mutation(
        "next Q stored after the last barrier",
        move(At("warps", "Q to SMEM", inside="steps", which="all"), after="store O"),
        "race",
        "reads Q[1] that warps 'Q to SMEM' (",
    ),
    Mutation(
        "O of earlier blocks not corrected",
        replace_effect(At("warps", "sum O", inside="K/V blocks", which="all"), Rescale),
        "scale",
        "a rescale is missing or twice",
        spread=8,  # their log-sum-exp counts as a maximum, which few scores exceed otherwise
    ),
    Mutation(
        "O of earlier blocks not waited for",
        drop(At("warps", "wait O", which="all")),
        "race",
        "no wait for the copy to land",
    ),
    Mutation(
        "O of earlier blocks not read",
        drop(At("warps", "load O", which="all")),
        "output",
        "writes rows of O partial again a second time",
    ),
    Mutation(
        "no division at the end",
        replace_effect(At("warps", "sum O", which="all"), Normalise, Move("m", "lse")),
        "scale",
        "were not divided by their row sum",
    ),
    Mutation(
        "no mask below the diagonal",
        replace_effect(At("warps", "mask", which="all"), Mask),
        "data",
        "takes in scores that the mask hides",
        (("causal", True),),
    ),
]

FA1_SHAPES = [
    ("a100", {}, {}),
    ("h100", {"causal": True, "dtype": "fp16", "seqlen_q": 400}, {}),
    ("a100", {"seqlen_q": 100, "seqlen_k": 577, "head_dim": 64}, {"num_splits": "1"}),
    ("a100", {"seqlen_q": 333, "head_dim": 80, "causal": True, "batch": 2, "heads_q": 1}, {"num_splits": "3"}),
    ("a100", {"seqlen_q": 200, "seqlen_k": 100, "head_dim": 32}, {}),
]


@pytest.mark.parametrize(("arch", "shape", "knobs"), FA1_SHAPES)
def test_fa1_is_right_within_rounding(arch, shape, knobs):
    right(run_check("fa1", arch, shape, knobs))


@pytest.mark.parametrize("mutation", FA1, ids=lambda m: m.name)
def test_broken_copies_of_fa1_are_caught(mutation):
    caught("fa1", mutation, "a100", heads_q=1)
