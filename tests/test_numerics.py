import inspect
import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasim import cli
from fasim.cli import numerics as cli_numerics
from fasim.errors import ConfigError
from fasim.numerics import (
    FA4_CUBIC,
    MINIMAX,
    Exp2,
    Softmax,
    attention_reference,
    attention_tiled,
    combine_splits,
    exp2,
    exp2_mufu,
    exp2_polynomial,
    finish,
    hadamard,
    initial_state,
    minimax_exp2,
    online_softmax_step,
    quantise,
    round_probabilities,
    round_to,
    update_max,
)
from fasim.problem import CAUSAL, FULL
from fasim.studies import numerics as study
from fasim.views.numerics_plot import plot_numerics

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
UNROUNDED = Softmax(p_format="fp32")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


# Formats


def bit_patterns(count=200_000):
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    values = bits.view(np.float32)
    return values[np.isfinite(values)]


def test_bf16_is_the_upper_half_of_float32_rounded_to_even():
    values = np.concatenate((bit_patterns(), np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, 1e-40], np.float32)))
    bits = values.view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    np.testing.assert_array_equal(round_to(values, "bf16").view(np.uint32), upper)


def test_fp16_is_numpys():
    values = np.concatenate((bit_patterns(), normal(100_000) * 2.0**-15, np.array([65519.9, 65520, -1e9], np.float32)))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(round_to(values, "fp16"), values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(("format", "codes"), [("e2m1", E2M1), ("e4m3", E4M3)])
def test_narrow_formats_take_the_nearest_code_and_saturate(format, codes):
    codes = np.array(codes)
    np.testing.assert_array_equal(round_to(codes, format), codes)
    np.testing.assert_array_equal(round_to(-codes, format), -codes)
    middle = (codes[1:] + codes[:-1]) / 2
    even = np.where(
        np.arange(len(middle)) % 2 == 0, codes[:-1], codes[1:]
    )  # code numbers count in steps of the last bit
    np.testing.assert_array_equal(round_to(middle, format), even)
    np.testing.assert_array_equal(round_to(np.nextafter(middle, np.inf), format), codes[1:])
    np.testing.assert_array_equal(round_to([1e9, np.inf, -np.inf], format), np.array([1, 1, -1]) * codes[-1])


def test_infinity_and_nan_pass_through_16_bit():
    assert np.array_equal(round_to([np.inf, -np.inf, np.nan], "bf16"), [np.inf, -np.inf, np.nan], equal_nan=True)


def test_unknown_format_is_named():
    for call in (round_to, quantise, round_probabilities):
        with pytest.raises(ConfigError, match=r"'bf61'.*did you mean 'bf16'"):
            call(np.ones((2, 2)), "bf61")


def test_block_scales_follow_the_block_and_ragged_ends():
    x = normal(5, 7) * np.array([1, 1, 1e-6, 1e-6, 1e-6])[:, None]
    by_block = quantise(x, "e4m3", (2, 4))
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        for columns in (slice(0, 4), slice(4, 7)):
            np.testing.assert_array_equal(by_block[rows, columns], quantise(x[rows, columns], "e4m3"))
    assert rms((by_block - x)[2:] / x[2:]) < 0.04 < rms((quantise(x, "e4m3") - x)[2:] / x[2:])


def test_the_largest_value_of_a_block_stays_and_zeros_stay_zero():
    x = np.concatenate((normal(2, 32), np.zeros((2, 32), np.float32)))
    for format in ("e4m3", "e2m1", "nvfp4"):
        y = quantise(x, format)
        assert np.abs(y).max() == pytest.approx(np.abs(x).max(), rel=1e-6)
        assert not y[2:].any()


def test_nvfp4_is_e2m1_under_an_e4m3_scale_per_16():
    x = normal(8, 64) * np.exp(3 * normal(8, 64, seed=1))
    scale = np.abs(x).max() / (6 * 448)
    blocks = quantise(x, "nvfp4").reshape(-1, 16)
    originals = x.reshape(-1, 16)
    for block, original in zip(blocks, originals, strict=True):
        block_scale = round_to(np.abs(original).max() / 6 / scale, "e4m3")
        codes = np.abs(block / (block_scale * scale))
        assert np.min(np.abs(codes[:, None] - E2M1), axis=1).max() < 1e-5
    with pytest.raises(ConfigError, match="own"):
        quantise(x, "nvfp4", (1, 32))


def test_probabilities_use_the_range_of_e4m3():
    p = np.array([[1.0, 2.0**-17, 2.0**-18, 1.75, 1.9]])
    np.testing.assert_array_equal(round_probabilities(p, "e4m3"), [[1.0, 2.0**-17, 0.0, 1.75, 1.75]])


def test_hadamard_is_orthogonal_and_spreads_an_outlier():
    rotation = hadamard(64, seed=3)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(64), atol=1e-6)
    np.testing.assert_allclose(np.abs(np.eye(64)[5] @ rotation), 1 / 8, rtol=1e-6)
    assert not np.array_equal(rotation, hadamard(64, seed=4))
    with pytest.raises(ConfigError, match="96"):
        hadamard(96)


# exp2

X = -np.linspace(0, 20, 2**16 + 1, dtype=np.float32)
EXACT = np.exp2(X.astype(np.float64))


def worst(values):
    return float(np.max(np.abs(values / EXACT - 1)))


@pytest.mark.parametrize("degree", MINIMAX)
def test_coefficients_are_those_of_the_function_that_derives_them(degree):
    np.testing.assert_allclose(MINIMAX[degree], minimax_exp2(degree), atol=1e-9)


@pytest.mark.parametrize("degree", MINIMAX)
def test_minimax_error_alternates_at_one_more_point_than_free_coefficients(degree):
    f = np.linspace(0, 1, 50_001)
    error = np.polyval(minimax_exp2(degree)[::-1], f) / np.exp2(f) - 1
    extremes = [part[np.argmax(np.abs(part))] for part in np.split(error, np.flatnonzero(np.diff(np.sign(error))) + 1)]
    alternating = [e for e in extremes if abs(e) > 0.99 * np.abs(error).max()]
    assert len(alternating) == degree + 1
    assert all(a * b < 0 for a, b in pairwise(alternating))


def test_errors_are_the_published_ones():
    """FlashAttention-4, arXiv 2603.05451, table 2; the coefficients of its degrees 4 and 5 are not ours."""
    assert worst(exp2_polynomial(X)) == pytest.approx(8.77e-5, rel=2e-3)
    assert worst(exp2_polynomial(X, MINIMAX[3])) < worst(exp2_polynomial(X))
    assert worst(exp2_polynomial(X, MINIMAX[4])) == pytest.approx(3.05e-6, rel=0.1)
    assert worst(exp2_polynomial(X, MINIMAX[5])) == pytest.approx(1.44e-7, rel=0.2)
    assert 2.0**-23.5 < worst(exp2_mufu(X)) < 1.41e-7


def test_cubic_is_mufu_after_bf16_rounding_and_the_parabola_is_not():
    hardware = round_to(exp2_mufu(X), "bf16")
    cubic, parabola = (round_to(exp2_polynomial(X, c), "bf16") for c in (FA4_CUBIC, MINIMAX[2]))
    assert worst(cubic) == pytest.approx(worst(hardware), rel=0.005)
    assert np.mean(cubic != hardware) < 0.015
    assert np.mean(parabola != hardware) > 0.2


def test_masked_scores_are_zero_and_powers_of_two_exact():
    x = np.array([-np.inf, -127, -126, -3, 0, 8, 127], np.float32)
    expected = [0, 0, *np.exp2(x[2:].astype(np.float64))]
    np.testing.assert_array_equal(exp2_polynomial(x), expected)
    np.testing.assert_array_equal(exp2_mufu(x), expected)


def test_just_below_an_integer_there_is_no_gap():
    x = np.nextafter(np.arange(-20, 0, dtype=np.float32), np.float32(-100))
    np.testing.assert_allclose(exp2_polynomial(x), np.exp2(x), rtol=1e-4)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_a_mix_takes_its_fraction_of_columns_by_polynomial(fraction):
    x = -np.abs(normal(3, 200)) - np.float32(0.01)
    mixed, polynomial, hardware = exp2(x, Exp2(fraction, MINIMAX[1])), exp2_polynomial(x, MINIMAX[1]), exp2_mufu(x)
    assert np.array_equal(mixed == polynomial, mixed != hardware)
    assert np.all((mixed == polynomial).sum(axis=1) == round(200 * fraction))
    spread = (mixed == polynomial)[0].reshape(10, 20).sum(axis=1)
    assert spread.max() - spread.min() <= 1


def test_bad_methods_are_refused():
    for bad in ({"fraction": 1.5}, {"fraction": -0.1}, {"coefficients": (1.0,)}):
        with pytest.raises(ConfigError, match="exp2"):
            Exp2(**bad)
    with pytest.raises(ConfigError, match="threshold"):
        Softmax(threshold=-1.0)


# Attention


@settings(max_examples=40)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 40),
    tile=st.integers(1, 17),
    threshold=st.sampled_from([0.0, 1.0, 8.0]),
    fraction=st.sampled_from([0.0, 0.25]),
    causal=st.booleans(),
    splits=st.integers(1, 3),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_tiles_thresholds_and_splits_do_not_change_the_answer(m, n, tile, threshold, fraction, causal, splits, spread):
    q, k, v = spread * normal(m, 8), normal(n, 8, seed=1), normal(n, 4, seed=2)
    softmax = Softmax(exp2=Exp2(fraction, MINIMAX[5]), threshold=threshold, p_format="fp32")
    splits = min(splits, -(-n // tile))
    mask = CAUSAL if causal else FULL
    (output, lse), rescaled = attention_tiled(q, k, v, softmax, mask=mask, tile_n=tile, splits=splits)
    expected = attention_reference(q, k, v, mask=mask)
    assert rescaled.shape == (-(-n // tile), m)
    np.testing.assert_allclose(output, expected.output, atol=2e-5)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5)
    if causal and m > n:
        assert not output[: m - n].any() and np.isneginf(lse[: m - n]).all()


def test_the_reference_is_softmax():
    q, k, v = normal(2, 4), normal(3, 4, seed=1), normal(3, 2, seed=2)
    weights = np.exp(0.7 * q.astype(float) @ k.T.astype(float))
    output, lse = attention_reference(q, k, v, scale=0.7)
    np.testing.assert_allclose(output, weights @ v / weights.sum(axis=1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(lse, np.log(weights.sum(axis=1)), rtol=1e-12)


def test_the_reference_aligns_the_mask_bottom_right():
    q, k, v = normal(2, 4), normal(3, 4, seed=1), normal(3, 2, seed=2)
    first = attention_reference(q[:1], k[:2], v[:2])
    np.testing.assert_allclose(attention_reference(q, k, v, mask=CAUSAL).output[:1], first.output)


def test_only_growth_beyond_the_threshold_moves_the_reference():
    row_max = np.array([1.0, 1.0, 1.0, -np.inf, -np.inf], np.float32)
    scores = np.array([[3.0, 0], [4.0, 0], [-5.0, 0], [-9.0, -7.0], [-np.inf, -np.inf]], np.float32)
    new, correction, moved = update_max(row_max, scores, scale_log2=2.0, threshold=4.0)
    np.testing.assert_array_equal(new, [1, 4, 1, -7, -np.inf])
    np.testing.assert_array_equal(correction, [1, 2.0**-6, 1, 0, 1])
    np.testing.assert_array_equal(moved, [False, True, False, True, False])


def test_a_step_keeps_sum_and_output_on_the_same_reference():
    softmax = Softmax(threshold=3.0, p_format="fp32")
    state = initial_state((1,), 1)
    for score in (0.0, 2.0, 6.0):  # kept, then moved by 6
        state, _ = online_softmax_step(
            state, np.full((1, 1), score, np.float32), np.ones((1, 1), np.float32), 1.0, softmax
        )
    assert state.row_max[0] == 6.0
    assert state.row_sum[0] == state.output[0, 0] == 1 + 2.0**-4 + 2.0**-6
    assert finish(state, 1.0).lse[0] == pytest.approx(np.log(1 + 2.0**2 + 2.0**6))


def test_the_sum_is_over_probabilities_that_are_not_rounded():
    scores = np.array([[0.0, -1.001, -2.002]], np.float32)
    state, _ = online_softmax_step(initial_state((1,), 1), scores, np.ones((3, 1), np.float32), 1.0, Softmax())
    assert state.row_sum[0] == pytest.approx(np.exp2(scores.astype(np.float64)).sum(), rel=1e-6)
    assert state.output[0, 0] == round_to(exp2(scores), "bf16").sum() != state.row_sum[0]


def test_splits_combine_exactly_in_float64_also_when_one_sees_nothing():
    q, k, v = normal(6, 8), normal(12, 8, seed=1), normal(12, 3, seed=2)
    whole = attention_reference(q, k, v)
    parts = [attention_reference(q, k[part], v[part]) for part in (slice(0, 5), slice(5, 12))]
    nothing = (np.zeros((6, 3)), np.full(6, -np.inf))
    merged = combine_splits(*(np.stack(x) for x in zip(*parts, nothing, strict=True)))
    np.testing.assert_allclose(merged.output, whole.output, rtol=1e-12)
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-12)
    empty = combine_splits(np.zeros((2, 6, 3)), np.full((2, 6), -np.inf))
    assert not empty.output.any() and np.isneginf(empty.lse).all()


def test_rotation_leaves_scores_alone():
    q, k, v = normal(16, 32), normal(64, 32, seed=1), normal(64, 8, seed=2)
    rotation = hadamard(32)
    turned, _ = attention_tiled(q @ rotation, k @ rotation, v, UNROUNDED)
    np.testing.assert_allclose(turned.output, attention_tiled(q, k, v, UNROUNDED)[0].output, atol=1e-6)


def test_a_threshold_with_fp8_probabilities_saturates():
    q, k, v = 4 * normal(64, 64), normal(512, 64, seed=1), normal(512, 16, seed=2)
    exact = attention_reference(q, k, v).output
    errors = [
        rms(attention_tiled(q, k, v, Softmax(threshold=t, p_format="e4m3"))[0].output - exact) for t in (0.0, 8.0)
    ]
    assert errors[1] > 5 * errors[0]


def test_impossible_splits_are_refused():
    x = normal(4, 4)
    for bad in ({"splits": 0}, {"splits": 5, "tile_n": 1}, {"tile_n": 0}):
        with pytest.raises(ConfigError, match="splits"):
            attention_tiled(x, x, x, **bad)


# Tables


@pytest.fixture(scope="module")
def small():
    return study.numerics(seqlen=512, seed=1)


def test_degree_three_is_enough_for_attention_and_degree_one_is_not(small):
    rmse = {row["method"]: row["output_rmse"] for row in small["tables"]["exp2"]}
    for name in ("FA4 cubic", "25 % FA4 cubic", "degree 3", "degree 4", "degree 5"):
        assert rmse[name] == pytest.approx(rmse["MUFU"], rel=0.02)
    assert rmse["degree 1"] > 5 * rmse["MUFU"]


def test_threshold_eight_skips_nearly_all_rescales_and_changes_nothing(small):
    rows = {(row["inputs"], row["threshold"]): row for row in small["tables"]["rescale"]}
    assert rows["normal", 8.0]["warps_skipped_percent"] > 99
    assert rows["normal", 0.0]["warps_skipped_percent"] < 50
    assert rows["outliers", 8.0]["rows_skipped_percent"] > 98
    assert rows["rising", 0.0]["rows_skipped_percent"] < 10 < rows["rising", 1.0]["rows_skipped_percent"] < 40
    for (_, threshold), row in rows.items():
        assert row["change_rms"] < 1e-6
        assert threshold > 8 or row["rmse"] < 1.1 * row["output_rounding_rmse"]
        assert threshold or row["change_rms"] == 0
    shares = [rows["peaked", t]["rows_skipped_percent"] for t in (0.0, 1.0, 2.0, 4.0, 8.0, 12.0)]
    assert shares == sorted(shares)


def test_rotation_gains_what_flash_attention_3_published():
    rows = {(r.format, r.scales, r.rotated): r for r in study.quantise_table(4096, 0)}
    for scales in ("tensor", "block"):
        assert 2 < rows["e4m3", scales, True].gain < 3
    for key, published in study.PUBLISHED_RMSE.items():
        assert rows[key].published_rmse == published
        assert rows[key].rmse == pytest.approx(published, rel=0.35)
    assert rows["fp16", "none", False].rmse < rows["bf16", "none", False].rmse < rows["e4m3", "block", True].rmse
    assert rows["nvfp4", "own", True].rmse < rows["nvfp4", "own", False].rmse


def test_probabilities_lose_more_in_narrower_formats(small):
    rmse = [row["rmse"] for row in small["tables"]["probabilities"]]
    assert rmse == sorted(rmse)
    assert rmse[0] < 1e-6 < 1e-3 < rmse[-1]


def test_same_seed_same_rows(small):
    again = study.numerics(["probabilities"], seqlen=512, seed=1)
    assert again["tables"]["probabilities"] == small["tables"]["probabilities"]
    other = study.numerics(["probabilities"], seqlen=512, seed=2)
    assert other["tables"]["probabilities"] != small["tables"]["probabilities"]


def test_bad_arguments_are_named():
    for arguments, text in (
        ({"names": ["exp"]}, "did you mean 'exp2'"),
        ({"seqlen": 100}, "at least 256"),
        ({"seed": -1}, "seed -1"),
    ):
        with pytest.raises(ConfigError, match=text):
            study.numerics(**arguments)


# Pictures and command


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_every_table_has_a_picture(small, tmp_path, suffix):
    paths = plot_numerics(small, tmp_path / "new" / "figures", suffix)
    assert [path.name for path in paths] == [f"{name}{suffix}" for name in study.TABLES]
    for path in paths:
        assert path.read_bytes()[:4] == (b"\x89PNG" if suffix == ".png" else b"<?xm")


def test_an_svg_has_the_same_bytes_and_names_its_inputs(small, tmp_path):
    one = {**small, "tables": {"quantise": small["tables"]["quantise"]}}
    (first,), (second,) = (plot_numerics(one, tmp_path / name, ".svg") for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert "512 keys, seed 1" in first.read_text()


def test_a_folder_that_cannot_be_made_is_named(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        plot_numerics(small, tmp_path / "file")


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fasim", "numerics", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_command_prints_draws_and_writes_json(monkeypatch, tmp_path, capsys):
    out = tmp_path / "figures"
    code = call(monkeypatch, "probabilities", "--seqlen", "256", "--plot", str(out), "--format", "svg", "--json", "-")
    stdout, stderr = capsys.readouterr()
    assert code == 0
    data = json.loads(stdout)
    assert data["schema_version"] == 1 and list(data["tables"]) == ["probabilities"]
    assert [row["format"] for row in data["tables"]["probabilities"]] == ["fp32", "fp16", "bf16", "e4m3", "nvfp4"]
    assert "nvfp4" in stderr
    assert [path.name for path in out.iterdir()] == ["probabilities.svg"]


def test_command_refuses_an_unknown_table(monkeypatch, capsys):
    assert call(monkeypatch, "rescales") == 2
    assert "did you mean 'rescale'" in capsys.readouterr().err


def test_command_and_study_have_the_same_defaults_and_help_lists_the_tables():
    command, function = inspect.signature(cli_numerics.numerics), inspect.signature(study.numerics)
    for name in ("seqlen", "seed"):
        assert command.parameters[name].default == function.parameters[name].default
    for name in study.TABLES:
        assert f"{name}:" in (cli_numerics.numerics.__doc__ or "")


def test_the_example_in_the_documentation_runs(capsys):
    text = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    rmse, skipped = (float(word) for word in capsys.readouterr().out.split())
    assert 0 < rmse < 0.05 and 0 < skipped < 1
