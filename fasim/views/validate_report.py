"""The tables of a validation, as rich renderables.

Errors are per cent of the measurement, positive where the prediction is too slow::

    kernel  dtype  direction  d    n  MAPE %  max %  bias %
    fa3     bf16   fwd        128  14    1.9    4.1    -0.6
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fasim.results.validation import SHORT_US, Row, Summary, SwitchEffect, Validation

if TYPE_CHECKING:
    from rich.console import RenderableType

_ERROR_COLUMNS = ("n", "MAPE %", "max %", "bias %")
_TOTALS = {"all": "all", "long": f"from {SHORT_US:g} us on", "short": f"below {SHORT_US:g} us"}


def render_validation(result: Validation, *, rows: bool = False) -> RenderableType:
    """Groups, chips and totals, what could not be predicted, effects if asked for, and with ``rows`` every row."""
    parts: list[RenderableType] = []
    if rows:
        parts += [_row_table(row for row in result.rows if row.error is not None), ""]
    groups, chips, totals = result.groups(), result.chips(), result.totals()
    if groups:
        parts += [_summary_table(("kernel", "dtype", "direction", "d"), groups.items()), ""]
        if len({key[0] for key in chips}) > 1:
            parts += [_summary_table(("arch", "kernel", "compared"), sorted(chips.items())), ""]
        parts += [_summary_table(("total",), (((_TOTALS[name],), summary) for name, summary in totals.items())), ""]
    if result.effects is not None:
        parts += [_effect_table(result.effects, per_shape=rows), _effect_line(result.effects), ""]
    parts += _unpredicted(result.rows)
    parts.append(Text(f"knob columns: {', '.join(result.knob_columns) or 'none'}"))
    parts.append(Text(f"carried through: {', '.join(result.carried_columns) or 'none'}"))
    return Group(*parts)


def _summary_table(names: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Summary]]) -> Table:
    table = _table(names, _ERROR_COLUMNS)
    for key, s in rows:
        table.add_row(*key, str(s.n), f"{100 * s.mape:.1f}", f"{100 * s.max:.1f}", f"{100 * s.bias:+.1f}")
    return table


def _row_table(rows: Iterable[Row]) -> Table:
    table = _table(("kernel", "pass", "shape"), ("measured", "predicted", "error %"))
    for row in rows:
        cells = row.columns
        causal = cells["causal"].lower() in ("1", "true")
        marks = (cells["dtype"], cells["direction"], "causal" if causal else "", "short" if row.short else "")
        table.add_row(
            cells.get("variant") or cells["kernel"],
            " ".join(filter(None, marks)),
            _shape(cells),
            f"{row.measured_cycles:.0f}",
            f"{row.predicted_cycles:.0f}",
            "" if row.error is None else f"{100 * row.error:+.1f}",
        )
    return table


def _shape(cells: Mapping[str, str]) -> str:
    queries, keys = cells["seqlen_q"], cells.get("seqlen_k", "")
    length = queries if keys in ("", queries) else f"{queries}x{keys}"
    return f"B{cells['batch']} S{length} H{cells['heads_q']} d{cells['head_dim']}"


def _effect_table(effects: tuple[SwitchEffect, ...], per_shape: bool) -> Table:
    if per_shape:
        table = _table(("variant", "shape"), ("measured %", "predicted %", "sign"))
        for effect in effects:
            measured, predicted = f"{100 * effect.measured:+.1f}", f"{100 * effect.predicted:+.1f}"
            sign = "right" if effect.sign_right else "wrong"
            table.add_row(effect.variant, _shape(effect.row.columns), measured, predicted, sign)
        return table
    table = _table(("against the default",), ("n", "measured %", "predicted %", "sign right", "error, points"))
    for variant in dict.fromkeys(effect.variant for effect in effects):
        part = [effect for effect in effects if effect.variant == variant]
        table.add_row(
            variant,
            str(len(part)),
            f"{100 * _mean(e.measured for e in part):+.1f}",
            f"{100 * _mean(e.predicted for e in part):+.1f}",
            f"{sum(e.sign_right for e in part)} of {len(part)}",
            f"{100 * _mean(abs(e.predicted - e.measured) for e in part):.1f}",
        )
    return table


def _effect_line(effects: tuple[SwitchEffect, ...]) -> Text:
    if not effects:
        return Text("no variant has a predicted default of its shape")
    right = sum(effect.sign_right for effect in effects)
    error = 100 * _mean(abs(effect.predicted - effect.measured) for effect in effects)
    return Text(f"effects: sign right in {right} of {len(effects)}, mean absolute error {error:.1f} points")


def _unpredicted(rows: tuple[Row, ...]) -> list[RenderableType]:
    """The rows without an error, gathered by reason."""
    reasons = Counter(row.reason for row in rows if row.reason is not None)
    if not reasons:
        return []
    table = Table("rows", "not predicted because", box=None, pad_edge=False)
    for reason, count in reasons.items():
        table.add_row(str(count), Text(reason))
    return [table, ""]


def _table(texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(*texts, box=None, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
