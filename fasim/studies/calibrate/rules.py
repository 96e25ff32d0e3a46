"""Which number of an architecture file follows from which microbenchmark: one rule per number, in the file's order.

A rule gives the table it reads, the formula, and the step its result is rounded to (``grain``), which is about the
spread between two chips of a model. ``measured`` is a mean or median of like measurements, ``fitted`` a least-squares
fit (scipy, with bounds) where several measurements determine the number. What no benchmark determines has no rule:
capacities of data sheets, clocks, the issue queue of wgmma (``validation/data/h200_pingpong_micro.csv``), and the costs
while mma.sync runs (``validation/data/h200_corun_hmma.csv``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fasim.studies.calibrate import wgmma
from fasim.studies.calibrate.estimates import LANES, Estimate, centre, line, plus
from fasim.studies.calibrate.microbench import Microbench

#: A ``grain``: the nearest power of two.
POWER_OF_TWO = 0.0


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


# ---- pipes ----


def _rate(op: str, results: Microbench) -> Estimate:
    return centre(results.column("pipes.rate", "lanes_per_cycle", op=op, warps=(8, 12, 16, 32)))


def _latency(op: str, results: Microbench) -> Estimate:
    return centre(results.column("pipes.latency", "cycles", op=op))


def _smem_rate(results: Microbench) -> Estimate:
    """512 bytes per warp instruction over its cycles, with warps enough to fill the port."""
    return centre(512 / results.column("pipes.smem_rate", "cycles_per_instr", op="ld.shared.v4", warps=(4, 8, 16)))


def _wgmma_rate(table: str, depth: int, results: Microbench) -> Estimate:
    """2 m n k FLOP of a wgmma m64nNk``depth`` over its interval, issued without gaps."""
    where = {"n": (64, 128, 160, 224, 256), "instr_per_group": 8, "groups_in_flight": 2}
    n, cycles = (results.column(f"wgmma.{table}", c, **where) for c in ("n", "cycles_per_instr"))
    return centre(2 * 64 * depth * n / cycles)


def _wgmma_overhead(results: Microbench) -> Estimate:
    """Tensor time per instruction beyond its FLOPs: two warpgroups keep the tensor core busy."""
    where = {"vector": "none", "mma_groups": 2, "n": (64, 128, 176, 192, 256)}
    ideal, cycles = (results.column("corun.corun", c, **where) for c in ("mma_ideal", "mma_cycles_per_instr"))
    return centre(cycles - ideal)


def _mma_sync_rate(results: Microbench) -> Estimate:
    """2 m n k FLOP of m16n8k16 on four sub-cores over its interval, with warps enough to hide the latency."""
    where = {"vector": "none", "mma_warps": (2, 3, 4)}
    cycles = results.column("corun_mma_sync.corun_mma_sync", "mma_cycles_per_instr", **where)
    return centre(4 * 2 * 16 * 8 * 16 / cycles)


def _stall(results: Microbench) -> Estimate:
    """What one warp loses per instruction: the softmax mix (4.5 instructions) by one warp a sub-core and by three."""
    one, three = (
        LANES
        / results.column("corun.corun", "vector_lanes_per_cycle", vector="softmax_mix", vector_groups=g, mma_groups=0)
        for g in (1, 3)
    )
    return centre((one - three) / 4.5)


# ---- copies, barriers, launch ----


def _load_line(results: Microbench) -> tuple[Estimate, Estimate]:
    """Latency from issue and cycles per byte of one copy by TMA that hits L2."""
    where = {"from": "l2", "copy": "tensor"}
    return line(*(results.column("tma.tma_latency", column, **where) for column in ("bytes", "cycles")))


def _load_latency(results: Microbench) -> Estimate:
    waiting = results.column("sync.mbarrier", "cycles", what="try_wait success")
    return plus(_load_line(results)[0], -float(waiting[0]))


def _issue_interval(results: Microbench) -> Estimate:
    """Of copies so small that the issue of the next does not wait for them."""
    return centre(results.column("tma.tma_issue", "issue_interval", copy="tensor", bytes=(1024, 2048)))


def _multicast(results: Microbench) -> Estimate:
    own, both = (
        results.column("tma.tma_multicast", "cycles_cta0", mode=m) for m in ("own copy each", "one CTA for both")
    )
    return centre(both - own)


def _store_line(results: Microbench) -> tuple[Estimate, Estimate]:
    """Cycles of a bulk store from issue to its source being free, over its bytes."""
    return line(*(results.column("tma.tma_store", column) for column in ("bytes", "read_done")))


def _inverse(estimate: Estimate) -> Estimate:
    assert isinstance(estimate.value, float)
    return Estimate(1.0 / estimate.value, estimate.residual, estimate.count, estimate.how)


def _fill_rate(results: Microbench) -> Estimate:
    """Completion of copies large enough to be limited by it."""
    where = {"copy": "tensor", "bytes": (4096, 8192, 16384)}
    return centre(results.column("tma.tma_issue", "bytes_per_cycle", **where))


def _syncthreads(results: Microbench) -> tuple[Estimate, Estimate]:
    """Cycles of a barrier of all threads, over warps."""
    threads, cycles = (results.column("sync.named_barrier", c, what="sync") for c in ("threads", "cycles"))
    return line(threads / 32, cycles)


def _dispatch(results: Microbench) -> Estimate:
    """Nanoseconds per CTA of an empty kernel, over grids that outnumber the SMs' places."""
    ctas, us = (results.column("launch.empty_kernel", c, ctas=(528, 1056, 2112, 8448)) for c in ("ctas", "time"))
    return line(ctas, 1e3 * us)[1]


def _barrier(table: str, results: Microbench, **where: object) -> Estimate:
    return centre(results.column(f"sync.{table}", "cycles", **where))


def _registers(results: Microbench) -> Estimate:
    """Of a setmaxnreg that gives registers back; one that takes them waits for others."""
    return centre(results.column("sync.setmaxnreg", "dec"))


def _l2_rate(results: Microbench) -> Estimate:
    """Sets that fill most of L2 and still fit, read by all SMs."""
    sets = [f"set {megabytes} MB" for megabytes in (20, 25, 30, 35, 40, 45)]
    return centre(results.column("memory.stream", "chip", level=sets))


def _l2_latency(results: Microbench) -> Estimate:
    """Median over lines and SMs, near and far."""
    return centre(results.column("memory.l2_hit_latency", "cycles", quantile=0.5))


def _hbm_rate(results: Microbench) -> Estimate:
    """4 GB read once by all SMs, with at least 128 KiB of each in flight."""
    where = {"level": "hbm", "ctas": 132, "in_flight": (131072, 196608)}
    return centre(1e9 * results.column("memory.stream", "throughput", **where))


def _hbm_latency(results: Microbench) -> Estimate:
    """Dependent loads of lines that are not in L2."""
    return centre(results.column("memory.latency_by_set", "cycles", note="L2 flushed, no line read twice"))


def _slowest_line(results: Microbench) -> Estimate:
    """Copies of 16 KiB from HBM less such from L2, beyond what a single load takes longer; ten quantiles."""
    from_l2, missed = (results.column("tma.tma_miss", "cycles", **{"from": source}) for source in ("l2", "hbm"))
    single = _hbm_latency(results).value, _l2_latency(results).value
    assert isinstance(single[0], float) and isinstance(single[1], float)
    extra = missed - np.median(from_l2) - (single[0] - single[1])
    return Estimate(tuple(map(float, np.maximum(0.0, extra))), float(np.std(from_l2)), len(missed))


def _reduce_rate(results: Microbench) -> Estimate:
    """Bulk FP32 reduce-add by all SMs, a tile shared by 1 to 8 CTAs."""
    return centre(results.column("atomics.reduce_add", "chip", op="bulk reduce f32", ctas=132))


def _ramp(results: Microbench) -> Estimate:
    """Nanoseconds a kernel in a graph takes beyond the work of its CTAs."""
    return centre(1e3 * results.column("launch.kernel_overhead", "overhead"))


def _turnover(results: Microbench) -> Estimate:
    return centre(results.column("launch.cta_turnover", "median"))


#: Streams that fill the operand port: instruction -> dependent chains.
_SATURATING = {"fmnmx": 16, "f2fp": 16, "fadd": 2}

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
    Rule("sm.tensor.flops_per_cycle.bf16", "wgmma", partial(_wgmma_rate, "wgmma_interval", 16), POWER_OF_TWO),
    Rule("sm.tensor.flops_per_cycle.fp8", "wgmma", partial(_wgmma_rate, "wgmma_fp8", 32), POWER_OF_TWO),
    Rule("sm.tensor.mma_sync_flops_per_cycle", "corun_mma_sync", _mma_sync_rate, 10),
    Rule("sm.tensor.async_mma.overhead_cycles", "corun", _wgmma_overhead, 0.1),
    # beside wgmma
    Rule("sm.interference.alu_cycles", "corun", partial(wgmma.beside, ("fmnmx", "f2fp"), (2, 3)), 0.1),
    Rule("sm.interference.mufu_cycles", "corun", partial(wgmma.beside, ("ex2",), (2, 3)), 0.1),
    Rule("sm.interference.alu_port_cycles", "corun", partial(wgmma.port, 0), 0.1),
    Rule("sm.interference.fsel_port_cycles", "corun", wgmma.fsel_port, 0.1),
    Rule("sm.interference.ffma_port_cycles", "corun", partial(wgmma.port, 1), 0.1),
    Rule("sm.interference.fmul_port_cycles", "corun", partial(wgmma.port, 2), 0.1),
    Rule("sm.interference.shuffle_cycles", "corun", partial(wgmma.beside, ("shfl",), (1, 2))),
    Rule("sm.interference.shuffle_latency_cycles", "corun", wgmma.shuffle_chain),
    Rule("sm.interference.fadd_port_cycles", "softmax", wgmma.fadd_port, 0.1),
    Rule("sm.interference.ex2_wait_cycles", "softmax", partial(wgmma.ex2_wait, _SATURATING), 0.1),
    Rule("sm.interference.ex2_wait_ffma_cycles", "softmax", partial(wgmma.ex2_wait, {"ffma": 3}), 0.1),
    Rule("sm.interference.ffma_delay_cycles", "softmax", partial(wgmma.part_delay, "exp", np.mean), 0.1),
    Rule("sm.interference.fmul_delay_cycles", "corun", partial(wgmma.delay, "fmul"), 0.1),
    Rule("sm.interference.fadd_delay_cycles", "softmax", partial(wgmma.part_delay, "sum", np.median), 0.1),
    Rule("sm.interference.alu_delay_cycles", "softmax", partial(wgmma.part_delay, "row max", np.median), 0.1),
    Rule("sm.interference.fmul_stop_cycles", "softmax", wgmma.fmul_stop, 0.1),
    Rule("sm.interference.absorbed_per_cycle", "corun", wgmma.absorbed, 0.01),
    Rule("sm.interference.absorbed_ahead_cycles", "corun", wgmma.absorbed_ahead, 10),
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
    Rule("hbm.slowest_line_cycles", "tma", _slowest_line, 10),
    Rule("atomics.reduce_bytes_per_cycle", "atomics", _reduce_rate, 100, of_the_chip=True),
    # life of a CTA
    Rule("launch.ramp_ns", "launch", _ramp, 10),
    Rule("launch.cta_dispatch_ns", "launch", _dispatch, 0.1),
    Rule("launch.cta_turnover_cycles", "launch", _turnover, 10),
    Rule("launch.registers_realloc_cycles", "sync", _registers, 10),
)
