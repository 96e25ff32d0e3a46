"""Execution of a recorded program on NumPy values beside its timing, and the search for races.

:class:`~fasim.checker.machine.ValueMachine` observes the reference engine: the very instructions that are timed move
data between global arrays, shared memory, tensor memory and registers. docs/values.md says what is checked and how.
"""

from fasim.checker.arrays import Arrays
from fasim.checker.machine import ValueMachine
from fasim.checker.operands import UNCHANGED, Numerics
from fasim.results.findings import Finding, Log

__all__ = ["UNCHANGED", "Arrays", "Finding", "Log", "Numerics", "ValueMachine"]
