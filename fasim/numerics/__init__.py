"""Numerics of attention kernels as small pure functions on NumPy arrays.

:mod:`~fasim.numerics.exp2` has the exponentials, :mod:`~fasim.numerics.formats` the number formats and rotations,
:mod:`~fasim.numerics.attention` online softmax, tiled attention and its float64 reference.
"""

from fasim.numerics.attention import (
    Attention,
    Softmax,
    SoftmaxState,
    Step,
    attention_reference,
    attention_tiled,
    combine_splits,
    finish,
    initial_state,
    online_softmax_step,
    probabilities,
    update_max,
)
from fasim.numerics.exp2 import FA4_CUBIC, MINIMAX, MUFU, Exp2, exp2, exp2_mufu, exp2_polynomial, minimax_exp2
from fasim.numerics.formats import FORMATS, OPERAND_FORMATS, hadamard, quantise, round_probabilities, round_to

__all__ = [
    "FA4_CUBIC",
    "FORMATS",
    "MINIMAX",
    "MUFU",
    "OPERAND_FORMATS",
    "Attention",
    "Exp2",
    "Softmax",
    "SoftmaxState",
    "Step",
    "attention_reference",
    "attention_tiled",
    "combine_splits",
    "exp2",
    "exp2_mufu",
    "exp2_polynomial",
    "finish",
    "hadamard",
    "initial_state",
    "minimax_exp2",
    "online_softmax_step",
    "probabilities",
    "quantise",
    "round_probabilities",
    "round_to",
    "update_max",
]
