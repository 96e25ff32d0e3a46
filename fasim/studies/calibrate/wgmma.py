"""Formulas of what vector instructions and a running wgmma do to each other (``sm.interference``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fasim.studies.calibrate.estimates import LANES, Estimate, centre, fit
from fasim.studies.calibrate.microbench import FloatArray, Microbench

#: Widths of wgmma at which an architecture file gives what is absorbed (``sm.interference.mma_n``).
_WIDTHS = (64, 128, 176, 256)

_BESIDE: dict[str, object] = {"operand": "ss", "mma_groups": 1, "n": (128, 192)}


def beside(vectors: Sequence[str], groups: Sequence[int], results: Microbench) -> Estimate:
    """Cycles of a sub-core per instruction of an endless stream beside one warpgroup's wgmma."""
    lanes = [
        results.column("corun.corun", "vector_lanes_per_cycle", vector=v, vector_groups=groups, **_BESIDE)
        for v in vectors
    ]
    return centre(LANES / np.concatenate(lanes), np.mean)


#: Streams that the operand port limits, as ALU, three- and two-operand FMA instructions per unit, with the columns
#: that select them. FMA streams of few chains only: endless ones starve the MMA of issue slots.
_PORT_STREAMS: tuple[tuple[tuple[float, float, float], str, dict[str, object]], ...] = (
    ((1, 0, 0), "corun.corun", {"mma_groups": 1, "vector": ("fmnmx", "f2fp"), "vector_groups": (2, 3)}),
    ((0, 1, 0), "corun.corun_chains", {"vector": "ffma", "chains": (1, 2), "vector_groups": 2}),
    ((0, 0, 1), "corun.corun_chains", {"vector": "fadd", "chains": (2, 3), "vector_groups": 2}),
    ((0, 4, 0), "corun.corun", {"mma_groups": 1, "vector": "ex2+4ffma", "vector_groups": (2, 3)}),
    ((1.5, 1, 1), "corun.corun", {"mma_groups": 1, "vector": "softmax_mix", "vector_groups": (2, 3)}),
)


def port(part: int, results: Microbench) -> Estimate:
    """Cycles of the operand port per ALU (0), three-operand (1) or two-operand (2) FMA instruction.

    Cycles of a sub-core per unit of a stream = sum over its instructions, at the widths that stay at full rate.
    """
    widths = {"n": (128, 176, 192, 256)}
    cycles = [LANES / results.column(t, "vector_lanes_per_cycle", **where, **widths) for _, t, where in _PORT_STREAMS]
    mixes = [np.tile(mix, (len(c), 1)) for (mix, *_), c in zip(_PORT_STREAMS, cycles, strict=True)]
    counts, measured = np.concatenate(mixes), np.concatenate(cycles)
    found, residual = fit(lambda p: counts @ p, measured, (4.0, 4.0, 2.0), (32.0, 32.0, 32.0))
    return Estimate(float(found[part]), residual, len(measured), "fitted")


def fsel_port(results: Microbench) -> Estimate:
    """What an FSEL of one register operand adds to an element of the softmax mix."""
    where = {"n": (128, 256), "mma_groups": 1, "vector_groups": (2, 3)}
    mixed, plain = (
        LANES / results.column("corun.corun_mask", "vector_lanes_per_cycle", vector=vector, **where)
        for vector in ("fsel+softmax_mix", "softmax_mix")
    )
    return centre(mixed - plain)


def fadd_port(results: Microbench) -> Estimate:
    """FADD of the row sums of two warpgroups, half a score's each per key."""
    where = {"parts": "sum", "warpgroups": 2, "stream": "ss"}
    keys, cycles = (results.column("softmax.softmax_parts", c, **where) for c in ("keys", "cycles"))
    return centre(cycles / keys)


def ex2_wait(streams: Mapping[str, int], results: Microbench) -> Estimate:
    """Time per instruction of a stream that fills the port in which another warp's EX2 do not go out."""
    table, beside = "softmax.vector_pairs", {"second": "ex2", "mma": 1}
    ex2 = results.column(table, "first_alone", first="ex2", **beside)
    waits = []
    for vector, chains in streams.items():
        where = {"first": vector, "first_chains": chains, **beside}
        own, second = (results.column(table, c, **where) for c in ("first_cycles", "second_cycles"))
        waits.append(own * (1 - ex2 / second))
    return centre(np.concatenate(waits))


def shuffle_chain(results: Microbench) -> Estimate:
    """A chain of shuffles of one warp, beside operands in shared memory and in registers."""
    where = {"vector": "shfl", "chains": 1, "vector_groups": 1}
    return centre(LANES / results.column("corun.corun_chains", "vector_lanes_per_cycle", **where), np.mean)


def _lost(results: Microbench, **where: object) -> FloatArray:
    """Tensor-core time lost per softmax, or part of one, of a warpgroup."""
    columns = ("n", "warpgroups", "cycles", "mma_cycles_per_instr")
    n, warpgroups, cycles, mma = (results.column("softmax.softmax_parts", c, **where) for c in columns)
    return (1 - n / 2 / mma) * cycles / warpgroups


def part_delay(part: str, typical: Callable[[FloatArray], np.floating], results: Microbench) -> Estimate:
    """Per instruction of a part of a softmax at n = 64, which absorbs none; the part has one per score of a thread."""
    where = {"parts": part, "n": 64}
    keys = results.column("softmax.softmax_parts", "keys", **where)
    return centre(_lost(results, **where) / (keys / 2), typical)


def fmul_stop(results: Microbench) -> Estimate:
    """Per FMUL of the rescale of O between exponentials, beside wide instructions: a softmax with it and without."""
    where = {"stream": "ss", "n": (96, 128, 160)}
    dim = results.column("softmax.softmax_parts", "dim", parts="all", **where)
    lost = _lost(results, parts="all", **where) - _lost(results, parts="all but rescale", **where)
    return centre(lost / (dim / 2), np.mean)


def delay(vector: str, results: Microbench) -> Estimate:
    """Tensor-core time lost per instruction in bursts at n = 64, which absorbs none."""
    where = {"vector": vector, "operand": "ss", "n": 64}
    return centre(results.column("corun.corun_duty", "mma_delay_per_vector_instr", **where))


def absorbed(results: Microbench) -> Estimate:
    """Delay made up for per cycle by width: cycles beside = alone + max(0, delay x instructions - absorbed x alone).

    Of bursts of FFMA, each with the delay measured at n = 64.
    """
    where = {"vector": "ffma", "vector_groups": 2, "n": _WIDTHS[1:]}
    columns = ("n", "mma_alone", "mma_cycles_per_instr", "vector_lanes_per_cycle")
    n, alone, beside, lanes = (results.column("corun.corun_duty", column, **where) for column in columns)
    owed = np.asarray(delay("ffma", results).value) * lanes / LANES * beside
    width = np.searchsorted(_WIDTHS[1:], n)
    found, residual = fit(
        lambda p: np.maximum(0.0, owed - p[width] * alone), beside - alone, (0.1, 0.2, 0.2), (1.0, 1.0, 1.0)
    )
    return Estimate((0.0, *map(float, found)), residual, len(n), "fitted")


def absorbed_ahead(results: Microbench) -> Estimate:
    """Cycles of absorption in advance: bursts of 64 FFMA at n = 128, so far apart that each finds all of it.

    What a burst owes and the MMA does not lose was absorbed while the burst lasted, or in advance.
    """
    where = {"vector": "ffma", "vector_groups": 1, "n": 128, "idle_hops": (16, 24)}
    lost = results.column("corun.corun_duty", "mma_delay_per_vector_instr", **where)
    saved = 64 * (np.asarray(delay("ffma", results).value) - lost)
    rate = absorbed(results).value
    lasts = 64 * np.asarray(port(1, results).value)
    assert isinstance(rate, tuple)
    return centre(saved / rate[1] - lasts, np.mean)
