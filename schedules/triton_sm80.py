"""Triton's fused-attention tutorial, forward, on Ampere and Hopper.

One program (CTA) per block of ``tile_m`` query rows and head, blocks of a head next to each other; a loop over blocks
of ``tile_n`` keys, ascending: first those that need no mask, then the others. Each loop is software-pipelined on its
own, so the second one refills the pipeline. P stays in registers, O is rescaled in every iteration. All warps of a
program move in step between barriers, so its tensor and vector work hardly overlap; what fills the gaps is a second
program on the SM, where it fits.

* Ampere: mma.sync from shared memory, ``stages`` - 1 buffers each of K and V.
* Hopper: wgmma, QK waited for before the softmax; PV runs on beside the next copies, until that wait.
* ``warp_specialize``: the compiler ignores the hint on Hopper; what runs here is a TMA producer warp and warpgroups
  that wait for nothing but their own data.
* FP8 (Hopper): P is rounded to FP8 as well; V lies in memory with its keys contiguous, put so before the kernel,
  because wgmma wants FP8 operands that way. The output has 16 bits here.

Sources: tutorial 06-fused-attention.py and the code that Triton 3.6 and 3.9 make of it and of
``validation/triton_attention.py``: TTGIR for order, waits and buffers, SASS for instruction counts (builds/triton).
"""

from __future__ import annotations

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels import programs
from fasim.kernels import programs_registers as registers
from fasim.kernels.blocks import kv_loops
from fasim.kernels.programs import Knobs, Program
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.language import Kernel, Role, Stages
from fasim.program.library import schedule


@schedule(architectures=("ampere", "hopper"), dtypes=("bf16", "fp16", "fp8"))
def triton(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> Kernel:
    """Triton's fused-attention tutorial: one program per query block, softmax and MMA in turn."""
    specialized = bool(knobs.warp_specialize)
    tma = specialized if knobs.copies is None else knobs.copies == "tma"
    if arch.architecture == "ampere" and (tma or specialized):
        raise ConfigError(f"triton: {arch.name} has no TMA: copies=tma and warp_specialize need Hopper or Blackwell")
    p = programs.choose(problem, arch, build, knobs, "tma" if tma else "threads")
    k = programs.begin(p, knobs, specialized)
    (loads_apart if specialized else in_step)(k, p)
    return k


def in_step(k: Kernel, p: Program) -> None:
    """Every warp copies ahead, multiplies and takes its part of the softmax."""
    q, key, value, o = programs.operands(k, p)
    k.smem("Q", q.shape.bytes)
    buffers = p.stages if p.wgmma else p.stages - 1
    keys, values = (k.stages(*x, buffers, boxes=None if p.tma else 1) for x in (key, value))
    programs.output_buffer(k, q, o)
    with k.role("program", warps=p.warps, registers=registers.count(p)) as c, c.tiles():
        programs.load_q(c, p, q)
        for number, (region, masked) in enumerate(kv_loops(k.tiles, ascending=True)):
            if number > 0:
                programs.cold(c, p, "between the loops", "between")
            with c.loop(f"{region} ahead", "prefetch"):
                c.fill(keys, p.engine)
                c.fill(values, p.engine)
            with c.loop(f"{region} steady", region):
                block(c, p, keys, values, masked)
                programs.sync_warps(c, p)
                c.fill(keys, p.engine)
                c.fill(values, p.engine)
            with c.loop(f"{region} ahead", region):
                block(c, p, keys, values, masked)
            if p.wgmma:
                c.wait_mma(0, "wait PV")
            programs.sync_warps(c, p)  # all are done with Q, K and V: the next loop's blocks land there, or O
        programs.store_output(c, p, o)


def block(c: Role, p: Program, keys: Stages, values: Stages, masked: bool) -> None:
    """One block of keys: QK, softmax, PV in turn."""
    landed(c, p, keys)
    if not p.tma:
        landed(c, p, values)
        programs.sync_warps(c, p)
    programs.overhead(c, p)
    registers.qk(c, p, keys)
    registers.online_softmax(c, p, masked)
    if p.tma:
        landed(c, p, values)
    registers.pv(c, p, values)
    registers.spill(c, p)
    registers.row_sum(c, p)


def landed(c: Role, p: Program, stages: Stages) -> None:
    """Wait for the oldest copy: an mbarrier (TMA), or cp.async.wait_group, which costs no polling."""
    if p.tma:
        c.wait(stages)
    else:
        c.wait_filled(stages, "full")


def loads_apart(k: Kernel, p: Program) -> None:
    """A producer warp fills rings by TMA; warpgroups of ``tile_m`` / ``warpgroups`` rows go at their own pace."""
    q, key, value, o = programs.operands(k, p)
    groups = p.warps // 4
    queries, keys, values = (
        k.ring(*x, stages, consumers=groups, boxes=-(-x.shape.columns // 64))
        for x, stages in ((q, 1), (key, p.stages), (value, p.stages))
    )
    programs.output_buffer(k, q, o)
    together = k.barrier("epilogue", groups, named=True)
    with k.role("load", warps=1, registers=programs.registers(p, "load")) as w, w.tiles():
        w.load(queries)
        for region, _ in kv_loops(k.tiles, ascending=True):
            with w.loop(region):
                w.load(keys)
                w.load(values)
    with k.role("program", warpgroups=groups, registers=registers.count(p)) as c, c.tiles():
        programs.cold(c, p, "setup", "setup")
        c.wait(queries)
        for region, masked in kv_loops(k.tiles, ascending=True):
            with c.loop(region):
                c.wait(keys)
                programs.overhead(c, p)
                registers.qk(c, p, keys)
                c.release(keys)
                registers.online_softmax(c, p, masked)
                c.wait(values)
                registers.pv(c, p, values)
                registers.row_sum(c, p)
                c.wait_mma(0, "wait PV")
                c.release(values)
        c.release(queries)
        c.sync(together, label="all done with Q")
        programs.store_output(c, p, o, together)
