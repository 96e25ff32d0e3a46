"""Effects as arithmetic: each function takes an effect and its operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fasim.checker.operands import Operands
from fasim.checker.storage import Value, concatenate
from fasim.numerics import probabilities, round_probabilities, round_to, update_max
from fasim.numerics.attention import LOG2_E, Bool, SoftmaxState, finish
from fasim.numerics.formats import Float32
from fasim.problem import Problem
from fasim.program.effects import (
    Add,
    AddSplit,
    Clear,
    Effect,
    Fetch,
    Load,
    Mask,
    Matmul,
    Move,
    Normalise,
    Probabilities,
    Rescale,
    Resume,
    ResumeOutput,
    Round,
    RowMax,
    RowSum,
    SplitWeights,
    Store,
)
from fasim.program.tiles import Register, Tmem


def _scale_log2(problem: Problem) -> float:
    return LOG2_E / math.sqrt(problem.head_dim)


def _load(e: Load, at: Operands) -> None:
    at.write("into", at.load(e.array))


def _store(e: Store, at: Operands) -> None:
    value = at.read("source")
    if value.reference is not None:
        at.report("scale", "source", "stores sums of probabilities that were not divided by their row sum")
    at.store(value, e.tensor, e.array, e.line)


def _fetch(e: Fetch, at: Operands) -> None:
    at.write("into", at.fetch(e.tensor, e.array, e.lines))


def _move(e: Move, at: Operands) -> None:
    at.write("into", at.read("source"))


def _round(e: Round, at: Operands) -> None:
    value = at.read("source")
    if value.reference is None:
        rounded = round_to(value.data, e.format)
    else:
        rounded = round_probabilities(value.data, at.numerics.p_format or e.format)
    at.write("into", replace(value, data=rounded))


def _matmul(e: Matmul, at: Operands) -> None:
    pair = at.pair
    halves = [one.read("b") for one in pair]
    b = concatenate(halves, 0 if e.transposed else 1)
    if isinstance(e.a, Register | Tmem) and e.a.share is not None and not e.transposed:
        b = b.part(0, e.a.share)
    for one in pair:
        a = one.read("a")
        if e.transposed:
            product = Value(a.data @ b.data.T, a.rows, b.rows, a.reference)
        else:
            if a.columns is not None and b.rows is not None and not np.array_equal(a.columns, b.rows):
                one.report(
                    "data", "b", f"multiplies columns {_range(a.columns)} with rows {_range(b.rows)}: not the same keys"
                )
            product = Value(a.data @ b.data, a.rows, b.columns, a.reference)
        one.write("into", _sum(one, product) if e.add else product)


def _add(e: Add, at: Operands) -> None:
    at.write("into", _sum(at, at.read("source")))


def _sum(at: Operands, value: Value) -> Value:
    """``value`` added to what the operand ``into`` has of this work tile."""
    if not at.begun("into"):
        return value
    old = at.read("into")
    if _differ(old.reference, value.reference):
        at.report("scale", "into", "adds numbers relative to another row maximum: a rescale is missing or twice")
    return replace(value, data=old.data + value.data)


def _mask(e: Mask, at: Operands) -> None:
    scores = at.read("scores")
    at.write("scores", replace(scores, data=np.where(_hidden(scores, at.problem), np.float32(-np.inf), scores.data)))


def _hidden(scores: Value, problem: Problem) -> Bool:
    """Scores of keys that do not exist, or that the mask hides."""
    assert scores.rows is not None and scores.columns is not None
    position, key = problem.sequences.row_position(scores.rows), problem.sequences.row_key(scores.columns)
    return (scores.columns < 0) | ~problem.mask.sees(position[:, None], key)


def _row_max(e: RowMax, at: Operands) -> None:
    scores = at.read("scores")
    if scores.rows is not None and scores.columns is not None:
        seen = (scores.rows >= 0)[:, None] & _hidden(scores, at.problem) & np.isfinite(scores.data)
        if seen.any():
            at.report("data", "scores", "takes in scores that the mask hides: it is missing, or not on all its blocks")
    old = at.read("into").data if at.begun("into") else np.full((len(scores.data), 1), -np.inf, np.float32)
    threshold = e.threshold if at.numerics.threshold is None else at.numerics.threshold
    new, correction, _ = update_max(old[:, 0], scores.data, _scale_log2(at.problem), threshold)
    at.write("into", Value(new[:, None], scores.rows))
    at.write("scale", Value(correction[:, None].astype(np.float32), scores.rows, None, new[:, None], old))


def _probabilities(e: Probabilities, at: Operands) -> None:
    scores, row_max = at.read("scores"), at.read("row_max").data
    p = probabilities(scores.data, row_max[:, 0], _scale_log2(at.problem), at.numerics.exp2 or e.method)
    at.write("into", replace(scores, data=p, reference=row_max))


def _row_sum(e: RowSum, at: Operands) -> None:
    p, scale = at.read("p"), at.read("scale")
    total = p.data.sum(axis=1, keepdims=True)
    if _differ(p.reference, scale.reference):
        at.report("scale", "p", "sums probabilities of another row maximum than the correction's")
    if at.begun("into"):
        total = _corrected(at, "into", scale).data + total
    at.write("into", Value(total, p.rows, None, p.reference))


def _rescale(e: Rescale, at: Operands) -> None:
    scale = at.read("scale")
    if at.begun("target"):
        at.write("target", _corrected(at, "target", scale))


def _corrected(at: Operands, field: str, scale: Value) -> Value:
    value = at.read(field)
    if _differ(value.reference, scale.before):
        at.report("scale", field, "applies a correction that starts from another row maximum: one is missing or twice")
    return replace(value, data=value.data * scale.data, reference=scale.reference)


def _normalise(e: Normalise, at: Operands) -> None:
    target, row_sum, row_max = at.read("target"), at.read("row_sum"), at.read("row_max")
    if _differ(target.reference, row_sum.reference) or _differ(row_sum.reference, row_max.data):
        at.report("scale", "target", "divides by a row sum relative to another row maximum: a rescale is missing")
    state = SoftmaxState(row_max.data[:, 0], row_sum.data[:, 0], target.data)
    done = finish(state, _scale_log2(at.problem))
    at.write("target", replace(target, data=np.asarray(done.output, np.float32), reference=None))
    at.write("lse", Value(np.asarray(done.lse, np.float32)[:, None], target.rows))


def _clear(e: Clear, at: Operands) -> None:
    at.clear("place")


def _resume(e: Resume, at: Operands) -> None:
    lse = at.read("lse")
    row_max = _as_row_max(lse, at.problem)
    at.write("row_max", Value(row_max, lse.rows))
    at.write("row_sum", Value(np.ones_like(row_max), lse.rows, None, row_max))


def _resume_output(e: ResumeOutput, at: Operands) -> None:
    at.write("target", replace(at.read("target"), reference=_as_row_max(at.read("lse"), at.problem)))


def _as_row_max(lse: Value, problem: Problem) -> Float32:
    """The score of one key whose log-sum-exp is ``lse``."""
    return lse.data * np.float32(math.sqrt(problem.head_dim))


def _split_weights(e: SplitWeights, at: Operands) -> None:
    lses = at.read("lses")
    known = np.where(np.isnan(lses.data), -np.inf, lses.data)  # a split that has no keys writes nothing
    largest = known.max(axis=1, keepdims=True)
    shares = np.exp(known - np.where(np.isneginf(largest), 0, largest))
    total = shares.sum(axis=1, keepdims=True)
    safe = np.where(total > 0, total, 1)
    at.write("into", Value((shares / safe).astype(np.float32), lses.rows))
    lse = np.where(total > 0, largest + np.log(safe), -np.inf)
    at.write("lse", Value(lse.astype(np.float32), lses.rows))


def _add_split(e: AddSplit, at: Operands) -> None:
    source, turn = at.read("source"), at.turn(e)
    weight = at.read("weights").data[:, turn : turn + 1]
    part = replace(source, data=np.where(weight > 0, source.data * weight, 0).astype(np.float32))
    at.write("into", _sum(at, part))


def _differ(one: Float32 | None, other: Float32 | None) -> bool:
    if one is None or other is None:
        return one is not other
    return not np.array_equal(one, other)


def _range(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    inside = numbers[numbers >= 0]
    return f"{inside[0]} to {inside[-1]}" if len(inside) else "beyond the tensor"


_ARITHMETIC: dict[type[Effect], Callable[[Any, Operands], None]] = {
    Load: _load,
    Store: _store,
    Fetch: _fetch,
    Move: _move,
    Round: _round,
    Matmul: _matmul,
    Add: _add,
    Mask: _mask,
    RowMax: _row_max,
    Probabilities: _probabilities,
    RowSum: _row_sum,
    Rescale: _rescale,
    Normalise: _normalise,
    Clear: _clear,
    Resume: _resume,
    ResumeOutput: _resume_output,
    SplitWeights: _split_weights,
    AddSplit: _add_split,
}


def execute(effect: Effect, at: Operands) -> None:
    """Let ``effect`` take place."""
    _ARITHMETIC[type(effect)](effect, at)
