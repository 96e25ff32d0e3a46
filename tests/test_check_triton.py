"""fasim check on the Triton tutorial and on standard attention: right on every shape, and broken copies are caught."""

from __future__ import annotations

import pytest
from changes import At, drop, move, redeclare, replace_effect, restage, retarget, together
from mutations import Mutation, caught, right, run_check

from fasim.program.effects import Mask, Normalise
from fasim.program.language import Buffer, Kernel, Tensor, TmemRegion

SHAPES = [
    ("a100", {"causal": True}, {}),
    ("a100", {"seqlen_q": 577, "seqlen_k": 333, "causal": True, "heads_q": 1}, {"stages": "2"}),
    ("h100", {"causal": True}, {}),
    ("h100", {"seqlen_q": 333, "seqlen_k": 577, "head_dim": 64, "heads_q": 4, "heads_kv": 2}, {}),
    ("h100", {"seqlen_q": 300, "head_dim": 256}, {}),  # more registers than there are: one MMA after the other
    ("h100", {"causal": True, "heads_q": 1}, {"copies": "tma", "longest_first": "on", "tile_m": "64"}),
    ("h100", {"seqlen_q": 400, "head_dim_v": 64}, {"warp_specialize": "on"}),
    ("b200", {"causal": True}, {}),
    ("b200", {"seqlen_q": 333, "seqlen_k": 577, "head_dim": 64, "heads_q": 4, "heads_kv": 2}, {}),
    ("b200", {"causal": True, "dtype": "fp16"}, {"warp_specialize": "off", "stages": "2"}),
    ("h100", {"causal": True, "dtype": "fp8"}, {}),
    ("h100", {"seqlen_q": 300, "dtype": "fp8", "heads_q": 1}, {"warp_specialize": "on"}),
    ("b200", {"causal": True, "dtype": "fp8"}, {}),
]


@pytest.mark.parametrize(("arch", "shape", "knobs"), SHAPES)
def test_triton_is_right_within_rounding(arch, shape, knobs):
    right(run_check("triton", arch, shape, knobs))


#: Broken copies of the Triton tutorial.
TRITON = [
    Mutation(
        "too few buffers for the depth of the pipeline",
        restage(2, "K", "K.full", "V", "V.full"),
        "race",
        "overwrites V[0] that program 'PV' (",
        arch="h100",
    ),
    Mutation(
        "no barrier before the next copies",
        drop(At("program", "barrier", inside="tiles", behind="row sum", which="all")),
        "race",
        "no barrier of the warps between",
        arch="a100",
    ),
    Mutation(
        "no barrier between the loops",
        drop(At("program", "barrier", behind="wait PV", which="all")),
        "race",
        "no barrier of the warps between",
        problem=(("causal", True),),
        arch="h100",
    ),
    Mutation(
        "QK not waited for",
        drop(At("program", "wait QK", which="all")),
        "race",
        "an MMA in flight, no wait for it",
        arch="h100",
    ),
    Mutation(
        "K released before QK is done",
        move(At("program", "release K", which="all"), before="QK"),
        "race",
        "overwrites K[",
        knobs=(("warp_specialize", "on"),),
        arch="h100",
    ),
    Mutation(
        "no sum of the rows",
        drop(At("program", "row sum", which="all")),
        "data",
        "register l: reads what nobody has written",
        knobs=(("warp_specialize", "on"),),
        arch="h100",
    ),
    Mutation(
        "one S for two QK in flight",
        redeclare(TmemRegion, "S", stages=1),
        "race",
        "overwrites S that softmax 'load S' (",
        arch="b200",
    ),
    Mutation(
        "P on top of S",
        redeclare(TmemRegion, "P", first=0),
        "race",
        "which shares its space",
        arch="b200",
    ),
    Mutation(
        "P overwritten while PV reads it",
        drop(At("softmax", "wait P free", which="all")),
        "race",
        "overwrites P that mma 'PV' (",
        arch="b200",
    ),
    Mutation(
        "P announced before it is there",
        move(At("softmax", "arrive P.full", which="all"), before="store P"),
        "race",
        "P that softmax 'store P' (",
        arch="b200",
    ),
    Mutation(
        "wrong phase of the wait for PV",
        retarget(At("correction", "wait PV", which="all"), use={"ahead": 2}),
        "race",
        "overwrites O that mma 'PV' (",
        arch="b200",
    ),
    Mutation(
        "phase that never comes",
        retarget(At("mma", "wait S.free", which="all"), use={"ahead": 0}),
        "deadlock",
        "mma waits for 'S.free' of softmax",
        arch="b200",
    ),
    Mutation(
        "one alpha for two blocks",
        redeclare(Buffer, "alpha", stages=1),
        "race",
        "overwrites alpha that correction 'scale' (",
        arch="b200",
    ),
    Mutation(
        "no barrier before PV is issued",
        drop(At("program", "barrier", behind="rescale O", which="all")),
        "race",
        "reads P that program 'store P' (",
        knobs=(("warp_specialize", "off"),),
        arch="b200",
    ),
    Mutation(
        "three S in tensor memory",
        together(redeclare(TmemRegion, "S", stages=3), redeclare(Kernel, "triton", tmem_columns=1024)),
        "structure",
        "1024 TMEM columns exceed 512",
        arch="b200",
    ),
]


@pytest.mark.parametrize("mutation", TRITON, ids=lambda m: m.name)
def test_broken_copies_of_triton_are_caught(mutation):
    caught("triton", mutation, mutation.arch, heads_q=1)


#: Broken copies of standard attention.
NAIVE = [
    Mutation(
        "stage released while its MMAs run",
        together(
            retarget(At("consumer", "wait MMA", kernel="QK", behind="QK"), pending=2),
            retarget(At("consumer", "wait MMA", kernel="PV", behind="PV"), pending=2),
        ),
        "race",
        "the completion of the MMA was not waited for",
    ),
    Mutation(
        "C overwritten while it is stored",
        drop(At("consumer", "last C stored", which="all")),
        "race",
        "no wait until the store has read it",
        (("seqlen_q", 1024),),
    ),
    Mutation(
        "C stored before both halves are there",
        drop(At("consumer", "C complete", which="all")),
        "race",
        "reads C that consumer0 'C to SMEM' (",
    ),
    Mutation(
        "accumulator free before it has been read",
        move(At("epilogue", "arrive accumulator.empty", which="all"), before="load C"),
        "race",
        "overwrites C[0] that epilogue 'load C' (",
        (("seqlen_q", 1024),),
        arch="b200",
    ),
    Mutation(
        "nothing masked",
        replace_effect(At("warps", "mask"), Mask),
        "data",
        "takes in scores that the mask hides",
        (("causal", True),),
    ),
    Mutation(
        "P not divided",
        replace_effect(At("warps", "normalise"), Normalise),
        "scale",
        "were not divided by their row sum",
    ),
    Mutation(
        "V of the first keys only",
        redeclare(Tensor, "V", step=0),
        "data",
        "not the same keys",
    ),
]

NAIVE_SHAPES = [
    ("a100", {"causal": True}, {}),
    ("h100", {"seqlen_q": 333, "seqlen_k": 577, "head_dim": 64, "heads_q": 4, "heads_kv": 2}, {}),
    ("b200", {"seqlen_q": 577, "seqlen_k": 333, "causal": True, "heads_q": 1}, {}),  # the first queries see no key
    ("h100", {"seqlen_q": 100, "seqlen_k": 2500, "heads_q": 1, "head_dim": 192}, {}),
    ("h100", {"seqlen_q": 512, "seqlen_k": 517, "heads_q": 1}, {}),  # clusters of two GEMMs, half a K tile outside
    ("h100", {"causal": True, "heads_q": 1}, {"framework": "pytorch"}),
    ("h100", {"causal": True, "heads_q": 1, "seqlen_q": 300}, {"framework": "sdpa"}),
]


@pytest.mark.parametrize(("arch", "shape", "knobs"), NAIVE_SHAPES)
def test_naive_is_right_within_rounding(arch, shape, knobs):
    right(run_check("naive", arch, shape, knobs), 1.1)  # P is rounded after its division


def test_scores_in_memory_cost_accuracy():
    """Rounded to 16 bit they nearly double the error."""
    naive, fa2 = (run_check(name, "h100", {}, {})["values"][0]["rmse"] for name in ("naive", "fa2"))
    assert 1.6 < naive / fa2 < 2.1


@pytest.mark.parametrize("mutation", NAIVE, ids=lambda m: m.name)
def test_broken_copies_of_naive_are_caught(mutation):
    caught("naive", mutation, "h100", heads_q=1)
