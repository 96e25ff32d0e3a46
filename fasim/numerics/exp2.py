"""2^x as attention kernels compute it: by the special function unit (MUFU), or by polynomial on the FMA pipe.

The polynomial path follows Cody and Waite (Software Manual for the Elementary Functions, 1980), as FlashAttention-4
does (arXiv 2603.05451, section 3): x = i + f with i = floor(x) and f in [0, 1); 2^f is a polynomial in float32 by
Horner's rule with FMA; i is added to the exponent bits. x is clamped at -127, where the bits come out as 0: a masked
score (-inf) has probability 0. Results below 2^-126 are only roughly right, which no sum of probabilities can feel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasim.errors import ConfigError
from fasim.numerics.formats import Array, Float32, round_significand

#: Cubic of FlashAttention-4, lowest power first (its source code; the paper prints 1, 0.6951, 0.2276, 0.0771).
FA4_CUBIC = (1.0, 0.69514614, 0.22756439, 0.07711909)

#: Minimax coefficients of 2^f on [0, 1) by degree, lowest power first: output of :func:`minimax_exp2`.
MINIMAX: dict[int, tuple[float, ...]] = {
    1: (1.0, 0.9235568392),
    2: (1.0, 0.6659609408, 0.3299324045),
    3: (1.0, 0.6951167864, 0.2276449912, 0.0770670420),
    4: (1.0, 0.6930448449, 0.2412802048, 0.0522424742, 0.0134266843),
    5: (1.0, 0.6931513118, 0.2401644502, 0.0557999131, 0.0090170303, 0.0018671301),
}

#: Fraction bits of the MUFU model.
_MUFU_BITS = 22

#: Exponent of the smallest normal float32.
_MIN_EXPONENT = -126

_CLAMP = np.float32(-127.0)


@dataclass(frozen=True)
class Exp2:
    """How a row of exponentials is computed: part by polynomial, the rest by MUFU.

    ``fraction`` of the columns, spread evenly over the last axis, use the polynomial with ``coefficients`` (lowest
    power first). FlashAttention-4 emulates 10 to 25 % of a row on B200 (arXiv 2603.05451).
    Raises ConfigError for a fraction outside [0, 1] or fewer than two coefficients.
    """

    fraction: float = 0.0
    coefficients: tuple[float, ...] = FA4_CUBIC

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(f"exp2: fraction {self.fraction!r} is not between 0 and 1")
        if len(self.coefficients) < 2:
            raise ConfigError("exp2: a polynomial needs at least two coefficients")


MUFU = Exp2()


def exp2(x: Array, method: Exp2 = MUFU) -> Float32:
    """2^x for x below 128, any shape, as float32; ``method`` says which columns go to which unit."""
    if method.fraction == 0.0:
        return exp2_mufu(x)
    emulated = exp2_polynomial(x, method.coefficients)
    if method.fraction == 1.0:
        return emulated
    columns = np.floor(np.arange(x.shape[-1] + 1) * method.fraction)
    return np.where(np.diff(columns) > 0, emulated, exp2_mufu(x))


def exp2_mufu(x: Array) -> Float32:
    """Model of MUFU.EX2: the exact value rounded to 22 fraction bits, subnormal results flushed to 0.

    The unit's tables are not public. The model's largest relative error is 2^-23 = 1.2e-7; measured on hardware:
    1.41e-7 (arXiv 2603.05451, table 2); guaranteed for ``ex2.approx.ftz.f32``: 2^-22 (PTX ISA).
    """
    exact = np.exp2(np.asarray(x, np.float32).astype(np.float64))
    rounded = round_significand(exact, _MUFU_BITS, _MIN_EXPONENT)
    return np.where(rounded < 2.0**_MIN_EXPONENT, 0.0, rounded).astype(np.float32)


def exp2_polynomial(x: Array, coefficients: tuple[float, ...] = FA4_CUBIC) -> Float32:
    """2^x in float32 by range reduction and the polynomial with ``coefficients``, lowest power first.

    The value at f = 0 is the first coefficient, which is 1 in all sets here: powers of two are exact.
    """
    clamped = np.maximum(np.asarray(x, np.float32), _CLAMP)
    whole = np.floor(clamped)
    fraction = (clamped - whole).astype(np.float64)
    terms = [np.float64(np.float32(c)) for c in coefficients]
    value = np.full(fraction.shape, terms[-1])
    for term in reversed(terms[:-1]):
        # The product of two float32 is exact in float64, so this rounds once, as an FMA does.
        value = (value * fraction + term).astype(np.float32).astype(np.float64)
    bits = value.astype(np.float32).view(np.int32) + (whole.astype(np.int32) << 23)
    return bits.view(np.float32)


def minimax_exp2(degree: int) -> tuple[float, ...]:
    """Coefficients, lowest power first, that minimise the largest relative error of 2^f on [0, 1] with p(0) = 1.

    Remez exchange: solve for equal errors of alternating sign at ``degree + 1`` points, move each point to the
    largest error of its sign change, repeat until the points stand still.
    """
    f = np.linspace(0.0, 1.0, 20_001)
    points = np.sort(0.5 - 0.5 * np.cos(np.pi * (np.arange(degree + 1) + 1) / (degree + 1)))
    index = np.unique(np.searchsorted(f, points))
    powers = np.arange(1, degree + 1)
    basis = f[:, None] ** powers / np.exp2(f)[:, None]
    target = 1.0 - np.exp2(-f)
    signs = (-1.0) ** np.arange(degree + 1)
    for _ in range(50):
        solution = np.linalg.solve(np.column_stack((basis[index], signs)), target[index])
        error = basis @ solution[:-1] - target
        starts = np.flatnonzero(np.diff(np.sign(error[1:]))) + 2
        pieces = np.split(np.arange(1, len(f)), starts - 1)
        new = np.array([piece[np.argmax(np.abs(error[piece]))] for piece in pieces])
        if np.array_equal(new, index):
            break
        index = new
    return (1.0, *(float(c) for c in solution[:-1]))
