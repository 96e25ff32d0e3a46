"""A synthetic run with a trace, built by hand: FA3-like forward, two SMs, no simulator needed.

The durations are round numbers near the H200's for a 128 x 176 tile at head dim 128: a QK or PV
of one warpgroup is 704 tensor cycles, the vector work of one block 1950 cycles. With ping-pong the
two consumers alternate on the tensor core; without it they compute their softmax at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO

import numpy as np
from rich.console import Console

from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import Run, Trace
from fasim.views.report import render_report

TICKS = 4
TRACKS = ("producer", "consumer0", "consumer1", "tensor", "tma")
TENSOR, TMA = TRACKS.index("tensor"), TRACKS.index("tma")
NAMES = ("", "QK", "PV", "row_max", "exp2", "rescale", "load K", "load V", "turn", "K", "store O")
GEMM_CYCLES, LOAD_CYCLES, BLOCKED_CYCLES, WAKE_CYCLES = 704, 560, 1054, 46
SOFTMAX = (("row_max", "work", 420), ("exp2", "pipe", 140), ("exp2", "work", 940), ("rescale", "work", 450))


def report_text(run: Run, width: int = 100) -> str:
    """The report as plain text without colour, lines at most ``width`` characters."""
    console = Console(file=StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(render_report(run))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


@dataclass
class Recorder:
    """Collects slices given in cycles; ``now[track]`` is where a role's last slice ended."""

    sm: int
    slot: int
    rows: list[tuple[int, ...]] = field(default_factory=list)
    now: dict[int, int] = field(default_factory=dict)
    unit_free: dict[int, int] = field(default_factory=lambda: {TENSOR: 0, TMA: 0})

    def role(self, track: int, until: int, reason: str, name: str = "", at: tuple[int, int] = (-1, -1)) -> int:
        start = self.now.get(track, 0)
        if until > start:
            self._add(start, until, track, name, REASONS.index(reason), at, -1)
            self.now[track] = until
        return self.now.get(track, 0)

    def unit(self, track: int, ready: int, cycles: int, name: str, at: tuple[int, int], owner: int) -> tuple[int, int]:
        start = max(ready, self.unit_free[track])
        self.unit_free[track] = start + cycles
        self._add(start, start + cycles, track, name, UNIT_SLICE, at, owner)
        return start, start + cycles

    def _add(self, start: int, end: int, track: int, name: str, kind: int, at: tuple[int, int], owner: int) -> None:
        ticks = start * TICKS, end * TICKS
        self.rows.append((*ticks, self.sm, self.slot, track, NAMES.index(name), kind, *at, owner, -1))


def _softmax(rec: Recorder, c: int, at: tuple[int, int]) -> int:
    for name, reason, cycles in SOFTMAX:
        rec.role(c, rec.now[c] + cycles, reason, name, at)
    return rec.now[c]


def _pingpong_block(rec: Recorder, at: tuple[int, int], full: int, turn: int) -> int:
    for c in (1, 2):
        rec.role(c, full, "full", "K", at)
        start = rec.role(c, turn, "barrier", "turn", at)
        first, _ = rec.unit(TENSOR, start, GEMM_CYCLES, "QK", at, c)
        rec.unit(TENSOR, start, GEMM_CYCLES, "PV", at, c)
        turn = rec.role(c, first + BLOCKED_CYCLES, "issue", "QK", at)
        rec.role(c, turn + WAKE_CYCLES, "dependency", "QK", at)
        _softmax(rec, c, at)
    return turn


def _serial_block(rec: Recorder, at: tuple[int, int], full: int) -> None:
    for gemm in ("QK", "PV"):
        for c in (1, 2):
            start = rec.role(c, full, "full", "K", at)
            first, last = rec.unit(TENSOR, start, GEMM_CYCLES, gemm, at, c)
            rec.role(c, first + GEMM_CYCLES // 2, "issue", gemm, at)
            rec.role(c, last + WAKE_CYCLES, "dependency", gemm, at)
            if gemm == "QK":
                _softmax(rec, c, at)


def _cta(sm: int, slot: int, pingpong: bool, tiles: int, blocks: int) -> Recorder:
    rec = Recorder(sm, slot)
    launch = 900 + 137 * sm + 350 * slot
    for role in (0, 1, 2):
        rec.role(role, launch, "launch")
    turn, released = launch, [launch, launch]  # two stages of K and V
    for tile in range(tiles):
        for block in range(blocks):
            at = (tile, block)
            rec.role(0, released[-2], "empty", "K", at)
            issued = rec.role(0, rec.now[0] + 40, "issue", "load K", at)
            rec.unit(TMA, issued, LOAD_CYCLES, "load K", at, 0)
            _, full = rec.unit(TMA, issued, LOAD_CYCLES, "load V", at, 0)
            if pingpong:
                turn = _pingpong_block(rec, at, full - LOAD_CYCLES, turn)
            else:
                _serial_block(rec, at, full)
            released.append(min(rec.now[1], rec.now[2]))
        for c in (1, 2):
            rec.role(c, rec.now[c] + 420, "memory", "store O", (tile, -1))
    end = max(rec.now.values())
    for role in (0, 1, 2):
        rec.role(role, end, "tail")
    return rec


def sample_trace(*, pingpong: bool = True, sms: int = 2, slots: int = 1, tiles: int = 2, blocks: int = 8) -> Trace:
    """Trace of ``tiles`` work tiles of ``blocks`` KV blocks on each SM and CTA slot."""
    recorders = [_cta(sm, slot, pingpong, tiles, blocks) for sm in range(sms) for slot in range(slots)]
    rows = np.array([row for rec in recorders for row in rec.rows], dtype=np.int64)
    columns = rows[np.lexsort((rows[:, 4], rows[:, 2], rows[:, 0]))].T
    return Trace(TICKS, TRACKS, NAMES, *(np.ascontiguousarray(column) for column in columns))


def sample_run(*, pingpong: bool = True, slots: int = 1) -> Run:
    """The run that belongs to :func:`sample_trace`, with the tensor and stall figures of the trace."""
    trace = sample_trace(pingpong=pingpong, slots=slots)
    ticks = trace.end - trace.start
    total = int(trace.end.max())
    stalls = {}
    for role in (0, 1, 2):
        mine = trace.track == role
        share = [float(ticks[mine & (trace.kind == k)].sum() / ticks[mine].sum()) for k in range(len(REASONS))]
        stalls[TRACKS[role]] = {reason: 100 * s for reason, s in zip(REASONS, share, strict=True)}
    tensor, tma = (float(100 * ticks[trace.track == t].sum() / (2 * slots * total)) for t in (TENSOR, TMA))
    utilisation = {"tensor": tensor, "mufu": 54.2, "fma": 38.4, "alu": 47.1, "issue": 41.0, "lsu": 2.2}
    utilisation |= {"smem": 49.3, "tma": tma, "l2": 31.5, "hbm": 22.4}
    clock = 1600.0
    return Run(
        cycles=total / TICKS,
        time_us=total / TICKS / clock,
        clock_mhz=clock,
        tflops=tensor / 100 * 4096 * 132 * clock * 1e6 / 1e12,
        peak_percent=tensor,
        bottleneck="tensor" if pingpong else "latency",
        utilisation=utilisation,
        utilisation_steady={unit: min(100.0, 1.08 * value) for unit, value in utilisation.items()},
        stalls=stalls,
        traffic={"l2_read_bytes": 1.99e8, "l2_write_bytes": 8.65e6, "hbm_read_bytes": 2.6e7, "hbm_write_bytes": 8.65e6},
        events=len(trace),
        meta={
            "fasim_version": "0.1.0",
            "schedule": "fa3",
            "arch": "h200",
            "arch_digest": "5f2c9d1e77aa",
            "overrides": ["sm.mufu.ops_per_cycle=16"],
            "knobs": {"pingpong": pingpong, "tile_m": 128, "tile_n": 176, "stages": 2},
            "knobs_set": {} if pingpong else {"pingpong": False},
            "problem": {"batch": 3, "seqlen_q": 1408, "heads_q": 8, "head_dim": 128, "dtype": "bf16"},
            "problem_text": "B3 S1408 H8 d128 bf16 forward",
            "engine": "compiled",
            "clock_reason": "h200.toml: sustained clock of 16-bit tensor work",
            "tiles": 264,
            "ctas": 132,
            "ctas_per_sm": slots,
            "waves": 2.0,
        },
        trace=trace,
    )
