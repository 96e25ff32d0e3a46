"""Attention in tiles, with the arithmetic of the kernels, and the float64 reference it is judged against.

Arrays of one head: Q ``(m, d)``, K ``(n, d)``, V ``(n, dv)``, O ``(m, dv)``, log-sum-exp ``(m,)`` in natural units.
More heads may be leading axes. Scores are ``scale_log2`` x Q K^T, so that probabilities are powers of two;
``scale_log2`` is log2(e) x the softmax scale. GEMMs multiply rounded operands and accumulate in float32 (Hopper's FP8
accumulators keep fewer bits, which is left out).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fasim.errors import ConfigError
from fasim.numerics.exp2 import MUFU, Exp2, exp2
from fasim.numerics.formats import Array, Float32, round_probabilities, round_to
from fasim.problem import FULL, Mask

Bool = npt.NDArray[np.bool_]

LOG2_E = float(np.log2(np.e))


class SoftmaxState(NamedTuple):
    """What online softmax carries per query row: maximum (of unscaled scores) and sum ``(m,)``, output ``(m, dv)``."""

    row_max: Float32
    row_sum: Float32
    output: Float32


class Step(NamedTuple):
    """Result of :func:`online_softmax_step`: the next state, and which rows ``(m,)`` were rescaled."""

    state: SoftmaxState
    rescaled: Bool


class Attention(NamedTuple):
    """Output ``(m, dv)`` and log-sum-exp ``(m,)``; a row that sees no key has output 0 and log-sum-exp -inf."""

    output: Array
    lse: Array


@dataclass(frozen=True)
class Softmax:
    """Numeric choices of a kernel's softmax.

    ``exp2``: how exponentials are computed. ``threshold`` (log2 units): the reference maximum stays, and nothing is
    rescaled, until the scaled maximum has grown by more; 0 is the classic rule, FlashAttention-4 uses 8 (16-bit) and
    0 (FP8). ``p_format``: format of P in the second GEMM. ``s_format``: scores are rounded to it, as those that pass
    through memory are; None keeps float32. Raises ConfigError for a negative threshold.
    """

    exp2: Exp2 = MUFU
    threshold: float = 0.0
    p_format: str = "bf16"
    s_format: str | None = None

    def __post_init__(self) -> None:
        if not self.threshold >= 0.0:
            raise ConfigError(f"softmax: threshold {self.threshold!r} is not 0 or more")


def initial_state(shape: tuple[int, ...], head_dim_v: int) -> SoftmaxState:
    """State before the first block, of rows of ``shape`` (``(m,)``, or with leading axes)."""
    zeros = np.zeros(shape, np.float32)
    return SoftmaxState(zeros - np.float32(np.inf), zeros, np.zeros((*shape, head_dim_v), np.float32))


def update_max(
    row_max: Float32, scores: Float32, scale_log2: float, threshold: float = 0.0
) -> tuple[Float32, Float32, Bool]:
    """Next reference maximum, correction factor of sum and output, and which rows moved; each ``(m,)``.

    A row moves when its maximum over ``scores`` ``(m, n)`` exceeds ``row_max`` by more than ``threshold`` in log2
    units; otherwise it keeps its reference and the factor is 1. The first scores a row sees always move it.
    """
    largest = np.maximum(row_max, scores.max(axis=-1))
    with np.errstate(invalid="ignore"):  # -inf - -inf: a row that has seen no key yet, which does not move
        growth = (largest - row_max) * np.float32(scale_log2)
    moved = growth > threshold
    correction = np.where(moved, exp2(np.where(moved, -growth, 0)), np.float32(1.0))
    return np.where(moved, largest, row_max), correction, moved


def probabilities(scores: Float32, row_max: Float32, scale_log2: float, method: Exp2 = MUFU) -> Float32:
    """2^(scale_log2 (scores - row_max)), shape ``(m, n)``; at most 2^threshold of the conditional rescale."""
    scale = np.float32(scale_log2)
    reference = np.where(np.isneginf(row_max), np.float32(0.0), row_max) * scale
    return exp2(scores * scale - reference[..., None], method)


def online_softmax_step(
    state: SoftmaxState, scores: Float32, values: Float32, scale_log2: float, softmax: Softmax
) -> Step:
    """Take in one block: ``scores`` ``(m, n)`` (-inf where masked) and ``values`` ``(n, dv)``.

    The sum is over P before it is rounded, as in the FlashAttention kernels. Milakov and Gimelshein, arXiv 1805.02867;
    with output: FlashAttention-2, arXiv 2307.08691, algorithm 1; conditional rescale: arXiv 2603.05451.
    """
    row_max, correction, moved = update_max(state.row_max, scores, scale_log2, softmax.threshold)
    p = probabilities(scores, row_max, scale_log2, softmax.exp2)
    row_sum = state.row_sum * correction + p.sum(axis=-1)
    output = state.output * correction[..., None] + round_probabilities(p, softmax.p_format) @ values
    return Step(SoftmaxState(row_max, row_sum, output), moved)


def finish(state: SoftmaxState, scale_log2: float) -> Attention:
    """Divide by the sum. Exact whatever reference maximum was kept: it cancels in O and is added back in the LSE."""
    seen = state.row_sum > 0
    row_sum = np.where(seen, state.row_sum, np.float32(1.0))
    reference = np.where(seen, state.row_max, 0) * np.float32(scale_log2 / LOG2_E)
    lse = np.where(seen, reference + np.log(row_sum), np.float32(-np.inf))
    return Attention(state.output / row_sum[..., None], lse.astype(np.float32))


def combine_splits(outputs: Array, lses: Array) -> Attention:
    """Merge attention over disjoint key ranges: ``outputs`` ``(splits, m, dv)`` and ``lses`` ``(splits, m)``.

    Each output is weighted with exp(lse - lse of all), in the type of the arguments (Flash-Decoding's combine).
    """
    largest = np.max(lses, axis=0)
    weights = np.exp(lses - np.where(np.isneginf(largest), 0, largest))
    total = weights.sum(axis=0)
    seen = total > 0
    safe = np.where(seen, total, 1)
    output = (outputs * (weights / safe)[..., None]).sum(axis=0)
    return Attention(output, np.where(seen, largest + np.log(safe), -np.inf).astype(lses.dtype))


def attention_tiled(
    q: Array,
    k: Array,
    v: Array,
    softmax: Softmax = Softmax(),
    *,
    mask: Mask = FULL,
    scale: float | None = None,
    tile_n: int = 128,
    splits: int = 1,
) -> tuple[Attention, Bool]:
    """Attention in float32 over KV tiles of ``tile_n`` keys, last tile first as the FlashAttention kernels go.

    Operands are taken as they are: round or quantise them before. ``scale`` is 1 / sqrt(d) unless given. With
    ``splits`` the tiles are shared out in contiguous ranges that are merged by :func:`combine_splits`.
    Also returns which rows were rescaled for which tile, ``(tiles, ..., m)`` in the order of execution.
    Raises ConfigError for a tile or number of splits below 1, or more splits than tiles.
    """
    n = k.shape[-2]
    tiles = -(-n // tile_n) if tile_n >= 1 else 0
    if not 1 <= splits <= tiles:
        raise ConfigError(f"attention: {splits} splits of {tiles} tiles of {tile_n} of {n} keys")
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    scale_log2 = (q.shape[-1] ** -0.5 if scale is None else scale) * LOG2_E
    visible = mask.matrix(q.shape[-2], n)
    parts, rescaled = [], []
    for share in np.array_split(np.arange(tiles)[::-1], splits):
        state = initial_state(q.shape[:-1], v.shape[-1])
        for tile in share:
            keys = slice(tile * tile_n, (tile + 1) * tile_n)
            products = q @ np.swapaxes(k[..., keys, :], -1, -2)
            if softmax.s_format is not None:
                products = round_to(products, softmax.s_format)
            scores = np.where(visible[:, keys], products, np.float32(-np.inf))
            state, moved = online_softmax_step(state, scores, v[..., keys, :], scale_log2, softmax)
            rescaled.append(moved)
        parts.append(finish(state, scale_log2))
    whole = parts[0]
    if splits > 1:
        whole = combine_splits(np.stack([part.output for part in parts]), np.stack([part.lse for part in parts]))
    return whole, np.stack(rescaled)


def attention_reference(q: Array, k: Array, v: Array, *, mask: Mask = FULL, scale: float | None = None) -> Attention:
    """Attention in float64 over the whole score matrix; arguments as of :func:`attention_tiled`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = (q @ np.swapaxes(k, -1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = np.where(mask.matrix(*scores.shape[-2:]), scores, -np.inf)
    largest = scores.max(axis=-1)
    p = np.exp(scores - np.where(np.isneginf(largest), 0, largest)[..., None])
    total = p.sum(axis=-1)
    seen = total > 0
    safe = np.where(seen, total, 1)
    return Attention((p / safe[..., None]) @ v, np.where(seen, largest + np.log(safe), -np.inf))
