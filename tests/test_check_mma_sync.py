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
