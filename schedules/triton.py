"""Triton's fused-attention tutorial: forward, on Ampere, Hopper and Blackwell.

One program (CTA) per block of ``tile_m`` query rows and head, blocks of a head next to each other; a
loop over blocks of ``tile_n`` keys, ascending: first those that need no mask, then the others. Each
loop is software-pipelined on its own, so the second one refills the pipeline. P stays in registers
(TMEM on Blackwell), O is rescaled in every iteration. All warps of a program move in step between
barriers, so its tensor and vector work hardly overlap; what fills the gaps is a second program on the
SM, where it fits.

* Ampere: mma.sync from shared memory, ``stages`` - 1 buffers each of K and V.
* Hopper: wgmma, QK waited for before the softmax; PV runs on beside the next copies, until that wait.
* Blackwell: S, P and O live in TMEM; PV and the next QK are issued back to back.
* ``warp_specialize``: on Blackwell the compiler's partitions (softmax, correction, MMA, load). On
  Hopper the compiler ignores the hint; what runs here is a TMA producer warp and warpgroups that wait
  for nothing but their own data.
* FP8 (Hopper, Blackwell): P is rounded to FP8 as well; V lies in memory with its keys contiguous, put so before the
  kernel, because wgmma and tcgen05 want FP8 operands that way. The output has 16 bits here.

Sources: tutorial 06-fused-attention.py and the code that Triton 3.6 and 3.9 make of it and of
``validation/triton_attention.py``: TTGIR for order, waits and buffers, SASS for instruction counts. Per
thread and iteration with E scores, R rows and A elements of O: E+2R FMNMX, E+R FFMA, E+R EX2, E+2R
FADD, A+R FMUL, E/2 F2FP, 4R SHFL (Blackwell: FMNMX3, FADD2 halve maximum and sum).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels import grid
from fasim.kernels.blocks import BlockInfo, kv_loops
from fasim.problem import Problem
from fasim.program.effects import Effect, Mask, Matmul, Probabilities, Rescale, Round, RowMax, RowSum
from fasim.program.language import Barrier, Kernel, Role
from fasim.program.library import schedule
from fasim.program.ops import add_mixes
from fasim.program.tiles import Smem

from ._triton_blackwell import blackwell, blackwell_specialized
from ._triton_parts import (
    BETWEEN,
    MASK_PER_SCORE,
    SETUP,
    SETUP_PER_OUTPUT,
    SLOTS_PER_WGMMA,
    Config,
    barrier,
    cold,
    load_q,
    output_buffer,
    overhead,
    prefetch,
    store_output,
    tensors,
    wait_copy,
)

#: architecture -> head_dim up to -> tile_m, tile_n, stages, warps. What autotune picks: on Hopper the fastest of
#: the sweep in validation/data/h200_triton.csv; elsewhere PyTorch Inductor's flex_attention table
#: (torch/_inductor/template_heuristics/triton.py), tuned on the same loop, but for Blackwell d128, where the
#: tutorial's space allows its 8 warps only from 128 x 128 on and 4 are taken with that tile.
DEFAULTS = {
    "ampere": {64: (128, 64, 3, 4), 128: (128, 64, 3, 8), 256: (32, 64, 3, 4)},
    "hopper": {64: (128, 64, 3, 8), 128: (128, 64, 3, 8), 256: (128, 64, 2, 8)},
    "blackwell": {64: (128, 128, 3, 4), 128: (128, 128, 3, 4), 256: (64, 32, 3, 4)},
}
#: The same for FP8, where it differs: the fastest of the FP8 sweep in that file, full and causal together.
FP8_DEFAULTS = {"hopper": {64: (64, 128, 3, 4), 128: (64, 128, 3, 4), 256: (128, 128, 3, 8)}}


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    tile_m: Annotated[int | None, "query rows of a program; default: what autotune picks"] = None
    tile_n: Annotated[int | None, "keys per iteration; default: what autotune picks"] = None
    stages: Annotated[int | None, "depth of the software pipeline; default: what autotune picks"] = None
    warps: Annotated[int | None, "warps of a program, 4 or 8; default: what autotune picks"] = None
    warp_specialize: Annotated[bool | None, "loads, MMA and softmax in warps of their own; default: on Blackwell"] = (
        None
    )
    copies: Annotated[
        Literal["threads", "tma"] | None, "who copies K and V: cp.async or TMA; default: cp.async up to Hopper"
    ] = None
    longest_first: Annotated[bool, "causal: start with the last block of a head (the tutorial does not)"] = False


@schedule(architectures=("ampere", "hopper", "blackwell"), dtypes=("bf16", "fp16", "fp8"))
def triton(problem: Problem, arch: Arch, knobs: Knobs) -> Kernel:
    """Triton's fused-attention tutorial: one program per query block, softmax and MMA in turn."""
    tile_m = knobs.tile_m
    tile_n = knobs.tile_n
    stages = knobs.stages
    warps = knobs.warps
    warp_specialize = knobs.warp_specialize
    copies = knobs.copies
    longest_first = knobs.longest_first
    d, dv = problem.head_dim, problem.head_dim_v
    table = (FP8_DEFAULTS if problem.dtype == "fp8" else DEFAULTS).get(arch.architecture, DEFAULTS[arch.architecture])
    limit = next((head for head in table if max(d, dv) <= head), None)
    if limit is None or d & (d - 1) or dv & (dv - 1) or min(d, dv) < 16:
        raise ConfigError(f"triton: head_dim {d}, head_dim_v {dv}: powers of two from 16 to 256 exist")
    picked = table[limit]
    m, n, depth, width = (
        given or default for given, default in zip((tile_m, tile_n, stages, warps), picked, strict=True)
    )
    specialized = arch.architecture == "blackwell" if warp_specialize is None else warp_specialize
    tma = (specialized or arch.architecture == "blackwell") if copies is None else copies == "tma"
    cfg = Config(arch, m, n, d, dv, depth, width, problem.bits // 8, problem.dtype, specialized, tma)
    _check(cfg)

    chosen: dict[str, object] = dict(tile_m=m, tile_n=n, stages=depth, warps=width, warp_specialize=specialized)
    chosen |= dict(copies="tma" if tma else "threads", longest_first=longest_first)
    k = Kernel("triton", problem, arch, chosen)
    _grid(k, cfg, longest_first)
    if arch.architecture == "blackwell":
        (blackwell_specialized if specialized else blackwell)(k, cfg)
    elif specialized:
        _hopper_specialized(k, cfg)
    else:
        _pipelined(k, cfg)
    return k


def _check(cfg: Config) -> None:
    """Tiles the compiler has code for."""
    arch = cfg.arch
    for name, value in (("tile_m", cfg.m), ("tile_n", cfg.n)):
        if value & (value - 1) or not 16 <= value <= 256:
            raise ConfigError(f"triton: {name} {value}: powers of two from 16 to 256 exist")
    if cfg.warps not in (4, 8):
        raise ConfigError(f"triton: warps {cfg.warps}: 4 or 8")
    if cfg.stages < 2:
        raise ConfigError(f"triton: stages {cfg.stages}: at least 2, the pipeline loads ahead")
    if cfg.element == 1 and "fp8" not in arch.sm.tensor.flops_per_cycle:
        raise ConfigError(f"triton: {arch.name} has no FP8 tensor rate: bf16 and fp16 exist")
    if cfg.element == 1 and min(cfg.d, cfg.dv, cfg.n) < 32:
        raise ConfigError("triton: fp8: head_dim, head_dim_v and tile_n below 32 are no whole MMA")
    if arch.architecture == "ampere" and (cfg.tma or cfg.specialized):
        raise ConfigError(f"triton: {arch.name} has no TMA: copies=tma and warp_specialize need Hopper or Blackwell")
    if arch.architecture != "ampere" and cfg.m < 64:
        raise ConfigError(f"triton: tile_m {cfg.m}: {arch.name}'s asynchronous MMA has at least 64 rows")
    if arch.architecture == "blackwell" and not cfg.tma:
        raise ConfigError("triton: copies=threads is modelled up to Hopper; on Blackwell the tutorial uses TMA")


def _grid(k: Kernel, cfg: Config, longest_first: bool) -> None:
    """Tiles: query block fastest, then head and batch; trip counts of the loops and of their pipelines."""
    cut = BlockInfo(k.problem, cfg.m, cfg.n)
    tiles = grid.longest_first(cut) if longest_first and k.problem.causal else grid.in_order(cut)
    blocks = cut.kv_blocks(tiles)
    k.tiles = {"q": cut.q_line(tiles), "kv": grid.kv_lines(cut, tiles, blocks.lowest)}
    for name, trips in blocks.columns(ascending=True).items():
        ahead = np.minimum(trips, cfg.stages - 1)
        buffers, primed, first = (np.minimum(trips, most) for most in (cfg.stages, 2, 1))
        counts = {
            "": trips,
            " ahead": ahead,  # blocks copied before the loop begins, and iterations after the last copy
            " steady": trips - ahead,
            " buffers": buffers,  # blocks of K copied before the loop where K runs one further ahead
            " both": trips - buffers,
            " last V": buffers - ahead,
            " any": first,
            " drain": ahead - first,
            " primed": primed,  # blocks whose QK runs before the loop when S has two buffers
            " rest": trips - primed,
            " last": primed,
        }
        k.tiles |= {f"{name}{suffix}": column for suffix, column in counts.items()}


# --- all warps in step: Ampere and Hopper ------------------------------------------------------
def _pipelined(k: Kernel, cfg: Config) -> None:
    """Every warp copies ahead, multiplies and takes its part of the softmax."""
    q, key, value, o = tensors(k, cfg)
    buffers = cfg.stages - (cfg.arch.architecture == "ampere")
    k.smem("Q", q.line_bytes)
    full = {}
    for tensor in (key, value):
        k.smem(tensor.name, tensor.line_bytes, buffers)
        full[tensor.name] = k.barrier(f"{tensor.name}.full", 1, buffers)
    output_buffer(k, q, o)
    with k.role("program", warps=cfg.warps, registers=cfg.registers) as c, c.tiles():
        load_q(c, cfg, q)
        for number, (name, masked) in enumerate(kv_loops(k.tiles, ascending=True)):
            if number > 0:
                cold(c, "between the loops", BETWEEN)
            with c.loop(f"{name} ahead", "prefetch"):
                prefetch(c, cfg, key, full)
                prefetch(c, cfg, value, full)
            for trips, ahead in ((f"{name} steady", True), (f"{name} ahead", False)):
                with c.loop(trips, name):
                    _step(c, cfg, full, masked)
                    if ahead:
                        barrier(c, cfg)
                        prefetch(c, cfg, key, full)
                        prefetch(c, cfg, value, full)
            if cfg.arch.architecture == "hopper":
                c.wait_mma(0, "wait PV")
            barrier(c, cfg)  # all are done with Q, K and V: the next loop's blocks land there, or O
        store_output(c, cfg, o)


def _step(c: Role, cfg: Config, full: dict[str, Barrier], masked: bool) -> None:
    """One block of keys."""
    wait_copy(c, cfg, "K", full)
    if not cfg.tma:
        wait_copy(c, cfg, "V", full)
        barrier(c, cfg)
    overhead(c, cfg)
    _qk(c, cfg)
    _softmax(c, cfg, masked)
    if cfg.tma:
        wait_copy(c, cfg, "V", full)
    _pv(c, cfg)
    _spill(c, cfg)
    _row_sum(c, cfg)


def _row_sum(c: Role, cfg: Config) -> None:
    """The sum of a row over its four threads, added to the corrected one; beside PV."""
    mix = {"shfl": 2 * cfg.thread_rows, "fadd": 2 * cfg.thread_rows, "ffma": cfg.thread_rows}
    c.vector("row sum", mix, effects=(RowSum("S"),))


def _spill(c: Role, cfg: Config) -> None:
    """Registers to local memory, which is the L1's part of shared memory, and back."""
    if cfg.spilled:
        nbytes = 2 * 128 * c.warps * cfg.spilled
        c.vector("spill", {"sts": cfg.spilled, "lds": cfg.spilled}, smem_bytes=nbytes, latency={"smem": 1})


def _qk(c: Role, cfg: Config) -> None:
    """S = Q K^T, complete when the role goes on."""
    effect = Matmul("S", Smem("Q"), Smem("K"), transposed=True)
    if cfg.arch.architecture == "ampere":
        _mma_sync(c, cfg, "QK", cfg.n * cfg.d, cfg.m * cfg.d, 2.0 * cfg.m * cfg.n * cfg.d, effect)
        return
    with c.phase("QK"):
        _wgmma(c, cfg, "QK", cfg.n, cfg.d, "smem", effect)
    with c.phase("wait QK"):
        c.wait_mma(0, "wait QK")


def _pv(c: Role, cfg: Config) -> None:
    """O += P V; wgmma is left running."""
    effect = Matmul("O", "P", Smem("V"), add=True)
    if cfg.arch.architecture == "ampere":
        _mma_sync(c, cfg, "PV", cfg.n * cfg.dv, 0, 2.0 * cfg.m * cfg.n * cfg.dv, effect)
        return
    _wgmma(c, cfg, "PV", cfg.dv, cfg.n, "register", effect)


def _wgmma(c: Role, cfg: Config, label: str, columns: int, depth: int, a: str, effect: Effect) -> None:
    """m64 instructions of the role's warpgroups.

    Warpgroups that share 64 rows take half of the columns per instruction: in QK each computes all of
    them in two passes, in PV half of O. Where registers do not suffice, the compiler waits for each
    instruction before it issues the next.
    """
    shared = cfg.warpgroups * 64 // cfg.m if cfg.warpgroups * 64 > cfg.m else 1
    k = 32 // cfg.element
    groups = c.warps // 4
    count = cfg.rows // 64 * depth // k * (shared if label == "QK" else 1)
    one_by_one = cfg.live_registers > 255
    commits = count if one_by_one else 1
    for commit in range(commits):
        c.mma(
            label, m=64, n=columns // shared, k=k, count=groups * (1 if one_by_one else count), a=a,
            dtype=cfg.mma_dtype, slots=SLOTS_PER_WGMMA / groups, effects=(effect,) if commit == commits - 1 else (),
        )  # fmt: skip
        if one_by_one:
            c.wait_mma(0, f"wait {label}")


def _mma_sync(c: Role, cfg: Config, label: str, shared: int, own: int, flops: float, effect: Effect) -> None:
    """HMMA fed by ldmatrix: every warp reads the whole tile of K or V and its own rows of Q."""
    nbytes = cfg.element * (c.warps * shared + own)
    c.vector(
        label,
        {"ldsm": nbytes / 512 / c.warps, "misc": flops / 4096 / c.warps},
        smem_bytes=nbytes,
        mma_sync_flops=flops,
        latency={"smem": 1, "mma_sync": 1},
        effects=(effect,),
    )


def _softmax(c: Role, cfg: Config, masked: bool) -> None:
    """Mask, maximum, exponentials, sum, P to operands of PV and the rescaling of O.

    As in the SASS (FP16 and FP8 at head dim 128), half of the maxima are taken before the first exponential, the others
    beside FFMA and the first half of the exponentials, and the rest beside the other half.
    """
    e, r = cfg.scores, cfg.thread_rows
    if masked:
        c.vector("mask", {"alu": MASK_PER_SCORE * e}, effects=(Mask("S"),))
    row_max, latency = {"fmnmx": e / 2 + 2 * r, "shfl": 2 * r, "fmul": r}, {"shfl": 2, "alu": 2, "fma": 1}
    c.vector("row max", row_max, latency=latency, effects=(RowMax("S"),))
    c.vector("row max, exp", {"fmnmx": e / 2, "ffma": e, "ex2": e / 2 + r, "fadd": e / 3}, latency={"fma": 1})
    rest = add_mixes({"ex2": e / 2, "fadd": 2 * e / 3, "fmul": cfg.outputs}, cfg.convert)
    effects = Rescale("O"), Probabilities("S"), Round("S", "P", cfg.formats[0])
    c.vector("exp, sum, P, rescale O", rest, latency={"ex2": 1, "fma": 1}, effects=effects)


# --- warp specialisation on Hopper --------------------------------------------------------------
def _hopper_specialized(k: Kernel, cfg: Config) -> None:
    """A producer warp fills rings by TMA; warpgroups of ``tile_m`` / ``warpgroups`` rows go at their own pace."""
    q, key, value, o = tensors(k, cfg)
    groups = cfg.warpgroups
    q_ring = k.ring(q, q.line_bytes, 1, consumers=groups, boxes=-(-cfg.d // 64))
    k_ring = k.ring(key, key.line_bytes, cfg.stages, consumers=groups, boxes=-(-cfg.d // 64))
    v_ring = k.ring(value, value.line_bytes, cfg.stages, consumers=groups, boxes=-(-cfg.dv // 64))
    output_buffer(k, q, o)
    together = k.barrier("epilogue", groups, named=True)
    with k.role("load", warps=1, registers=24) as p, p.tiles():
        p.load(q_ring)
        for trips, _ in kv_loops(k.tiles, ascending=True):
            with p.loop(trips):
                p.load(k_ring)
                p.load(v_ring)
    with k.role("program", warpgroups=groups, registers=cfg.registers) as c, c.tiles():
        cold(c, "setup", SETUP + SETUP_PER_OUTPUT * cfg.outputs)
        c.wait(q_ring)
        for trips, masked in kv_loops(k.tiles, ascending=True):
            with c.loop(trips):
                c.wait(k_ring)
                overhead(c, cfg)
                _qk(c, cfg)
                c.release(k_ring)
                _softmax(c, cfg, masked)
                c.wait(v_ring)
                _pv(c, cfg)
                _row_sum(c, cfg)
                c.wait_mma(0, "wait PV")
                c.release(v_ring)
        c.release(q_ring)
        c.sync(together, label="all done with Q")
        store_output(c, cfg, o, together)
