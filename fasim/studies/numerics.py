"""What the numeric tricks of attention kernels cost in accuracy, as tables of plain rows.

Errors are against float64 attention: of BF16 inputs for exp2 and rescale, of unrounded ones for quantise and
probabilities. 512 queries attend to ``seqlen`` keys of head dimension 128; every table draws its inputs from
``seed``, so the same arguments give the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fasim import __version__
from fasim.errors import ConfigError, did_you_mean
from fasim.numerics import (
    MINIMAX,
    MUFU,
    Attention,
    Exp2,
    Softmax,
    attention_reference,
    attention_tiled,
    exp2,
    hadamard,
    quantise,
    round_to,
)

SCHEMA_VERSION = 1

#: Largest relative errors of exp2, float32 and after rounding to BF16: FlashAttention-4, arXiv 2603.05451, table 2.
PUBLISHED_EXP2 = {
    "MUFU": (1.41e-7, 3.89e-3),
    "FA4 cubic": (8.77e-5, 3.90e-3),
    "degree 4": (3.05e-6, 3.89e-3),
    "degree 5": (1.44e-7, 3.89e-3),
}

#: RMSE on outlier-laden inputs by (format, scales, rotation): FlashAttention-3, arXiv 2407.08608, table 3.
PUBLISHED_RMSE = {
    ("fp16", "none", False): 1.9e-4,
    ("e4m3", "tensor", False): 2.4e-2,
    ("e4m3", "tensor", True): 9.3e-3,
    ("e4m3", "block", False): 2.4e-2,
    ("e4m3", "block", True): 9.1e-3,
}

_HEAD_DIM = 128
_TILE = 128  # keys per tile, rows per block scale
_WARP = 32  # rows that decide together whether to rescale
_QUERIES = 512  # of all heads together
_HEADS = 4  # of the outlier experiment: a few large keys carry its error, one head would be one draw
_THRESHOLDS = (0.0, 1.0, 2.0, 4.0, 8.0, 12.0)

Float32 = npt.NDArray[np.float32]
Inputs = tuple[Float32, Float32, Float32]


@dataclass(frozen=True)
class Exp2Row:
    """Largest relative error of one way to compute 2^x, -20 <= x <= 0, and its effect on attention.

    ``differs_percent``: share of BF16 results that are not the correctly rounded ones. ``output_rmse``: attention of
    N(0, 1) inputs with P in BF16.
    """

    method: str
    max_error_fp32: float
    max_error_bf16: float
    differs_percent: float
    output_rmse: float
    published_fp32: float | None
    published_bf16: float | None


@dataclass(frozen=True)
class RescaleRow:
    """Rescales that a threshold (log2 units) avoids, in per cent of the KV tiles after a row's first.

    By row, and by warp of 32 rows, which skips only when all of its rows do. ``change_rms``: RMS difference of the
    output to that of threshold 0 with P in float32. ``rmse``: error of the output with P in BF16.
    ``output_rounding_rmse``: error of the exact output rounded to BF16, which a kernel pays in any case.
    """

    inputs: str
    threshold: float
    rows_skipped_percent: float
    warps_skipped_percent: float
    change_rms: float
    rmse: float
    output_rounding_rmse: float


@dataclass(frozen=True)
class QuantiseRow:
    """RMSE of attention with Q, K, V and P in one format, on N(0, 1) entries, 0.1 % of them with N(0, 100) added.

    ``scales``: one per "tensor", one per "block" of 128 rows of a head, "own" blocks of the format, or "none".
    ``rotated``: Q and K times a random Hadamard matrix before rounding. ``gain``: RMSE of the same format with tensor
    (NVFP4: own) scales and no rotation, over this one.
    """

    format: str
    scales: str
    rotated: bool
    rmse: float
    gain: float
    published_rmse: float | None


@dataclass(frozen=True)
class ProbabilityRow:
    """RMSE of attention with P rounded to one format and everything else in float32, N(0, 1) inputs."""

    format: str
    rmse: float


Row = Exp2Row | RescaleRow | QuantiseRow | ProbabilityRow


def exp2_table(seqlen: int, seed: int) -> tuple[Exp2Row, ...]:
    """MUFU, the FlashAttention-4 cubic, our minimax polynomials, and a quarter of the cubic beside MUFU."""
    methods = {"MUFU": MUFU, "FA4 cubic": Exp2(1.0), "25 % FA4 cubic": Exp2(0.25)}
    methods |= {f"degree {degree}": Exp2(1.0, coefficients) for degree, coefficients in MINIMAX.items()}
    x = -np.linspace(0.0, 20.0, 2**18 + 1, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    best_bf16 = round_to(exact, "bf16")
    q, k, v = (round_to(part, "bf16") for part in _normal(np.random.default_rng(seed), seqlen))
    reference = attention_reference(q, k, v)
    rows = []
    for name, method in methods.items():
        value = exp2(x, method)
        bf16 = round_to(value, "bf16")
        output, _ = attention_tiled(q, k, v, Softmax(exp2=method))
        rows.append(
            Exp2Row(
                name,
                float(np.max(np.abs(value / exact - 1))),
                float(np.max(np.abs(bf16 / exact - 1))),
                100.0 * float(np.mean(bf16 != best_bf16)),
                _rmse(output, reference),
                *PUBLISHED_EXP2.get(name, (None, None)),
            )
        )
    return tuple(rows)


def rescale_table(seqlen: int, seed: int) -> tuple[RescaleRow, ...]:
    """Share of skipped rescales by threshold for four kinds of inputs.

    "normal": N(0, 1); "outliers": see :class:`QuantiseRow`; "peaked": queries four times as large;
    "rising": as normal, plus a maximum that rises by about 2 in log2 units from each visited tile to the next.
    """
    kinds = {"normal": _normal, "outliers": _outliers, "peaked": _peaked, "rising": _rising}
    rows = []
    for name, draw in kinds.items():
        q, k, v = (round_to(part, "bf16") for part in draw(np.random.default_rng(seed), seqlen))
        reference = attention_reference(q, k, v)
        stored = Attention(round_to(reference.output, "bf16"), reference.lse)
        classic, _ = attention_tiled(q, k, v, Softmax(p_format="fp32"))
        for threshold in _THRESHOLDS:
            exact, rescaled = attention_tiled(q, k, v, Softmax(threshold=threshold, p_format="fp32"), tile_n=_TILE)
            rounded, _ = attention_tiled(q, k, v, Softmax(threshold=threshold), tile_n=_TILE)
            later = rescaled[1:]  # every row takes its first maximum
            warps = later.reshape(*later.shape[:-1], -1, _WARP).any(axis=-1)
            rows.append(
                RescaleRow(
                    name,
                    threshold,
                    100.0 * float(1 - later.mean()),
                    100.0 * float(1 - warps.mean()),
                    _rmse(exact, classic),
                    _rmse(rounded, reference),
                    _rmse(stored, reference),
                )
            )
    return tuple(rows)


def quantise_table(seqlen: int, seed: int) -> tuple[QuantiseRow, ...]:
    """16-bit formats, E4M3 with tensor and block scales, NVFP4; the last two with and without rotation."""
    rng = np.random.default_rng(seed)
    q, k, v = _outliers(rng, seqlen, _HEADS)
    reference = attention_reference(q, k, v)
    rotation = hadamard(_HEAD_DIM, seed)
    turned = (q @ rotation, k @ rotation)
    cases = [("fp16", "none"), ("bf16", "none"), ("e4m3", "tensor"), ("e4m3", "block"), ("nvfp4", "own")]
    rows: list[QuantiseRow] = []
    plain: dict[str, float] = {}
    for format, scales in cases:
        block = (_TILE, _HEAD_DIM) if scales == "block" else None
        for rotated in (False, True) if scales != "none" else (False,):
            a, b, c = (quantise(part, format, block) for part in (*(turned if rotated else (q, k)), v))
            output, _ = attention_tiled(a, b, c, Softmax(p_format=format))
            rmse = _rmse(output, reference)
            gain = plain.setdefault(format, rmse) / rmse
            published = PUBLISHED_RMSE.get((format, scales, rotated))
            rows.append(QuantiseRow(format, scales, rotated, rmse, gain, published))
    return tuple(rows)


def probability_table(seqlen: int, seed: int) -> tuple[ProbabilityRow, ...]:
    """P in float32, FP16, BF16, E4M3 and NVFP4."""
    q, k, v = _normal(np.random.default_rng(seed), seqlen)
    reference = attention_reference(q, k, v)
    rows = []
    for format in ("fp32", "fp16", "bf16", "e4m3", "nvfp4"):
        output, _ = attention_tiled(q, k, v, Softmax(p_format=format))
        rows.append(ProbabilityRow(format, _rmse(output, reference)))
    return tuple(rows)


#: Tables by the name the command line and the JSON form use.
TABLES: dict[str, Callable[[int, int], Sequence[Row]]] = {
    "exp2": exp2_table,
    "rescale": rescale_table,
    "quantise": quantise_table,
    "probabilities": probability_table,
}


def numerics(
    names: Iterable[str] = (),
    seqlen: int = 8192,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compute the tables called ``names`` (all unless given) in their JSON form.

    Keys: ``schema_version, fasim_version, seqlen, seed`` and ``tables``, which maps each name to a list of rows with
    the fields of the row classes here. ``progress`` is told (done, total) tables.
    Raises ConfigError for an unknown name, fewer than two tiles of keys, or a negative seed.
    """
    chosen = list(dict.fromkeys(names)) or list(TABLES)
    for name in chosen:
        if name not in TABLES:
            raise ConfigError(f"numerics: unknown table '{name}'{did_you_mean(name, TABLES)}")
    if seqlen < 2 * _TILE:
        raise ConfigError(f"numerics: seqlen {seqlen}: expected at least {2 * _TILE}")
    if seed < 0:
        raise ConfigError(f"numerics: seed {seed}: expected 0 or more")
    tables = {}
    for done, name in enumerate(chosen):
        if progress:
            progress(done, len(chosen))
        tables[name] = [asdict(row) for row in TABLES[name](seqlen, seed)]
    head = {"schema_version": SCHEMA_VERSION, "fasim_version": __version__, "seqlen": seqlen, "seed": seed}
    return {**head, "tables": tables}


def _normal(rng: np.random.Generator, seqlen: int, heads: int = 1) -> Inputs:
    """Q ``(heads, _QUERIES / heads, _HEAD_DIM)``, K and V ``(heads, seqlen, _HEAD_DIM)``."""
    q = rng.standard_normal((heads, _QUERIES // heads, _HEAD_DIM), np.float32)
    k = rng.standard_normal((heads, seqlen, _HEAD_DIM), np.float32)
    v = rng.standard_normal((heads, seqlen, _HEAD_DIM), np.float32)
    return q, k, v


def _outliers(rng: np.random.Generator, seqlen: int, heads: int = 1) -> Inputs:
    q, k, v = (
        part + 10 * rng.standard_normal(part.shape, np.float32) * (rng.random(part.shape, np.float32) < 0.001)
        for part in _normal(rng, seqlen, heads)
    )
    return q, k, v


def _peaked(rng: np.random.Generator, seqlen: int) -> Inputs:
    q, k, v = _normal(rng, seqlen)
    return 4 * q, k, v


def _rising(rng: np.random.Generator, seqlen: int) -> Inputs:
    """Tiles are visited from the last to the first, so the slope along the keys is downwards."""
    q, k, v = _normal(rng, seqlen)
    per_tile = 2.0 / np.log2(np.e) * np.sqrt(_HEAD_DIM)  # of the unscaled score
    tile = (seqlen - 1 - np.arange(seqlen)) // _TILE
    q[..., 0] = 8.0
    k[..., 0] += (per_tile / 8.0 * tile).astype(np.float32)
    return q, k, v


def _rmse(result: Attention, reference: Attention) -> float:
    return float(np.sqrt(np.mean((result.output - reference.output) ** 2)))
