"""The attention problem: what is to be computed."""

from fasim.problem.problem import BACKWARD_FACTOR, DIRECTIONS, DTYPE_BITS, Problem

__all__ = ["BACKWARD_FACTOR", "DIRECTIONS", "DTYPE_BITS", "Problem"]
