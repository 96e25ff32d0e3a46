"""The result of a validation: rows with their errors, and summaries of them.

Errors are signed fractions of the measurement: ``predicted / measured - 1``, so -0.05 is 5 % too fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fasim import __version__

SCHEMA_VERSION = 1

#: Below this a launch is mostly ramp and latency, so its error says little about the schedule.
SHORT_US = 30.0

#: What a row has besides the columns of the CSV.
RESULT = ("predicted_cycles", "measured_cycles", "error", "compared", "clock_mhz", "bottleneck", "short", "reason")

#: The columns of a shape, in the words of the CSV.
SHAPE = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")

_GROUP = ("kernel", "dtype", "direction", "head_dim")


@dataclass(frozen=True)
class Row:
    """A measurement and its prediction. ``columns`` is the row of the CSV as text.

    ``compared`` is ``cycles`` or ``time``; ``short`` marks kernels below ``SHORT_US``. Without a prediction
    ``reason`` says why and the other results are None.
    """

    columns: Mapping[str, str]
    short: bool
    predicted_cycles: float | None = None
    measured_cycles: float | None = None
    error: float | None = None
    compared: str | None = None
    clock_mhz: float | None = None
    bottleneck: str | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The input columns, numbers as numbers and empty cells as None, then the results."""
        inputs = {name: _plain(text) for name, text in self.columns.items()}
        return {**inputs, **{name: getattr(self, name) for name in RESULT}}


@dataclass(frozen=True)
class Summary:
    """Errors of ``n`` rows as fractions: mean absolute, largest absolute, and mean signed."""

    n: int
    mape: float
    max: float
    bias: float

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Summary | None:
        """Summarise the predicted rows among ``rows``; None when there are none."""
        errors = [row.error for row in rows if row.error is not None]
        return cls.of_errors(errors) if errors else None

    @classmethod
    def of_errors(cls, errors: Sequence[float]) -> Summary:
        """Summarise signed errors as fractions, at least one."""
        sizes = [abs(error) for error in errors]
        return cls(len(errors), math.fsum(sizes) / len(sizes), max(sizes), math.fsum(errors) / len(errors))


@dataclass(frozen=True)
class SwitchEffect:
    """What a variant changes against the default variant of the same shape, as fractions of the default's cycles."""

    variant: str
    row: Row
    measured: float
    predicted: float

    @property
    def sign_right(self) -> bool:
        """Whether the prediction has the sign of the measurement; predicting no effect has not."""
        return self.measured * self.predicted > 0


@dataclass(frozen=True)
class Validation:
    """The result of :func:`validate`."""

    data: str
    data_sha256: str
    engine: str
    overrides: tuple[str, ...]
    rows: tuple[Row, ...]
    knob_columns: tuple[str, ...]
    carried_columns: tuple[str, ...]
    effects: tuple[SwitchEffect, ...] | None = None

    def groups(self) -> dict[tuple[str, ...], Summary]:
        """Summary by (kernel, dtype, direction, head_dim), in the order of the file; short kernels included."""
        return self._summaries(lambda row: tuple(row.columns[name] for name in _GROUP))

    def chips(self) -> dict[tuple[str, ...], Summary]:
        """Summary by (arch, kernel, what was compared), which a file of several chips must not mix."""
        return self._summaries(lambda row: (row.columns["arch"], row.columns["kernel"], row.compared or ""))

    def totals(self) -> dict[str, Summary]:
        """Summary of all predicted rows, of kernels from ``SHORT_US`` on, and of shorter ones."""
        parts = {
            "all": Summary.of(self.rows),
            "long": Summary.of(row for row in self.rows if not row.short),
            "short": Summary.of(row for row in self.rows if row.short),
        }
        return {name: summary for name, summary in parts.items() if summary is not None}

    def failures(self, tolerance: float) -> list[str]:
        """Groups whose mean absolute error is above ``tolerance`` (a fraction), or that nothing was predicted."""
        groups = self.groups()
        if not groups:
            return ["no row could be predicted"]
        return [f"{' '.join(key)} {100 * s.mape:.1f} %" for key, s in groups.items() if s.mape > tolerance]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Errors and effects are fractions."""
        data: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "fasim_version": __version__,
            "data": self.data,
            "data_sha256": self.data_sha256,
            "engine": self.engine,
            "overrides": list(self.overrides),
            "error_unit": "fraction",
            "short_us": SHORT_US,
            "knob_columns": list(self.knob_columns),
            "carried_columns": list(self.carried_columns),
            "rows": [row.to_dict() for row in self.rows],
            "groups": [
                {**{name: _plain(text) for name, text in zip(_GROUP, key, strict=True)}, **vars(summary)}
                for key, summary in self.groups().items()
            ],
            "chips": [
                {"arch": k[0], "kernel": k[1], "compared": k[2], **vars(summary)} for k, summary in self.chips().items()
            ],
            "totals": {name: vars(summary) for name, summary in self.totals().items()},
        }
        if self.effects is not None:
            data["effects"] = [
                {
                    "variant": effect.variant,
                    **{name: _plain(effect.row.columns.get(name, "")) for name in ("dtype", "causal", *SHAPE)},
                    "measured": effect.measured,
                    "predicted": effect.predicted,
                    "sign_right": effect.sign_right,
                }
                for effect in self.effects
            ]
        return data

    def _summaries(self, key: Callable[[Row], tuple[str, ...]]) -> dict[tuple[str, ...], Summary]:
        parts: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            if row.error is not None:
                parts.setdefault(key(row), []).append(row)
        return {name: summary for name, rows in parts.items() if (summary := Summary.of(rows)) is not None}


def _plain(text: str) -> int | float | str | None:
    """A cell as JSON has it: None when empty, a number when it is a finite one."""
    if not text:
        return None
    for kind in (int, float):
        with suppress(ValueError):
            value = kind(text)
            return value if math.isfinite(value) else text
    return text
