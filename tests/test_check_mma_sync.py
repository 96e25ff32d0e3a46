"""fasim check on the mma.sync kernels: right on every shape, and broken copies of them are caught."""

from __future__ import annotations

import pytest
from mutations import Mutation, caught, right, run_check

#: Broken copies of FlashAttention-2.
FA2 = [
    Mutation(
        "K not waited for",
        "fa2.py",
        '    w.wait_copies("load", "wait K")\n',
        "",
        "race",
        "reads K that warps 'load K' (",
    ),
    Mutation(
        "no __syncthreads after the wait for K",
        "fa2.py",
        '    w.wait_copies("load", "wait K")\n    _syncthreads(w, cfg, arch)\n',
        '    w.wait_copies("load", "wait K")\n',
        "race",
        "no barrier of the warps between",
    ),
    Mutation(
        "V loaded while the last PV reads it",
        "fa2.py",
        "    _syncthreads(w, cfg, arch)\n    _load(w, cfg, values)\n",
        "    _load(w, cfg, values)\n    _syncthreads(w, cfg, arch)\n",
        "race",
        "overwrites V that warps 'PV' (",
    ),
    Mutation(
        "next K loaded before all warps have done QK",
        "fa2.py",
        '    w.wait_copies("load", "wait V")\n    _syncthreads(w, cfg, arch)\n    if keys is not None:\n'
        "        _load(w, cfg, keys)\n",
        '    w.wait_copies("load", "wait V")\n    if keys is not None:\n        _load(w, cfg, keys)\n'
        "    _syncthreads(w, cfg, arch)\n",
        "race",
        "overwrites K that warps 'QK' (",
    ),
    Mutation(
        "O read by other warps before it is complete",
        "fa2.py",
        "    _syncthreads(w, cfg, arch)\n    rows =",
        "    rows =",
        "race",
        "reads O that warps 'O to SMEM' (",
    ),
    Mutation(
        "V of the block after",
        "fa2.py",
        '2 * n * limit, "kv", -1, block)\n    out',
        '2 * n * limit, "kv", 0, block)\n    out',
        "data",
        "not the same keys",
    ),
    Mutation(
        "no mask on the ragged end",
        "fa2.py",
        "    last_masked = (masked >= trips).astype(np.int64)\n",
        "    masked = masked * problem.causal\n    last_masked = (masked >= trips).astype(np.int64)\n",
        "data",
        "takes in scores that the mask hides",
        (("seqlen_q", 300),),
    ),
    Mutation(
        "no rescale",
        "fa2.py",
        'effects=(Rescale("O"),)',
        "effects=()",
        "scale",
        "a rescale is missing or twice",
    ),
    Mutation(
        "maximum updated before the correction is taken",
        "fa2.py",
        'effects=(RowMax("S"),)',
        'effects=(RowMax("S", "m", "unused"), RowMax("S"))',
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
def test_broken_copies_of_fa2_are_caught(tmp_path, mutation):
    caught("fa2", mutation, "a100", tmp_path)


#: Broken copies of FlashAttention-1.
FA1 = [
    Mutation(
        "V lands where other warps still read parts of O",
        "fa1.py",
        "    if not first:\n        _syncthreads(w, arch)  # the last step's parts of O have been read\n",
        "",
        "race",
        "overwrites KV that warps 'sum O' (",
    ),
    Mutation(
        "row maxima read before all warps have written theirs",
        "fa1.py",
        "effects=row_max)\n    _syncthreads(w, arch)\n",
        "effects=row_max)\n",
        "race",
        "reads parts that warps 'row max' (",
    ),
    Mutation(
        "next Q stored after the last barrier",
        "fa1.py",
        'effects=(Store("O"), Store("lse", array="LSE")))\n',
        'effects=(Store("O"), Store("lse", array="LSE")))\n    if more:\n        _q_to_smem(w, cfg, first)\n',
        "race",
        "reads Q[1] that warps 'Q to SMEM' (",
    ),
    Mutation(
        "O of earlier blocks not corrected",
        "fa1.py",
        '(ResumeOutput("O", "old lse"), Rescale("O"))',
        '(ResumeOutput("O", "old lse"),)',
        "scale",
        "a rescale is missing or twice",
        spread=8,  # their log-sum-exp counts as a maximum, which few scores exceed otherwise
    ),
    Mutation(
        "O of earlier blocks not waited for",
        "fa1.py",
        '        w.wait_copies("load", "wait O")\n',
        "        pass\n",
        "race",
        "no wait for the copy to land",
    ),
    Mutation(
        "O of earlier blocks not read",
        "fa1.py",
        '    if not first:\n        w.copy("load O"',
        '    if False:\n        w.copy("load O"',
        "output",
        "writes rows of O partial again a second time",
    ),
    Mutation(
        "no division at the end",
        "fa1.py",
        ', Normalise("O"))',
        ', Move("m", "lse"))',
        "scale",
        "were not divided by their row sum",
    ),
    Mutation(
        "no mask below the diagonal",
        "fa1.py",
        'effects=(Mask("S"),)',
        "effects=()",
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
def test_broken_copies_of_fa1_are_caught(tmp_path, mutation):
    caught("fa1", mutation, "a100", tmp_path)
