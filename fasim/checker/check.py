"""Is a schedule right? Budgets and structure, deadlock, races, and the numbers it computes.

The program that is timed is executed on NumPy values by the reference engine (:mod:`fasim.checker`) and compared with
attention in float64, and with a straightforward implementation in the same data type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasim.arch import Arch, load_arch
from fasim.checker import UNCHANGED, Arrays, Finding, Log, Numerics, ValueMachine
from fasim.engine import reference
from fasim.engine.common import NO_TRACE
from fasim.engine.image import TICKS, Image
from fasim.engine.memory import new_memory, next_launch
from fasim.errors import ConfigError, DeadlockError, ModelError
from fasim.lowering.lower import all_lines, lower_program
from fasim.numerics import Softmax, attention_reference, attention_tiled, quantise, round_to
from fasim.numerics.formats import Array, Float32
from fasim.problem import Problem
from fasim.program.language import Kernel, walk
from fasim.program.library import Schedule, load_schedule
from fasim.program.ops import Op
from fasim.program.rules import budgets

#: The schedule's RMSE may exceed that of the straightforward implementation by this factor: both round the same
#: operands, so only the order of sums and the maximum that P is relative to differ.
RMSE_FACTOR = 1.2

#: Largest error of the log-sum-exp, whose float32 sum is exact to about 1e-6; polynomial exponentials cost 1e-4.
LSE_TOLERANCE = 1e-3

#: Work tiles a CTA slot gets at least where the grid allows: enough to come round all buffers.
TILES_PER_SLOT = 4


@dataclass(frozen=True)
class OutputError:
    """Error of one output against float64, and that of the straightforward implementation."""

    output: str
    max_abs: float
    max_relative: float  # to the largest magnitude of the row
    rmse: float
    straightforward_max_abs: float
    straightforward_rmse: float
    passed: bool
    hint: str  # what the error looks like, empty where it passed


def check(
    schedule: Schedule | str | Path,
    problem: Problem,
    arch: Arch | str | Path,
    knobs: Mapping[str, object] | None = None,
    seed: int = 0,
    spread: float = 1.0,
    numerics: Numerics = UNCHANGED,
) -> dict[str, Any]:
    """Check ``schedule`` for ``problem`` on ``arch`` with inputs of :func:`make_inputs`, and with other ``numerics``.

    ``schedule`` and ``arch`` may be names or files. The grid runs on a few SMs of the chip, so that buffers and
    barriers are used over several work tiles. Returns plain data: ``passed``; ``budgets`` per kernel (resource, used,
    limit); ``structure`` and ``deadlock`` (messages or None); ``annotated``: whether the schedule says what it does to
    values, without which there is no more than that; ``findings`` (see :class:`fasim.results.findings.Finding`);
    ``values``: a list of :class:`OutputError`, or None with the reason in ``values_reason``; and what was checked.
    Raises ConfigError for bad input.
    """
    schedule = schedule if isinstance(schedule, Schedule) else load_schedule(schedule)
    arch = arch if isinstance(arch, Arch) else load_arch(arch)
    result: dict[str, Any] = {
        "schedule": schedule.name,
        "arch": arch.name,
        "problem": asdict(problem),
        "problem_text": problem.describe(),
        "seed": seed,
        "spread": spread,
        "numerics": asdict(numerics),
        "kernels": [],
        "knobs": {},
        "budgets": [],
        "structure": None,
        "deadlock": None,
        "annotated": False,
        "findings": [],
        "values": None,
        "values_reason": None,
        "cycles": None,
    }
    if not spread > 0:
        raise ConfigError(f"spread {spread}: must be positive")
    try:
        kernels = schedule.build(problem, arch, dict(knobs or {}))
        result["kernels"], result["knobs"] = [k.name for k in kernels], kernels[0].knobs
        result["budgets"] = [{"kernel": k.name, **asdict(budget)} for k in kernels for budget in budgets(k)]
        for kernel in kernels:
            kernel.arch = _few_sms(kernel)
        lines = all_lines(kernels)  # the clock only decides how fast memory is
        programs = [lower_program(kernel, arch.clock.datasheet_mhz, lines) for kernel in kernels]
    except ModelError as error:
        return {**result, "structure": str(error), "values_reason": "the program does not run", "passed": False}
    annotated = any(op.effects for kernel in kernels for role in kernel.roles for op in walk(role.body))
    result["annotated"] = annotated
    log, inputs = Log(), make_inputs(problem, seed, spread)
    arrays = Arrays({name: x.reshape(-1, x.shape[-1]) for name, x in inputs.items()})
    try:
        result["cycles"], broken = _run(kernels, programs, arrays, log, annotated, numerics)
    except DeadlockError as error:
        result["deadlock"] = str(error).removeprefix("deadlock: ")
        result["values_reason"] = "the program stops"
    else:
        result["values_reason"] = _why_not(kernels, annotated, broken)
        if result["values_reason"] is None and "O" not in arrays.data:
            result["values_reason"] = "there is no output"
            log.add(("output", "O"), lambda: Finding("output", "", "", "", "O", "nothing was stored to O"))
        elif result["values_reason"] is None:
            s_format = next((k.score_format for k in kernels if k.score_format), None)
            result["values"] = [asdict(error) for error in compare(problem, inputs, arrays, log, s_format)]
    result["findings"] = [asdict(finding) for finding in log.findings]
    wrong = result["deadlock"] or log.findings or any(not row["passed"] for row in result["values"] or ())
    return {**result, "passed": not wrong}


def make_inputs(problem: Problem, seed: int, spread: float = 1.0) -> dict[str, Float32]:
    """Q, K and V as the kernel gets them: normal, rounded to the data type; FP8 with one scale per tensor.

    K and V have unit variance, Q the standard deviation ``spread``: with 1, row maxima never grow by the threshold of
    a conditional rescale, with 8 they often do.
    """
    rng = np.random.default_rng(seed)
    batch, d, dv = problem.batch, problem.head_dim, problem.head_dim_v
    shapes = {
        "Q": (batch * problem.heads_q, problem.seqlen_q, d),
        "K": (batch * problem.heads_kv, problem.seqlen_k, d),
        "V": (batch * problem.heads_kv, problem.seqlen_k, dv),
    }
    format = {"fp8": "e4m3", "fp4": "nvfp4"}.get(problem.dtype, problem.dtype)
    found = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    found["Q"] *= np.float32(spread)
    return {name: quantise(x, format) for name, x in found.items()}


def compare(
    problem: Problem, inputs: Mapping[str, Float32], arrays: Arrays, log: Log, s_format: str | None = None
) -> list[OutputError]:
    """Errors of what the kernels stored: O, and the log-sum-exp if they store it.

    ``s_format``: the straightforward implementation rounds scores to it, None keeps them in float32.
    """
    group, heads = problem.group, problem.batch * problem.heads_q
    out_format = problem.dtype if problem.bits == 16 else "bf16"
    p_format = {"fp8": "e4m3", "fp4": "nvfp4"}.get(problem.dtype, problem.dtype)
    exact: dict[str, list[Array]] = {"O": [], "LSE": []}
    plain: dict[str, list[Array]] = {"O": [], "LSE": []}
    for head in range(heads):
        q, k, v = inputs["Q"][head], inputs["K"][head // group], inputs["V"][head // group]
        best = attention_reference(q, k, v, mask=problem.mask)
        plainly = Softmax(p_format=p_format, s_format=s_format)
        simple, _ = attention_tiled(q, k, v, plainly, mask=problem.mask, tile_n=problem.seqlen_k)
        for name, one, other in (
            ("O", best.output, round_to(simple.output, out_format)),
            ("LSE", best.lse[:, None], simple.lse[:, None]),
        ):
            exact[name].append(one)
            plain[name].append(other)
    errors = []
    for name in ("O", "LSE"):
        if name in arrays.data:
            errors.append(_error(name, arrays.data[name], np.concatenate(exact[name]), np.concatenate(plain[name])))
            _unwritten(name, arrays.data[name], problem, log)
    return errors


def _error(name: str, found: Array, exact: Array, plain: Array) -> OutputError:
    def difference(x: Array) -> Array:
        same = exact == x  # -inf - -inf is no number
        gap = np.where(same, 0.0, x - np.where(same, 0.0, exact))
        return np.where(np.isnan(gap), np.inf, gap)

    gap, plain_gap = difference(found.astype(np.float64)), difference(plain.astype(np.float64))
    size = np.abs(np.where(np.isinf(exact), 0, exact)).max(axis=1, keepdims=True)
    largest, rmse = float(np.abs(gap).max()), float(np.sqrt(np.mean(gap**2)))
    plain_rmse = float(np.sqrt(np.mean(plain_gap**2)))
    if name == "LSE":
        passed = bool(largest <= LSE_TOLERANCE)
    else:
        passed = bool(rmse <= RMSE_FACTOR * plain_rmse + np.finfo(np.float32).eps)
    return OutputError(
        output=name,
        max_abs=largest,
        max_relative=float((np.abs(gap) / np.where(size > 0, size, 1)).max()),
        rmse=rmse,
        straightforward_max_abs=float(np.abs(plain_gap).max()),
        straightforward_rmse=plain_rmse,
        passed=passed,
        hint="" if passed else _hint(gap, exact, found),
    )


def _hint(gap: Array, exact: Array, found: Array) -> str:
    """What a wrong output looks like: which rows, and whether they only lack a factor."""
    typical = np.median(np.abs(gap))
    rows = np.abs(gap).max(axis=1) > 10 * typical + 1e-2
    wrong = np.flatnonzero(rows)
    if not len(wrong):
        return "all rows are wrong" if typical > 0.1 * np.median(np.abs(exact)) else "all rows are a little off"
    where = f"{len(wrong)} of {len(rows)} rows, {wrong[0]} to {wrong[-1]}"
    if exact.shape[1] > 1 and np.isfinite(found[wrong]).all():
        factor = (found[wrong] * exact[wrong]).sum(axis=1) / np.maximum((exact[wrong] ** 2).sum(axis=1), 1e-30)
        left = np.abs(found[wrong] - factor[:, None] * exact[wrong]).max()
        if left < 0.05 * np.abs(found[wrong]).max():
            return f"{where}: each is right but for a factor ({factor.min():.3g} to {factor.max():.3g})"
    return where


def _unwritten(name: str, found: Array, problem: Problem, log: Log) -> None:
    rows = np.flatnonzero(np.isnan(found).any(axis=1))
    if len(rows):
        head, token = divmod(int(rows[0]), problem.seqlen_q)
        message = f"{len(rows)} rows of {name} hold no number, the first is token {token} of head {head}"
        log.add(("output", name), lambda: Finding("output", "", "", "", name, message))


def _few_sms(kernel: Kernel) -> Arch:
    """The chip with fewer SMs, for several work tiles per CTA slot."""
    chip = kernel.arch.chip
    most = max(1, kernel.tile_count // (TILES_PER_SLOT * kernel.cluster))
    sms = min(chip.sm_count, kernel.cluster * most)
    return kernel.arch.model_copy(update={"chip": chip.model_copy(update={"sm_count": sms})})


def _run(
    kernels: Sequence[Kernel],
    programs: Sequence[tuple[Image, tuple[Op | None, ...]]],
    arrays: Arrays,
    log: Log,
    annotated: bool,
    numerics: Numerics,
) -> tuple[float, bool]:
    """Execute kernels one after the other. Returns cycles and whether values had to stop."""
    first = programs[0][0]
    memory, ticks = new_memory(first.lines, first.machine, first.slowest_line), 0
    for kernel, (image, ops) in zip(kernels, programs, strict=True):
        machine = ValueMachine(kernel, image, ops, arrays, log, numerics) if annotated else None
        ticks += reference.run(image, NO_TRACE, memory, machine).ticks
        next_launch(memory)
        if machine is not None:
            machine.finish()
            if machine.broken:
                return ticks / TICKS, True
    return ticks / TICKS, False


def _why_not(kernels: Sequence[Kernel], annotated: bool, broken: bool) -> str | None:
    """Why there are no values to compare; None if there should be."""
    if not annotated:
        return "the schedule does not say what its operations do to values (docs/values.md)"
    if broken:
        return "execution stopped at a place that does not hold what is read from it"
    return next((kernel.not_attention for kernel in kernels if kernel.not_attention is not None), None)
