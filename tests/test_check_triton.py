"""fasim check on the Triton tutorial and on standard attention: right on every shape, and broken copies are caught."""

from __future__ import annotations

import pytest
from mutations import Mutation, caught, right, run_check

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
        "triton.py",
        'buffers = cfg.stages - (cfg.arch.architecture == "ampere")',
        "buffers = cfg.stages - 1",
        "race",
        "overwrites V[0] that program 'PV' (",
        arch="h100",
    ),
    Mutation(
        "no barrier before the next copies",
        "triton.py",
        "                    if ahead:\n                        barrier(c, cfg)\n",
        "                    if ahead:\n",
        "race",
        "no barrier of the warps between",
        arch="a100",
    ),
    Mutation(
        "no barrier between the loops",
        "triton.py",
        "            barrier(c, cfg)  # all are done",
        "            pass  # all are done",
        "race",
        "no barrier of the warps between",
        problem=(("causal", True),),
        arch="h100",
    ),
    Mutation(
        "QK not waited for",
        "triton.py",
        '    c.wait_mma(0, "wait QK")\n',
        "",
        "race",
        "an MMA in flight, no wait for it",
        arch="h100",
    ),
    Mutation(
        "K released before QK is done",
        "triton.py",
        "                _qk(c, cfg)\n                c.release(k_ring)\n",
        "                c.release(k_ring)\n                _qk(c, cfg)\n",
        "race",
        "overwrites K[",
        knobs=(("warp_specialize", "on"),),
        arch="h100",
    ),
    Mutation(
        "no sum of the rows",
        "triton.py",
        "                _row_sum(c, cfg)\n                c.wait_mma",
        "                c.wait_mma",
        "data",
        "register l: reads what nobody has written",
        knobs=(("warp_specialize", "on"),),
        arch="h100",
    ),
    Mutation(
        "one S for two QK in flight",
        "_triton_blackwell.py",
        "    _tmem(k, cfg, 2)\n",
        "    _tmem(k, cfg, 1)\n",
        "race",
        "overwrites S that softmax 'load S' (",
        arch="b200",
    ),
    Mutation(
        "P on top of S",
        "_triton_blackwell.py",
        'k.region("P", s.stages * s.columns, ',
        'k.region("P", 0, ',
        "race",
        "which shares its space",
        arch="b200",
    ),
    Mutation(
        "P overwritten while PV reads it",
        "_triton_blackwell.py",
        '            s.wait_barrier(pv_done, reason="empty", ahead=1, label="wait P free")\n',
        "",
        "race",
        "overwrites P that mma 'PV' (",
        arch="b200",
    ),
    Mutation(
        "P announced before it is there",
        "_triton_blackwell.py",
        "            _p_to_tmem(s, cfg)\n            s.arrive(p_full)\n",
        "            s.arrive(p_full)\n            _p_to_tmem(s, cfg)\n",
        "race",
        "P that softmax 'store P' (",
        arch="b200",
    ),
    Mutation(
        "wrong phase of the wait for PV",
        "_triton_blackwell.py",
        '            c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")\n            _rescale',
        '            c.wait_barrier(pv_done, reason="dependency", ahead=2, label="wait PV")\n            _rescale',
        "race",
        "overwrites O that mma 'PV' (",
        arch="b200",
    ),
    Mutation(
        "phase that never comes",
        "_triton_blackwell.py",
        't.wait_barrier(s_free, reason="empty", ahead=2)',
        't.wait_barrier(s_free, reason="empty", ahead=0)',
        "deadlock",
        "mma waits for 'S.free' of softmax",
        arch="b200",
    ),
    Mutation(
        "one alpha for two blocks",
        "_triton_blackwell.py",
        'k.smem("alpha", 4 * cfg.m, 2)',
        'k.smem("alpha", 4 * cfg.m)',
        "race",
        "overwrites alpha that correction 'scale' (",
        arch="b200",
    ),
    Mutation(
        "no barrier before PV is issued",
        "_triton_blackwell.py",
        '                    barrier(c, cfg)\n                    _tcgen05(c, cfg, "PV"',
        '                    _tcgen05(c, cfg, "PV"',
        "race",
        "reads P that program 'store P' (",
        knobs=(("warp_specialize", "off"),),
        arch="b200",
    ),
    Mutation(
        "three S in tensor memory",
        "_triton_blackwell.py",
        "    _tmem(k, cfg, 2)\n",
        "    _tmem(k, cfg, 3)\n",
        "structure",
        "1024 TMEM columns exceed 512",
        arch="b200",
    ),
]


@pytest.mark.parametrize("mutation", TRITON, ids=lambda m: m.name)
def test_broken_copies_of_triton_are_caught(tmp_path, mutation):
    caught("triton", mutation, mutation.arch, tmp_path)


#: Broken copies of standard attention.
NAIVE = [
    Mutation(
        "stage released while its MMAs run",
        "_naive_gemm.py",
        "        role.wait_mma(1)\n",
        "        role.wait_mma(2)\n",
        "race",
        "the completion of the MMA was not waited for",
    ),
    Mutation(
        "C overwritten while it is stored",
        "_naive_gemm.py",
        '            w.sync(barrier, label="last C stored")\n',
        "",
        "race",
        "no wait until the store has read it",
        (("seqlen_q", 1024),),
    ),
    Mutation(
        "C stored before both halves are there",
        "_naive_gemm.py",
        '            w.sync(barrier, label="C complete")\n',
        "",
        "race",
        "reads C that consumer0 'C to SMEM' (",
    ),
    Mutation(
        "accumulator free before it has been read",
        "_naive_gemm.py",
        '        nbytes, load = 4 * TILE_M * g.tile_n, (Move(Tmem("C",',
        '        w.arrive(empty)\n        nbytes, load = 4 * TILE_M * g.tile_n, (Move(Tmem("C",',
        "race",
        "overwrites C[0] that epilogue 'load C' (",
        (("seqlen_q", 1024),),
        arch="b200",
    ),
    Mutation(
        "nothing masked",
        "naive.py",
        'effects=(Mask("x"),)',
        "effects=()",
        "data",
        "takes in scores that the mask hides",
        (("causal", True),),
    ),
    Mutation(
        "P not divided",
        "_naive_rows.py",
        '(Normalise("S"),)',
        "()",
        "scale",
        "were not divided by their row sum",
    ),
    Mutation(
        "V of the first keys only",
        "_naive_gemm.py",
        'b = k.tensor(g.b, b_lines, b_bytes // g.cluster, "b", g.cluster,',
        'b = k.tensor(g.b, b_lines, b_bytes // g.cluster, "b", g.cluster if g.c_lines else 0,',
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
def test_broken_copies_of_naive_are_caught(tmp_path, mutation):
    caught("naive", mutation, "h100", tmp_path)
