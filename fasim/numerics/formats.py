"""Number formats of tensor core operands: rounding, scaled quantisation, and rotation against outliers.

All functions return float32 arrays that hold the values a tensor core would see after dequantisation; integer codes
are never formed. Formats: BF16; FP16 (IEEE 754 binary16); E4M3 (the FP8 of the OCP 8-bit Floating Point
Specification 1.0: largest value 448, no infinity); E2M1 (the FP4 of the OCP Microscaling Formats Specification 1.0);
NVFP4 (E2M1 in blocks of 16 with an E4M3 scale each and one FP32 scale per tensor: NVIDIA, arXiv 2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fasim.errors import ConfigError, did_you_mean

Array = npt.NDArray[np.floating]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

#: Exponent field of a float64.
_EXPONENT_BITS = np.int64(0x7FF << 52)


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    ``fraction_bits`` without the implicit one; ``min_exponent`` of the smallest normal number, below which spacing
    is constant. Values that round beyond ``largest`` become infinite, or ``largest`` where conversions saturate
    (``cvt.satfinite`` is what kernels use for FP8 and FP4).
    """

    fraction_bits: int
    min_exponent: int
    largest: float
    saturates: bool


FORMATS = {
    "fp32": Format(23, -126, float(np.finfo(np.float32).max), False),
    "bf16": Format(7, -126, (2 - 2.0**-7) * 2.0**127, False),
    "fp16": Format(10, -14, 65504.0, False),
    "e4m3": Format(3, -6, 448.0, True),
    "e2m1": Format(1, 0, 6.0, True),
}

#: What :func:`quantise` and :func:`round_probabilities` know.
OPERAND_FORMATS = (*FORMATS, "nvfp4")

#: Elements along the last axis that share a scale in NVFP4.
NVFP4_BLOCK = 16

#: FP8 kernels multiply P, which is at most 1, by 2^8 before rounding it (FlashAttention-3 and 4: ``max_offset`` 8).
E4M3_PROBABILITY_SCALE = 256.0


def round_to(x: Array, format: str) -> Float32:
    """``x`` rounded to the nearest value of ``format`` (a key of FORMATS), ties to even; same shape.

    Raises ConfigError for an unknown format.
    """
    if format not in FORMATS:
        raise ConfigError(f"unknown number format '{format}'{did_you_mean(format, FORMATS)}")
    kind = FORMATS[format]
    rounded = round_significand(np.asarray(x, np.float64), kind.fraction_bits, kind.min_exponent)
    limit = kind.largest if kind.saturates else np.inf
    return np.where(np.abs(rounded) > kind.largest, np.copysign(limit, rounded), rounded).astype(np.float32)


def round_significand(x: Float64, fraction_bits: int, min_exponent: int) -> Float64:
    """``x`` rounded to ``fraction_bits`` after the leading bit, ties to even; same spacing below 2^min_exponent."""
    finite = np.clip(x, -(2.0**200), 2.0**200)  # far beyond every format, so that infinity stays out of the sums
    binade = np.maximum((finite.view(np.int64) & _EXPONENT_BITS).view(np.float64), 2.0**min_exponent)
    # The sum's last bit weighs 2^-fraction_bits of the binade, so that adding is rounding.
    anchor = binade * (1.5 * 2.0 ** (52 - fraction_bits))
    rounded: Float64 = (finite + anchor) - anchor
    return rounded


def quantise(x: Array, format: str, block: tuple[int, int] | None = None) -> Float32:
    """``x`` of shape ``(..., rows, columns)`` after a round trip through ``format`` with scales.

    The largest magnitude of each ``block`` (rows, columns; the last ones may be smaller) is mapped to the largest
    value of E4M3 or E2M1; without ``block`` there is one scale for the whole array. The 16-bit formats and fp32 need
    no scale and get none. NVFP4 has its own blocks and an E4M3 scale in each, under one FP32 scale of the array that
    maps its largest magnitude to 6 x 448. Raises ConfigError for an unknown format, a block smaller than 1 x 1, or a
    block given with nvfp4.
    """
    if format not in OPERAND_FORMATS:
        raise ConfigError(f"unknown number format '{format}'{did_you_mean(format, OPERAND_FORMATS)}")
    if format == "nvfp4":
        if block is not None:
            raise ConfigError(f"nvfp4 has blocks of its own (1 x {NVFP4_BLOCK}); leave block {block} out")
        return _nvfp4(x, float(np.max(np.abs(x), initial=0.0)))
    if not FORMATS[format].saturates:
        return round_to(x, format)
    magnitude = np.max(np.abs(x), initial=0.0) if block is None else _block_max(x, block)
    scale = _positive(np.asarray(magnitude, np.float32) / np.float32(FORMATS[format].largest))
    quantised: Float32 = round_to(np.asarray(x, np.float32) / scale, format) * scale
    return quantised


def round_probabilities(p: Array, format: str) -> Float32:
    """``p`` = P of shape ``(..., rows, keys)``, at most 1, as the operand of the second GEMM in ``format``.

    E4M3 uses the fixed scale 2^8, so values above 1.75 saturate: with FP8 the threshold of the conditional rescale
    must be below 1. NVFP4 scales blocks of 16 keys, under the tensor scale that belongs to a largest value of 1.
    Raises ConfigError for an unknown format.
    """
    if format == "nvfp4":
        return _nvfp4(p, 1.0)
    if format == "e4m3":
        scale = np.float32(E4M3_PROBABILITY_SCALE)
        return round_to(np.asarray(p, np.float32) * scale, format) / scale
    return round_to(p, format)


def hadamard(dim: int, seed: int = 0) -> Float32:
    """A random orthogonal matrix M, shape ``(dim, dim)``: random signs, then a Hadamard matrix, over sqrt(dim).

    (Q M)(K M)^T = Q K^T, but an outlier of one component is spread over all of them ("incoherent processing":
    QuIP, arXiv 2307.13304; in attention FlashAttention-3, arXiv 2407.08608, section 3.3).
    Raises ConfigError unless ``dim`` is a power of two.
    """
    if dim < 1 or dim & (dim - 1):
        raise ConfigError(f"hadamard: {dim} is not a power of two")
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), size=dim)
    rotation: Float32 = (signs[:, None] * matrix / np.sqrt(dim)).astype(np.float32)
    return rotation


def _nvfp4(x: Array, largest: float) -> Float32:
    tensor_scale = _positive(np.float32(largest) / np.float32(FORMATS["e2m1"].largest * FORMATS["e4m3"].largest))
    block_max = _block_max(x, (1, NVFP4_BLOCK)) / np.float32(FORMATS["e2m1"].largest)
    # A block whose scale rounds to 0 holds values below the format's range: they become 0.
    scale = round_to(block_max / tensor_scale, "e4m3") * tensor_scale
    quantised: Float32 = round_to(np.asarray(x, np.float32) / _positive(scale), "e2m1") * scale
    return quantised


def _block_max(x: Array, block: tuple[int, int]) -> Float32:
    """Largest magnitude of each block, repeated to the shape of ``x``."""
    if min(block) < 1:
        raise ConfigError(f"quantise: block {block} is smaller than 1 x 1")
    largest = np.abs(np.asarray(x, np.float32))
    for axis, size in zip((-2, -1), block, strict=True):
        length = largest.shape[axis]
        per_block = np.maximum.reduceat(largest, np.arange(0, length, size), axis=axis)
        largest = np.repeat(per_block, size, axis=axis).take(np.arange(length), axis=axis)
    return largest


def _positive(scale: npt.ArrayLike) -> Float32:
    """``scale`` with 1 in the place of 0, so that a block of zeros stays zero."""
    found = np.asarray(scale, np.float32)
    return np.where(found > 0, found, np.float32(1.0))
