"""Triton's fused-attention tutorial, forward, on Blackwell.

The program of ``triton_sm80.py``, one per query block, with S, P and O in tensor memory and K and V copied by TMA.

* Without ``warp_specialize`` all warps move in step; PV of a block and QK of the next are issued back to back.
* With it (the default) the compiler makes four partitions: load, MMA, softmax, and the correction that rescales O. S
  has two buffers, so that QK runs ahead of the softmax.
* FP8: P is rounded to FP8 as well; V lies in memory with its keys contiguous, put so before the kernel, because tcgen05
  wants FP8 operands that way. The output has 16 bits here.

Sources: tutorial 06-fused-attention.py and the code that Triton 3.6 and 3.9 make of it and of
``validation/triton_attention.py``: TTGIR for order, waits and buffers, SASS for instruction counts (builds/triton).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from fasim.arch import Arch
from fasim.kernels import programs
from fasim.kernels import programs_tmem as tmem
from fasim.kernels.blocks import kv_loops
from fasim.kernels.programs import Knobs, Program
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.effects import Move
from fasim.program.language import Kernel, Role, Smem, arrived, waited
from fasim.program.library import schedule


@dataclass(frozen=True)
class TmaKnobs(Knobs):
    """What can be changed here."""

    copies: Annotated[Literal["tma"] | None, "who copies K and V: on Blackwell TMA"] = None


@schedule(architectures=("blackwell",), dtypes=("bf16", "fp16", "fp8"))
def triton(problem: Problem, arch: Arch, knobs: TmaKnobs, build: Build) -> Kernel:
    """Triton's fused-attention tutorial: one program per query block, softmax and MMA in turn."""
    p = programs.choose(problem, arch, build, knobs, "tma")
    specialized = knobs.warp_specialize is not False
    k = programs.begin(p, knobs, specialized)
    (partitions if specialized else in_step)(k, p)
    return k


def in_step(k: Kernel, p: Program) -> None:
    """PV of this block and QK of the next are issued together, after the softmax."""
    q, key, value, o = programs.operands(k, p)
    tmem.allocate(k, p, 1)
    k.smem("Q", q.shape.bytes)
    keys, values = (k.stages(*x, p.stages) for x in (key, value))
    programs.output_buffer(k, q, o)
    s_full, pv_done = k.barrier("S.full", 1), k.barrier("PV.done", 1)
    with k.role("program", warps=p.warps, registers=programs.registers(p, "program")) as c, c.tiles():
        programs.load_q(c, p, q)
        for region, masked in kv_loops(k.tiles, ascending=True):
            for stages, trips in ((values, "ahead"), (keys, "buffers")):
                with c.loop(f"{region} {trips}", "prefetch"):
                    c.fill(stages)
            with c.loop(f"{region} any", "first QK"):
                c.wait(keys)
                tmem.qk(c, p, keys, s_full)
            # QK of a block is complete one iteration before its PV, so K is copied one block further ahead than V
            for trips, copied in (("both", (values, keys)), ("last V", (values,)), ("drain", ()), ("any", ())):
                with c.loop(f"{region} {trips}", region):
                    c.wait_barrier(s_full, reason="dependency", label="wait QK")
                    tmem.row_max(c, p, masked, s_full)
                    tmem.probabilities(c, p)
                    c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
                    c.wait(values)
                    tmem.store_p(c, p)
                    tmem.rescale(c, p)
                    programs.sync_warps(c, p)
                    tmem.pv(c, p, values, pv_done)
                    if trips != "any":
                        c.wait(keys)
                        tmem.qk(c, p, keys, s_full)
                    for stages in copied:
                        programs.sync_warps(c, p)
                        c.fill(stages)
                    programs.overhead(c, p)
        c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
        tmem.load_output(c, p)
        programs.store_output(c, p, o)


def partitions(k: Kernel, p: Program) -> None:
    """The compiler's four partitions, which meet at the end of each loop over blocks."""
    q, key, value, o = programs.operands(k, p)
    tmem.allocate(k, p, 2)
    k.launch_registers = programs.registers(p, "launch")
    queries = k.ring(*q, 1, consumers=1, boxes=-(-p.d // 64))
    keys, values = (k.stages(*x, p.stages) for x in (key, value))
    programs.output_buffer(k, q, o)
    k.smem("alpha", 4 * p.m, 2)  # the correction may be a block behind
    qk_done, pv_done = k.barrier("QK.done", 1), k.barrier("PV.done", 1)
    s_free, p_full, maximum, o_ready = (k.barrier(name, 1) for name in ("S.free", "P.full", "maximum", "O.ready"))
    meet = k.barrier("region", 4, named=True)

    def loops(role: Role, *trips: str) -> Iterator[tuple[bool, str]]:
        for region, masked in kv_loops(k.tiles, ascending=True):
            for part in trips:
                with role.loop(f"{region} {part}".strip(), region):
                    yield masked, part
            role.sync(meet, label="end of region")

    with k.role("load", warps=1, registers=programs.registers(p, "load")) as w, w.tiles():
        w.load(queries)
        for _, part in loops(w, "primed", "rest", "last"):
            if part != "primed":
                w.wait_barrier(pv_done, reason="empty", ahead=p.stages, label="wait V free")
                w.fill(values)
            if part != "last":
                w.wait_barrier(qk_done, reason="empty", ahead=p.stages, label="wait K free")
                w.fill(keys)
    with k.role("mma", warps=1, registers=programs.registers(p, "mma")) as t, t.tiles():
        t.wait(queries)
        for _, part in loops(t, "primed", "rest", "last"):
            if part != "primed":
                t.wait(values)
                t.wait_barrier(o_ready, reason="full")
                t.wait_barrier(p_full, reason="full")
                tmem.pv(t, p, values, pv_done)
            if part != "last":
                t.wait(keys)
                t.wait_barrier(s_free, reason="empty", ahead=2)
                tmem.qk(t, p, keys, qk_done)
        t.release(queries)
    with k.role("correction", warps=4, registers=programs.registers(p, "correction")) as c, c.tiles():
        for _ in loops(c, ""):
            c.wait_barrier(maximum, reason="full")
            alpha = (Move(Smem("alpha", after=waited(maximum)), "alpha"),)
            c.vector("scale", p.mix("correction"), latency={"smem": 1, "ex2": 1}, effects=alpha)
            c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
            tmem.rescale(c, p)
            c.arrive(o_ready)
    with k.role("softmax", warps=p.warps, registers=programs.registers(p, "softmax")) as s, s.tiles():
        programs.cold(s, p, "setup", "setup_partition")
        for masked, _ in loops(s, ""):
            s.wait_barrier(qk_done, reason="full", label="wait QK")
            tmem.row_max(s, p, masked, qk_done, Move("alpha", Smem("alpha", after=arrived(maximum), back=-1)))
            s.arrive(s_free)
            s.arrive(maximum)
            tmem.probabilities(s, p)
            s.wait_barrier(pv_done, reason="empty", ahead=1, label="wait P free")
            tmem.store_p(s, p)
            s.arrive(p_full)
        s.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
        tmem.load_output(s, p)
        programs.store_output(s, p, o)
