"""Execution of a recorded program on NumPy values beside its timing, and the search for races.

:class:`~fasim.values.machine.Machine` observes the reference engine: the very instructions that are timed move data
between global arrays, shared memory, tensor memory and registers. docs/values.md says what is checked and how.
"""

from fasim.values.arrays import Arrays
from fasim.values.findings import Finding, Log
from fasim.values.machine import Machine
from fasim.values.operands import UNCHANGED, Numerics

__all__ = ["UNCHANGED", "Arrays", "Finding", "Log", "Machine", "Numerics"]
