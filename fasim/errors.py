"""Errors with the exit code the command line turns them into.

0 is success, 1 a model error (the schedule cannot run on the chip), 2 a usage or
configuration error (bad input), 3 a comparison or validation out of tolerance.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FasimError(Exception):
    """Base of every error fasim raises on purpose. ``exit_code`` is the process exit code."""

    exit_code = 2


class ConfigError(FasimError):
    """Bad input: an unknown name, key or value, or a file that cannot be read or written."""


class ModelError(FasimError):
    """The program is well formed but cannot run on this machine."""

    exit_code = 1


class BudgetError(ModelError):
    """A tile, role or buffer needs more than the SM has (SMEM, TMEM, registers, threads)."""


class DeadlockError(ModelError):
    """Nothing is left to do but roles have not finished."""


class ToleranceError(FasimError):
    """A comparison or validation is outside the tolerance that was asked for."""

    exit_code = 3


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Text that lists ``choices`` and, when one is close to ``name``, suggests it."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"{hint} (choices: {', '.join(known)})"
