"""The attention problem: what is to be computed."""

from fasim.problem.masks import CAUSAL, FULL, Mask
from fasim.problem.problem import BACKWARD_FACTOR, DIRECTIONS, DTYPE_BITS, Problem
from fasim.problem.sequences import Sequences

__all__ = ["BACKWARD_FACTOR", "CAUSAL", "DIRECTIONS", "DTYPE_BITS", "FULL", "Mask", "Problem", "Sequences"]
