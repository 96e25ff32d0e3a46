"""Which number of an architecture file follows from which microbenchmark: one rule per number, in the file's order.

A rule gives the table it reads, the formula, and the grain its result is rounded to, which is about what runs on two
chips of a kind differ by. ``measured`` is a mean or median of like measurements, ``fitted`` a least-squares fit (scipy,
with bounds) where several measurements determine the number. What no benchmark determines has no rule: capacities of
data sheets, clocks, the issue queue of wgmma (``validation/data/h200_pingpong_micro.csv``), the costs beside mma.sync
(``validation/data/h200_corun_hmma.csv``), and what ``kernel_fit`` fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from fasim.studies.microbench import FloatArray, Microbench

How = Literal["measured", "fitted"]

#: Lanes of a full-rate pipe per SM and cycle, so ``_LANES / lanes`` is cycles of a sub-core per warp instruction.
_LANES = 128

#: A grain.
POWER_OF_TWO = 0.0

#: Widths of wgmma at which an architecture file gives what is absorbed (``sm.interference.mma_n``).
_WIDTHS = (64, 128, 176, 256)


@dataclass(frozen=True)
class Estimate:
    """A number before rounding, in the unit of its key; a list of numbers where the key has one."""

    value: float | tuple[float, ...]
    residual: float
    """Root mean square of what the ``count`` measurements deviate from it; in their unit for a fit."""
    count: int
    how: How = "measured"


@dataclass(frozen=True)
class Rule:
    """How one key follows from the tables of one program."""

    key: str
    program: str
    formula: Callable[[Microbench], Estimate]
    grain: float = 1
    """Rounding step; POWER_OF_TWO for widths, of which a benchmark reaches a little less."""
    of_the_chip: bool = False
    """Holds for the measured product only (memory system), not for every one with the same SMs."""

    def rounded(self, estimate: Estimate) -> float | tuple[float, ...]:
        """The value as the file states it."""
        if isinstance(estimate.value, tuple):
            return tuple(self._round(value) for value in estimate.value)
        return self._round(estimate.value)

    def text(self, value: float | tuple[float, ...]) -> str:
        """A rounded value as TOML, with as many decimals as the grain has."""
        if isinstance(value, tuple):
            return f"[{', '.join(self.text(part) for part in value)}]"
        if self.grain >= 1e6:
            return f"{value / 1e12:g}e12"
        return f"{value:.{max(0, -math.floor(math.log10(self.grain)))}f}" if self.grain else f"{value:.0f}"

    def _round(self, value: float) -> float:
        if self.grain == POWER_OF_TWO:
            return float(2 ** round(math.log2(value)))
        return float(f"{round(value / self.grain) * self.grain:.12g}")


def _centre(values: FloatArray, typical: Callable[[FloatArray], np.floating] = np.median) -> Estimate:
    value = float(typical(values))
    return Estimate(value, float(np.sqrt(np.mean((values - value) ** 2))), len(values))


def _fit(
    model: Callable[[FloatArray], FloatArray], measured: FloatArray, start: Sequence[float], highest: Sequence[float]
) -> tuple[FloatArray, float]:
    """Parameters in [0, highest] with the least squares of ``model(parameters) - measured``, and the residual."""
    from scipy.optimize import least_squares

    found = least_squares(lambda p: model(p) - measured, start, bounds=(np.zeros(len(start)), highest))
    return found.x, float(np.sqrt(np.mean(found.fun**2)))


def _line(x: FloatArray, y: FloatArray) -> tuple[Estimate, Estimate]:
    """Intercept and slope of ``y`` over ``x``, neither below 0."""
    (first, slope), residual = _fit(lambda p: p[0] + p[1] * x, y, (1.0, 1.0), (np.inf, np.inf))
    return Estimate(float(first), residual, len(x), "fitted"), Estimate(float(slope), residual, len(x), "fitted")


def _plus(estimate: Estimate, constant: float) -> Estimate:
    assert isinstance(estimate.value, float)
    return Estimate(estimate.value + constant, estimate.residual, estimate.count, estimate.how)


# ---- pipes ----


def _rate(op: str, results: Microbench) -> Estimate:
    return _centre(results.column("pipes.rate", "lanes_per_cycle", op=op, warps=(8, 12, 16, 32)))


def _latency(op: str, results: Microbench) -> Estimate:
    return _centre(results.column("pipes.latency", "cycles", op=op))


def _smem_rate(results: Microbench) -> Estimate:
    """512 bytes per warp instruction over its cycles, with warps enough to fill the port."""
    return _centre(512 / results.column("pipes.smem_rate", "cycles_per_instr", op="ld.shared.v4", warps=(4, 8, 16)))


def _wgmma_rate(results: Microbench) -> Estimate:
    """2 m n k FLOP of a wgmma m64nNk16 over its interval, issued without gaps."""
    where = {"n": (64, 96, 128, 176, 192, 256), "instr_per_group": 8, "groups_in_flight": 2}
    n, cycles = (results.column("wgmma.wgmma_interval", c, **where) for c in ("n", "cycles_per_instr"))
    return _centre(2 * 64 * 16 * n / cycles)


def _wgmma_overhead(results: Microbench) -> Estimate:
    """Tensor time per instruction beyond its FLOPs: two warpgroups keep the tensor core busy."""
    where = {"vector": "none", "mma_groups": 2, "n": (64, 128, 176, 192, 256)}
    ideal, cycles = (results.column("corun.corun", c, **where) for c in ("mma_ideal", "mma_cycles_per_instr"))
    return _centre(cycles - ideal)


def _mma_sync_rate(results: Microbench) -> Estimate:
    """2 m n k FLOP of m16n8k16 on four sub-cores over its interval, with warps enough to hide the latency."""
    where = {"vector": "none", "mma_warps": (2, 3, 4)}
    cycles = results.column("corun_mma_sync.corun_mma_sync", "mma_cycles_per_instr", **where)
    return _centre(4 * 2 * 16 * 8 * 16 / cycles)


def _stall(results: Microbench) -> Estimate:
    """What one warp loses per instruction: the softmax mix (4.5 instructions) by one warp a sub-core and by three."""
    one, three = (
        _LANES
        / results.column("corun.corun", "vector_lanes_per_cycle", vector="softmax_mix", vector_groups=g, mma_groups=0)
        for g in (1, 3)
    )
    return _centre((one - three) / 4.5)


# ---- beside wgmma ----

_BESIDE: dict[str, object] = {"operand": "ss", "mma_groups": 1, "n": (128, 192)}


def _beside(vectors: Sequence[str], groups: Sequence[int], results: Microbench) -> Estimate:
    """Cycles of a sub-core per instruction of an endless stream beside one warpgroup's wgmma."""
    lanes = [
        results.column("corun.corun", "vector_lanes_per_cycle", vector=v, vector_groups=groups, **_BESIDE)
        for v in vectors
    ]
    return _centre(_LANES / np.concatenate(lanes), np.mean)


#: Streams that the operand port limits, as ALU, three- and two-operand FMA instructions per unit, with the columns
#: that select them. FMA streams of few chains only: endless ones starve the MMA of issue slots.
_PORT_STREAMS: tuple[tuple[tuple[float, float, float], str, dict[str, object]], ...] = (
    ((1, 0, 0), "corun.corun", {"mma_groups": 1, "vector": ("fmnmx", "f2fp"), "vector_groups": (2, 3)}),
    ((0, 1, 0), "corun.corun_chains", {"vector": "ffma", "chains": (1, 2), "vector_groups": 2}),
    ((0, 0, 1), "corun.corun_chains", {"vector": "fadd", "chains": (2, 3), "vector_groups": 2}),
    ((0, 4, 0), "corun.corun", {"mma_groups": 1, "vector": "ex2+4ffma", "vector_groups": (2, 3)}),
    ((1.5, 1, 1), "corun.corun", {"mma_groups": 1, "vector": "softmax_mix", "vector_groups": (2, 3)}),
)


def _port(part: int, results: Microbench) -> Estimate:
    """Cycles of the operand port per ALU (0), three-operand (1) or two-operand (2) FMA instruction.

    Cycles of a sub-core per unit of a stream = sum over its instructions, at the widths that stay at full rate.
    """
    widths = {"n": (128, 176, 192, 256)}
    cycles = [_LANES / results.column(t, "vector_lanes_per_cycle", **where, **widths) for _, t, where in _PORT_STREAMS]
    mixes = [np.tile(mix, (len(c), 1)) for (mix, *_), c in zip(_PORT_STREAMS, cycles, strict=True)]
    counts, measured = np.concatenate(mixes), np.concatenate(cycles)
    found, residual = _fit(lambda p: counts @ p, measured, (4.0, 4.0, 2.0), (32.0, 32.0, 32.0))
    return Estimate(float(found[part]), residual, len(measured), "fitted")


def _fsel_port(results: Microbench) -> Estimate:
    """What an FSEL of one register operand adds to an element of the softmax mix."""
    where = {"n": (128, 256), "mma_groups": 1, "vector_groups": (2, 3)}
    mixed, plain = (
        _LANES / results.column("corun.corun_mask", "vector_lanes_per_cycle", vector=vector, **where)
        for vector in ("fsel+softmax_mix", "softmax_mix")
    )
    return _centre(mixed - plain)


def _fadd_port(results: Microbench) -> Estimate:
    """FADD of the row sums of two warpgroups, half a score's each per key."""
    where = {"parts": "sum", "warpgroups": 2, "stream": "ss"}
    keys, cycles = (results.column("softmax.softmax_parts", c, **where) for c in ("keys", "cycles"))
    return _centre(cycles / keys)


def _ex2_wait(streams: Mapping[str, int], results: Microbench) -> Estimate:
    """Time per instruction of a stream that fills the port in which another warp's EX2 do not go out."""
    table, beside = "softmax.vector_pairs", {"second": "ex2", "mma": 1}
    ex2 = results.column(table, "first_alone", first="ex2", **beside)
    waits = []
    for vector, chains in streams.items():
        where = {"first": vector, "first_chains": chains, **beside}
        own, second = (results.column(table, c, **where) for c in ("first_cycles", "second_cycles"))
        waits.append(own * (1 - ex2 / second))
    return _centre(np.concatenate(waits))


def _shuffle_chain(results: Microbench) -> Estimate:
    """A chain of shuffles of one warp, beside operands in shared memory and in registers."""
    where = {"vector": "shfl", "chains": 1, "vector_groups": 1}
    return _centre(_LANES / results.column("corun.corun_chains", "vector_lanes_per_cycle", **where), np.mean)


def _lost(results: Microbench, **where: object) -> FloatArray:
    """Tensor-core time lost per softmax, or part of one, of a warpgroup."""
    columns = ("n", "warpgroups", "cycles", "mma_cycles_per_instr")
    n, warpgroups, cycles, mma = (results.column("softmax.softmax_parts", c, **where) for c in columns)
    return (1 - n / 2 / mma) * cycles / warpgroups


def _part_delay(part: str, typical: Callable[[FloatArray], np.floating], results: Microbench) -> Estimate:
    """Per instruction of a part of a softmax at n = 64, which absorbs none; the part has one per score of a thread."""
    where = {"parts": part, "n": 64}
    keys = results.column("softmax.softmax_parts", "keys", **where)
    return _centre(_lost(results, **where) / (keys / 2), typical)


def _fmul_stop(results: Microbench) -> Estimate:
    """Per FMUL of the rescale of O between exponentials, beside wide instructions: a softmax with it and without."""
    where = {"stream": "ss", "n": (96, 128, 160)}
    dim = results.column("softmax.softmax_parts", "dim", parts="all", **where)
    lost = _lost(results, parts="all", **where) - _lost(results, parts="all but rescale", **where)
    return _centre(lost / (dim / 2), np.mean)


def _delay(vector: str, results: Microbench) -> Estimate:
    """Tensor-core time lost per instruction in bursts at n = 64, which absorbs none."""
    where = {"vector": vector, "operand": "ss", "n": 64}
    return _centre(results.column("corun.corun_duty", "mma_delay_per_vector_instr", **where))


def _absorbed(results: Microbench) -> Estimate:
    """Delay made up for per cycle by width: cycles beside = alone + max(0, delay x instructions - absorbed x alone).

    Of bursts of FFMA, each with the delay measured at n = 64.
    """
    where = {"vector": "ffma", "vector_groups": 2, "n": _WIDTHS[1:]}
    columns = ("n", "mma_alone", "mma_cycles_per_instr", "vector_lanes_per_cycle")
    n, alone, beside, lanes = (results.column("corun.corun_duty", column, **where) for column in columns)
    delay = np.asarray(_delay("ffma", results).value) * lanes / _LANES * beside
    width = np.searchsorted(_WIDTHS[1:], n)
    found, residual = _fit(
        lambda p: np.maximum(0.0, delay - p[width] * alone), beside - alone, (0.1, 0.2, 0.2), (1.0, 1.0, 1.0)
    )
    return Estimate((0.0, *map(float, found)), residual, len(n), "fitted")


# ---- copies, barriers, launch ----


def _load_line(results: Microbench) -> tuple[Estimate, Estimate]:
    """Latency from issue and cycles per byte of one copy by TMA that hits L2."""
    where = {"from": "l2", "copy": "tensor"}
    return _line(*(results.column("tma.tma_latency", column, **where) for column in ("bytes", "cycles")))


def _load_latency(results: Microbench) -> Estimate:
    waiting = results.column("sync.mbarrier", "cycles", what="try_wait success")
    return _plus(_load_line(results)[0], -float(waiting[0]))


def _issue_interval(results: Microbench) -> Estimate:
    """Of copies so small that the issue of the next does not wait for them."""
    return _centre(results.column("tma.tma_issue", "issue_interval", copy="tensor", bytes=(1024, 2048)))


def _multicast(results: Microbench) -> Estimate:
    own, both = (
        results.column("tma.tma_multicast", "cycles_cta0", mode=m) for m in ("own copy each", "one CTA for both")
    )
    return _centre(both - own)


def _store_line(results: Microbench) -> tuple[Estimate, Estimate]:
    """Cycles of a bulk store from issue to its source being free, over its bytes."""
    return _line(*(results.column("tma.tma_store", column) for column in ("bytes", "read_done")))


def _inverse(estimate: Estimate) -> Estimate:
    assert isinstance(estimate.value, float)
    return Estimate(1.0 / estimate.value, estimate.residual, estimate.count, estimate.how)


def _fill_rate(results: Microbench) -> Estimate:
    """Completion of copies large enough to be limited by it."""
    where = {"copy": "tensor", "bytes": (4096, 8192, 16384)}
    return _centre(results.column("tma.tma_issue", "bytes_per_cycle", **where))


def _syncthreads(results: Microbench) -> tuple[Estimate, Estimate]:
    """Cycles of a barrier of all threads, over warps."""
    threads, cycles = (results.column("sync.named_barrier", c, what="sync") for c in ("threads", "cycles"))
    return _line(threads / 32, cycles)


def _dispatch(results: Microbench) -> Estimate:
    """Nanoseconds per CTA of an empty kernel, over grids that outnumber the SMs' places."""
    ctas, us = (results.column("launch.empty_kernel", c, ctas=(528, 1056, 2112, 8448)) for c in ("ctas", "time"))
    return _line(ctas, 1e3 * us)[1]


def _barrier(table: str, results: Microbench, **where: object) -> Estimate:
    return _centre(results.column(f"sync.{table}", "cycles", **where))


def _registers(results: Microbench) -> Estimate:
    """Of a setmaxnreg that gives registers back; one that takes them waits for others."""
    return _centre(results.column("sync.setmaxnreg", "dec"))


def _l2_rate(results: Microbench) -> Estimate:
    """Sets that fill most of L2 and still fit, read by all SMs."""
    sets = [f"set {megabytes} MB" for megabytes in (20, 25, 30, 35, 40, 45)]
    return _centre(results.column("memory.stream", "chip", level=sets))


def _l2_latency(results: Microbench) -> Estimate:
    """Median over lines and SMs, near and far."""
    return _centre(results.column("memory.l2_hit_latency", "cycles", quantile=0.5))


def _hbm_rate(results: Microbench) -> Estimate:
    """4 GB read once by all SMs, with at least 128 KiB of each in flight."""
    where = {"level": "hbm", "ctas": 132, "in_flight": (131072, 196608)}
    return _centre(1e9 * results.column("memory.stream", "throughput", **where))


def _hbm_latency(results: Microbench) -> Estimate:
    """Dependent loads of lines that are not in L2."""
    return _centre(results.column("memory.latency_by_set", "cycles", note="L2 flushed, no line read twice"))


def _reduce_rate(results: Microbench) -> Estimate:
    """Bulk FP32 reduce-add by all SMs, a tile shared by 1 to 8 CTAs."""
    return _centre(results.column("atomics.reduce_add", "chip", op="bulk reduce f32", ctas=132))


def _ramp(results: Microbench) -> Estimate:
    """Nanoseconds a kernel in a graph takes beyond the work of its CTAs."""
    return _centre(1e3 * results.column("launch.kernel_overhead", "overhead"))


def _turnover(results: Microbench) -> Estimate:
    return _centre(results.column("launch.cta_turnover", "median"))


RULES = (
    # sub-core pipes
    Rule("sm.issue.stall_cycles", "corun", _stall, 0.01),
    Rule("sm.fma.ops_per_cycle", "pipes", partial(_rate, "ffma"), POWER_OF_TWO),
    Rule("sm.fma.latency_cycles", "pipes", partial(_latency, "ffma")),
    Rule("sm.alu.ops_per_cycle", "pipes", partial(_rate, "fmnmx"), POWER_OF_TWO),
    Rule("sm.alu.latency_cycles", "pipes", partial(_latency, "fmnmx")),
    Rule("sm.alu.convert_ops_per_cycle", "pipes", partial(_rate, "f2fp"), POWER_OF_TWO),
    Rule("sm.mufu.ops_per_cycle", "pipes", partial(_rate, "ex2"), POWER_OF_TWO),
    Rule("sm.mufu.latency_cycles", "pipes", partial(_latency, "ex2")),
    Rule("sm.lsu.shuffle_ops_per_cycle", "pipes", partial(_rate, "shfl"), POWER_OF_TWO),
    Rule("sm.lsu.shuffle_latency_cycles", "pipes", partial(_latency, "shfl")),
    Rule("sm.smem.bytes_per_cycle", "pipes", _smem_rate, POWER_OF_TWO),
    Rule("sm.smem.latency_cycles", "pipes", partial(_latency, "ld.shared chase")),
    Rule("sm.tensor.flops_per_cycle.bf16", "wgmma", _wgmma_rate, POWER_OF_TWO),
    Rule("sm.tensor.mma_sync_flops_per_cycle", "corun_mma_sync", _mma_sync_rate, 10),
    Rule("sm.tensor.async_mma.overhead_cycles", "corun", _wgmma_overhead, 0.1),
    # beside wgmma
    Rule("sm.interference.alu_cycles", "corun", partial(_beside, ("fmnmx", "f2fp"), (2, 3)), 0.1),
    Rule("sm.interference.mufu_cycles", "corun", partial(_beside, ("ex2",), (2, 3)), 0.1),
    Rule("sm.interference.alu_port_cycles", "corun", partial(_port, 0), 0.1),
    Rule("sm.interference.fsel_port_cycles", "corun", _fsel_port, 0.1),
    Rule("sm.interference.ffma_port_cycles", "corun", partial(_port, 1), 0.1),
    Rule("sm.interference.fmul_port_cycles", "corun", partial(_port, 2), 0.1),
    Rule("sm.interference.shuffle_cycles", "corun", partial(_beside, ("shfl",), (1, 2))),
    Rule("sm.interference.shuffle_latency_cycles", "corun", _shuffle_chain),
    Rule("sm.interference.fadd_port_cycles", "softmax", _fadd_port, 0.1),
    Rule("sm.interference.ex2_wait_cycles", "softmax", partial(_ex2_wait, {"fmnmx": 16, "f2fp": 16, "fadd": 2}), 0.1),
    Rule("sm.interference.ex2_wait_ffma_cycles", "softmax", partial(_ex2_wait, {"ffma": 3}), 0.1),
    Rule("sm.interference.ffma_delay_cycles", "softmax", partial(_part_delay, "exp", np.mean), 0.1),
    Rule("sm.interference.fmul_delay_cycles", "corun", partial(_delay, "fmul"), 0.1),
    Rule("sm.interference.fadd_delay_cycles", "softmax", partial(_part_delay, "sum", np.median), 0.1),
    Rule("sm.interference.alu_delay_cycles", "softmax", partial(_part_delay, "row max", np.median), 0.1),
    Rule("sm.interference.fmul_stop_cycles", "softmax", _fmul_stop, 0.1),
    Rule("sm.interference.absorbed_per_cycle", "corun", _absorbed, 0.01),
    # copies
    Rule("sm.tma.issue_interval_cycles", "tma", _issue_interval),
    Rule("sm.tma.latency_cycles", "tma", _load_latency, 20),
    Rule("sm.tma.bytes_per_cycle", "tma", _fill_rate, 4),
    Rule("sm.tma.multicast_extra_cycles", "tma", _multicast),
    Rule("sm.tma.store_bytes_per_cycle", "tma", lambda r: _inverse(_store_line(r)[1])),
    Rule("sm.tma.store_latency_cycles", "tma", lambda r: _store_line(r)[0]),
    # barriers
    Rule(
        "sm.sync.mbarrier_wake_cycles",
        "sync",
        partial(_barrier, "mbarrier", what="arrive to resume", threads_per_side=32),
    ),
    Rule("sm.sync.remote_arrive_cycles", "sync", partial(_barrier, "cluster", what="dsmem load"), 10),
    Rule("sm.sync.named_barrier_cycles", "sync", partial(_barrier, "named_barrier", what="turn", threads=128)),
    Rule("sm.sync.syncthreads_base_cycles", "sync", lambda r: _syncthreads(r)[0]),
    Rule("sm.sync.syncthreads_per_warp_cycles", "sync", lambda r: _syncthreads(r)[1]),
    # memory system
    Rule("l2.bytes_per_cycle", "memory", _l2_rate, 50, of_the_chip=True),
    Rule("l2.latency_cycles", "memory", _l2_latency, of_the_chip=True),
    Rule("hbm.achieved_bytes_per_second", "memory", _hbm_rate, 1e11, of_the_chip=True),
    Rule("hbm.latency_cycles", "memory", _hbm_latency, 10, of_the_chip=True),
    Rule("atomics.reduce_bytes_per_cycle", "atomics", _reduce_rate, 100, of_the_chip=True),
    # life of a CTA
    Rule("launch.ramp_ns", "launch", _ramp, 10),
    Rule("launch.cta_dispatch_ns", "launch", _dispatch, 0.1),
    Rule("launch.cta_turnover_cycles", "launch", _turnover, 10),
    Rule("launch.registers_realloc_cycles", "sync", _registers, 10),
)
