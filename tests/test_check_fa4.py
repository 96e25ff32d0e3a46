"""fasim check on FlashAttention-4: right on every shape and knob of its three kernels, and broken copies are caught."""

from __future__ import annotations

import pytest
from mutations import Mutation, messages, mutate, run_check

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

MUTATIONS = [
    # --- MMAs and tensor memory
    Mutation(
        "S not waited for",
        "_fa4_parts.py",
        '    r.wait_barrier(tile.scores, reason="full", label="wait S", effects=() if c.tmem else scores)\n',
        "",
        "race",
        "reads S0 that mma 'QK'",
    ),
    Mutation(
        "P released before its part is written",
        "_fa4_parts.py",
        "        if part == c.early - 1:\n",
        "        if part == c.early - 2:\n",
        "race",
        "reads P0 that softmax0 'exp, P' (",
    ),
    Mutation(
        "rest of P not waited for",
        "fa4.py",
        '        r.wait_barrier(tile.last, reason="full")\n',
        "",
        "race",
        "reads P0 that softmax0 'exp, P' (",
    ),
    Mutation(
        "QK before the PV whose P it overwrites",
        "fa4.py",
        "                _pv(r, c, tile, v_is_last=tile is tiles[0] or c.grouped)\n",
        "                _qk(r, c, tile)\n                _pv(r, c, tile, v_is_last=tile is tiles[0] or c.grouped)\n",
        "race",
        "writes as P0, which shares its space",
        knobs=ALONE,
    ),
    Mutation(
        "S of one tile over S of the other",
        "_fa4_tile.py",
        "first + ROWS * index, columns",
        "first + ROWS // 2 * index, columns",
        "race",
        "as S0, which shares its space",
    ),
    Mutation(
        "more columns than there are",
        "fa4.py",
        "k.tmem_columns = 512",
        "k.tmem_columns = 640",
        "structure",
        "640 TMEM columns exceed 512",
    ),
    Mutation(
        "O beyond the columns allocated",
        "_fa4_tile.py",
        '("O", 256, c.dv, 1)',
        '("O", 320, c.dv, 1)',
        "structure",
        "region 'O1' of tensor memory ends at column 576, the kernel allocates 512",
    ),
    Mutation(
        "O not committed",
        "fa4.py",
        "            commit(r, c, tile.output)\n",
        "",
        "structure",
        "waits for 'O0.full', at which nothing arrives",
    ),
    Mutation(
        "V not released",
        "fa4.py",
        "                    if tile is tiles[-1]:\n                        commit(r, c, kv_ring.empty)\n",
        "",
        "deadlock",
        "load waits for 'KV.empty[0]' of mma; mma waits for 'KV.full[0]' of load",
        knobs=ALONE,
    ),
    # --- operands
    Mutation(
        "query tiles swapped",
        "_fa4_tile.py",
        'Smem("Q", stage=self.index',
        'Smem("Q", stage=1 - self.index',
        "race",
        "reads Q[1] that load 'load Q' (",
    ),
    Mutation(
        "K in the place of V",
        "fa4.py",
        "back=0 if v_is_last else 1",
        "back=0",
        "data",
        "not the same keys",
        knobs=ALONE,
    ),
    Mutation(
        "K of a pair in the place of V",
        "fa4.py",
        "back=0 if v_is_last else 1",
        "back=0",
        "data",
        "Matmul: shapes do not fit",
    ),
    Mutation(
        "one stage of K and V",
        "fa4.py",
        "stages = max(3, room // stage)",
        "stages = 1",
        "deadlock",
        "load waits for 'KV.empty' of mma; mma waits for 'KV.full' of load",
    ),
    Mutation(
        "operands of the other CTA of a pair not waited for",
        "_fa4_parts.py",
        '        r.wait_barrier(peers[ring.buffer.name], reason="full")\n',
        "",
        "race",
        "reads Q[0] that load 'load Q' of another CTA (",
    ),
    Mutation(
        "P of a pair announced in its own CTA only",
        "_fa4_parts.py",
        "            r.arrive(tile.ready, scope=c.scope)\n        elif",
        "            r.arrive(tile.ready)\n        elif",
        "deadlock",
        "mma waits for 'P0.ready'",
    ),
    Mutation(
        "columns of V swapped in a pair",
        "_fa4_grid.py",
        "        block, part = divmod(line, parts)\n",
        "        block, part = divmod(line ^ 1, parts)\n",
        "values",
        "all rows are wrong",
    ),
    # --- softmax
    Mutation(
        "no mask",
        "_fa4_parts.py",
        'effects=(Mask("S"),)',
        "effects=()",
        "data",
        "takes in scores that the mask hides",
        CAUSAL,
    ),
    Mutation(
        "exponentials by a straight line",
        "_fa4_parts.py",
        "Exp2(2 * pairs / FRAGMENT)",
        "Exp2(2 * pairs / FRAGMENT, (1.0, 1.0))",
        "values",
        "all rows are a little off",
    ),
    Mutation(
        "scale published before the last one was read",
        "_fa4_parts.py",
        '    if c.tmem:\n        r.wait_barrier(tile.read, reason="empty")\n',
        "",
        "race",
        "overwrites scale0 that correction 'vote' (",
    ),
    Mutation(
        "maximum published as the scale",
        "_fa4_parts.py",
        '(Move("alpha", tile.scale),)\n',
        '(Move("m", tile.scale),)\n',
        "scale",
        "applies a correction that starts from another row maximum",
    ),
    Mutation(
        "threshold ignored at the end",
        "_fa4_parts.py",
        '(Move("l", tile.scale), Move("m", tile.row_max)) if c.softmax else ()\n            r.',
        '(RowMax("S"), Move("l", tile.scale), Move("m", tile.row_max)) if c.softmax else ()\n            r.',
        "scale",
        "divides by a row sum relative to another row maximum",
    ),
    # --- correction and output
    Mutation(
        "no rescale",
        "_fa4_parts.py",
        "return tuple(Rescale(tile.o(part)) for part in parts) if c.softmax else ()",
        "return ()",
        "scale",
        "a rescale is missing or twice",
        knobs=ALWAYS,
    ),
    Mutation(
        "O announced before it is rescaled",
        "fa4.py",
        "                        rescale(r, c, correct)\n                    r.arrive(tile.ready, scope=c.scope)\n",
        "                        r.arrive(tile.ready, scope=c.scope)\n                        rescale(r, c, correct)\n"
        "                    else:\n                        r.arrive(tile.ready, scope=c.scope)\n",
        "race",
        "overwrites O0 that correction 'rescale O' (",
        knobs=ALWAYS,
    ),
    Mutation(
        "second tile not corrected",
        "fa4.py",
        "zip(tiles, reversed(tiles), strict=True)",
        "zip(tiles[:1], tiles[1:], strict=True)",
        "deadlock",
        "mma waits for 'P1.ready'",
    ),
    Mutation(
        "scale of O not waited for",
        "fa4.py",
        "                    r.wait_barrier(tile.stats)\n",
        "",
        "race",
        "overwrites O0 that correction 'vote' (",
    ),
    Mutation(
        "no division by the row sum",
        "_fa4_parts.py",
        'divide = (Normalise("O"), Store("lse", "O", array="LSE", line=tile.index)) if c.softmax else ()',
        "divide = ()",
        "scale",
        "were not divided by their row sum",
    ),
    Mutation(
        "O given back before it was read",
        "fa4.py",
        '            store_output(r, c, tile)\n            r.arrive(tile.ready, scope=c.scope, label="O free")\n',
        '            r.arrive(tile.ready, scope=c.scope, label="O free")\n            store_output(r, c, tile)\n',
        "race",
        "overwrites O0 that correction 'normalise O' (",
    ),
    Mutation(
        "staged over an O that is being stored",
        "_fa4_parts.py",
        '    r.wait_barrier(tile.stored, reason="empty", ahead=1)\n',
        "",
        "race",
        "no wait until the store has read it",
    ),
    Mutation(
        "first O waits for a store",
        "_fa4_parts.py",
        '    r.wait_barrier(tile.stored, reason="empty", ahead=1)\n',
        '    r.wait_barrier(tile.stored, reason="empty")\n',
        "deadlock",
        "correction waits for 'O0.stored'",
    ),
    Mutation(
        "store of O not waited for",
        "fa4.py",
        '            r.wait_copies("store", "wait O store")\n',
        "",
        "race",
        "no wait until the store has read it",
    ),
    # --- head dim 256
    Mutation(
        "O rescaled under PV",
        "_fa4_d256.py",
        '                r.wait_barrier(tile.output, reason="full", label="wait PV")\n',
        "",
        "race",
        "overwrites O that mma 'PV' (",
        D256,
    ),
    Mutation(
        "one S for QK a block ahead",
        "_fa4_d256.py",
        "query_tile(k, c, stages=2)",
        "query_tile(k, c)",
        "race",
        "overwrites S that softmax 'load S' (",
        D256,
    ),
    Mutation(
        "the same half of Q twice",
        "_fa4_d256.py",
        "tile.q(half)",
        "tile.q(HALVES[0])",
        "values",
        "all rows are wrong",
        D256,
    ),
]

HOPPER = [
    Mutation(
        "no rescale on Hopper",
        "_fa4_hopper.py",
        "rescale=not c.rescale_early, between=wait_pv)",
        "rescale=False, between=wait_pv)",
        "scale",
        "a rescale is missing or twice",
    ),
    Mutation(
        "P packed while PV reads it",
        "_fa4_hopper.py",
        '        r.wait_mma(0, "wait PV")\n        r.release(v_ring)\n\n    exp_to_p',
        "        r.release(v_ring)\n\n    exp_to_p",
        "race",
        "overwrites register P that consumer0 'PV' (",
    ),
    Mutation(
        "O over a Q that the other warpgroup still reads",
        "_fa4_hopper.py",
        '    r.sync(staged, label="Q read")  # O takes its place\n',
        "",
        "race",
        "overwrites O that consumer0 'QK' (",
        (("head_dim", 192), ("head_dim_v", 128)),  # rows of Q are longer than those of O
    ),
]


@pytest.mark.parametrize("mutation", [*MUTATIONS, *HOPPER], ids=lambda m: m.name)
def test_broken_copies_are_caught(tmp_path, mutation):
    broken = mutate(tmp_path, "fa4", mutation)
    arch = "h100" if mutation in HOPPER else "b200"
    result = run_check(broken, arch, dict(mutation.problem), dict(mutation.knobs))
    found = messages(result)
    assert not result["passed"]
    assert any(mutation.caught in text for text in found.get(mutation.by, ())), found
