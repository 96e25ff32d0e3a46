"""Triton's fused-attention tutorial: forward, on Ampere, Hopper and Blackwell.

One program (CTA) per block of ``tile_m`` query rows and head, blocks of a head next to each other; a
loop over blocks of ``tile_n`` keys, ascending, first those that need no mask, then the others, each
loop software-pipelined on its own (the second one refills the pipeline). P stays in registers (TMEM
on Blackwell) and O is rescaled in every iteration. All warps move in step: the compiler puts a barrier before QK,
and with more than one warpgroup another after it, so that tensor and vector work of one program hardly
overlap; what fills the gaps is a second program on the SM, where it fits.

* Ampere: mma.sync from shared memory, ``stages`` - 1 buffers each of K and V.
* Hopper: wgmma, waited for before the softmax; PV runs on until the next wait, which also covers it.
* Blackwell: S, P and O live in TMEM; PV and the next QK are issued back to back.
* ``warp_specialize``: on Blackwell the compiler's partitions (softmax, correction, MMA, load); on
  Hopper a TMA producer warp and warpgroups that wait for nothing but their own data.

Sources: tutorial 06-fused-attention.py and Triton 3.9's code for it and for
``validation/triton_attention.py``: TTGIR for order, waits and buffers, SASS for instruction counts. Per
thread and iteration with E scores, R rows and A elements of O: E+2R FMNMX, E+R FFMA, E+R EX2, E+2R
FADD, A+R FMUL, E/2 F2FP, 4R SHFL (Blackwell: FMNMX3, FADD2 halve maximum and sum).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.library import schedule
from fasim.ops import BarrierUse, Copy, Wait
from fasim.problem import Problem
from fasim.schedule import Barrier, Kernel, Role, Tensor

#: architecture -> head_dim up to -> tile_m, tile_n, stages, warps. What autotune picks among the tutorial's
#: configurations: on Hopper in validation/data/h200_triton.csv, elsewhere taken from PyTorch Inductor's
#: flex_attention table (torch/_inductor/template_heuristics/triton.py), which was tuned on the same loop.
DEFAULTS = {
    "ampere": {64: (128, 64, 3, 4), 128: (128, 64, 3, 8), 256: (32, 64, 3, 4)},
    "hopper": {64: (128, 64, 3, 8), 128: (128, 64, 3, 8), 256: (128, 64, 2, 8)},
    "blackwell": {64: (128, 128, 3, 4), 128: (128, 128, 3, 4), 256: (64, 32, 3, 4)},
}

#: Instructions per thread outside the loops, from SASS within 6 % over four kernels: before the first loop
#: SETUP plus 2.4 for each element of O, between the loops BETWEEN, after them 8.7 for each element of O (its division).
SETUP, SETUP_PER_OUTPUT, BETWEEN, EPILOGUE_PER_OUTPUT = 210.0, 2.4, 90.0, 8.7

#: Cycles of a program per such instruction: instruction fetch and dependent integer chains. Fitted to the
#: H200's non-causal d128 rows of 512 to 4096 tokens (h200_triton.csv), whose programs cost 7700 cycles beside the loop.
COLD_CYCLES = 3.7

#: Instructions per iteration besides softmax and MMA: buffer indices, loop counter, copy addresses. SASS: 30 to 45
#: outside the stretches in which MMAs are issued.
OVERHEAD = 35.0

#: Cycles per iteration in branches and wgmma fences and waits, as in FlashAttention-3: branch_resolving stalls
#: of 37, two wgmma waits of 24 to 30 each (Nsight Compute and cycle stamps on an H200).
LOOP_CYCLES = 90.0

#: Issue slots per wgmma: two descriptor updates on the uniform datapath and two moves. SASS.
SLOTS_PER_WGMMA = 5.0

#: Instructions per score of a masked block: compare, select and the column's index. SASS: 138 for 32 scores.
MASK_PER_SCORE = 4.3


@dataclass(frozen=True)
class Config:
    """Resolved knobs and what follows from them."""

    arch: Arch
    m: int
    n: int
    d: int
    dv: int
    stages: int
    warps: int
    element: int  # bytes
    specialized: bool
    tma: bool

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a program."""
        return max(1, self.warps // 4)

    @property
    def rows(self) -> int:
        """Rows a warpgroup computes; with fewer than 64 each, two warpgroups compute the same scores."""
        return max(self.m // self.warpgroups, min(64, self.m)) if self.arch.architecture == "hopper" else self.m

    @property
    def scores(self) -> float:
        """Scores per thread and iteration."""
        if self.arch.architecture == "hopper":
            return self.rows * self.n / 128
        return self.m * self.n / (32 * self.warps)

    @property
    def thread_rows(self) -> float:
        """Rows per thread whose maximum and sum it keeps; tcgen05 gives a thread whole rows."""
        if self.arch.architecture == "blackwell":
            return max(1.0, self.m / 128)
        return self.scores * 4 / self.n

    @property
    def outputs(self) -> float:
        """Elements of O per thread."""
        return self.m * self.dv / (32 * self.warps)

    @property
    def live_registers(self) -> float:
        """Registers per thread of scores, P and O."""
        return 1.5 * self.scores + self.outputs

    @property
    def wanted_registers(self) -> float:
        """Registers per thread the code would like: scores, P, O, what is live beside them, copy addresses.

        On the same side of every occupancy limit as what Triton 3.9 reports for 48 kernels on Hopper.
        mma.sync holds operand fragments as well.
        """
        if self.arch.architecture == "ampere":
            return 1.5 * self.live_registers + 60
        if self.tma:
            return 1.25 * self.live_registers
        return 1.5 * self.live_registers + 2 * self.n * (self.d + self.dv) * self.element / (512 * self.warps)

    @property
    def registers(self) -> int:
        """Registers per thread that it gets."""
        return min(255, int(self.wanted_registers))

    @property
    def spilled(self) -> float:
        """Registers stored and loaded again in every iteration; the compiler gets by with 305 wanted ones.

        Triton 3.6 on Hopper: 20, 72, 34, 204 and 364 spills for 23, 63, 111, 239 and 287 by this rule, 0 for 0.
        """
        return max(0.0, self.wanted_registers - 305)


@schedule(architectures=("ampere", "hopper", "blackwell"), dtypes=("bf16", "fp16"))
def triton(
    problem: Problem,
    arch: Arch,
    *,
    tile_m: Annotated[int | None, "query rows of a program; default: what autotune picks"] = None,
    tile_n: Annotated[int | None, "keys per iteration; default: what autotune picks"] = None,
    stages: Annotated[int | None, "depth of the software pipeline; default: what autotune picks"] = None,
    warps: Annotated[int | None, "warps of a program, 4 or 8; default: what autotune picks"] = None,
    warp_specialize: Annotated[
        bool | None, "loads, MMA and softmax in warps of their own; default: on Blackwell"
    ] = None,
    copies: Annotated[
        Literal["threads", "tma"] | None, "who copies K and V: cp.async or TMA; default: cp.async up to Hopper"
    ] = None,
    longest_first: Annotated[bool, "causal: start with the last block of a head (the tutorial does not)"] = False,
) -> Kernel:
    """Triton's fused-attention tutorial: one program per query block, softmax and MMA in turn."""
    d, dv = problem.head_dim, problem.head_dim_v
    table = DEFAULTS[arch.architecture]
    limit = next((head for head in table if max(d, dv) <= head), None)
    if limit is None or d & (d - 1) or dv & (dv - 1) or min(d, dv) < 16:
        raise ConfigError(f"triton: head_dim {d}, head_dim_v {dv}: powers of two from 16 to 256 exist")
    picked = table[limit]
    m, n, depth, width = (
        given or default for given, default in zip((tile_m, tile_n, stages, warps), picked, strict=True)
    )
    specialized = arch.architecture == "blackwell" if warp_specialize is None else warp_specialize
    tma = (specialized or arch.architecture == "blackwell") if copies is None else copies == "tma"
    cfg = Config(arch, m, n, d, dv, depth, width, problem.bits // 8, specialized, tma)
    _check(cfg)

    knobs: dict[str, object] = dict(tile_m=m, tile_n=n, stages=depth, warps=width, warp_specialize=specialized)
    knobs |= dict(copies="tma" if tma else "threads", longest_first=longest_first)
    k = Kernel("triton", problem, arch, knobs)
    _grid(k, cfg, longest_first)
    if arch.architecture == "blackwell":
        (_blackwell_specialized if specialized else _blackwell)(k, cfg)
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
    if arch.architecture == "ampere" and (cfg.tma or cfg.specialized):
        raise ConfigError(f"triton: {arch.name} has no TMA: copies=tma and warp_specialize need Hopper or Blackwell")
    if arch.architecture != "ampere" and cfg.m < 64:
        raise ConfigError(f"triton: tile_m {cfg.m}: {arch.name}'s asynchronous MMA has at least 64 rows")
    if arch.architecture == "blackwell" and not cfg.tma:
        raise ConfigError("triton: copies=threads is modelled up to Hopper; on Blackwell the tutorial uses TMA")


def _grid(k: Kernel, cfg: Config, longest_first: bool) -> None:
    """Tiles: query block fastest, then head and batch; trip counts of the two loops and of their pipelines."""
    problem = k.problem
    m_blocks = problem.q_tiles(cfg.m)
    pair, block = (a.ravel() for a in np.mgrid[0 : problem.batch * problem.heads_q, 0:m_blocks])
    if longest_first and problem.causal:
        block = m_blocks - 1 - block
    total, masked = np.array([problem.kv_blocks(b, cfg.m, cfg.n) for b in range(m_blocks)], dtype=np.int64).T
    batch, head = pair // problem.heads_q, pair % problem.heads_q
    k.tiles = {
        "q": np.arange(len(pair), dtype=np.int64),
        "kv": (batch * problem.heads_kv + head // problem.group) * problem.kv_tiles(cfg.n),
    }
    for name, trips in (("full", total - masked), ("masked", masked)):
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
        k.tiles |= {f"{name}{suffix}": column[block] for suffix, column in counts.items()}


def _tensors(k: Kernel, cfg: Config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V and O; a line is one copy's worth."""
    lines = k.problem.batch * k.problem.heads_kv * k.problem.kv_tiles(cfg.n)
    return (
        k.tensor("Q", k.tile_count, cfg.m * cfg.d * cfg.element, "q"),
        k.tensor("K", lines, cfg.n * cfg.d * cfg.element, "kv", 1),
        k.tensor("V", lines, cfg.n * cfg.dv * cfg.element, "kv", 1),
        k.tensor("O", k.tile_count, 2 * cfg.m * cfg.dv, "q"),
    )


# --- all warps in step: Ampere and Hopper ------------------------------------------------------
def _pipelined(k: Kernel, cfg: Config) -> None:
    """Every warp copies ahead, multiplies and takes its part of the softmax."""
    q, key, value, o = _tensors(k, cfg)
    buffers = cfg.stages - (cfg.arch.architecture == "ampere")
    k.smem("Q", q.line_bytes)
    full = {}
    for tensor in (key, value):
        k.smem(tensor.name, tensor.line_bytes, buffers)
        full[tensor.name] = k.barrier(f"{tensor.name}.full", 1, buffers)
    with k.role("program", warps=cfg.warps, registers=cfg.registers) as c, c.tiles():
        _load_q(c, cfg, q)
        for mask in ("full", "masked"):
            if mask == "masked":
                _cold(c, "between the loops", BETWEEN)
            with c.loop(f"{mask} ahead", "prefetch"):
                _prefetch(c, cfg, key, full)
                _prefetch(c, cfg, value, full)
            for trips, ahead in ((f"{mask} steady", True), (f"{mask} ahead", False)):
                with c.loop(trips, mask):
                    _step(c, cfg, full, mask == "masked")
                    if ahead:
                        _barrier(c, cfg)
                        _prefetch(c, cfg, key, full)
                        _prefetch(c, cfg, value, full)
        if cfg.arch.architecture == "hopper":
            c.wait_mma(0, "wait PV")
        _store_output(c, cfg, o)


def _step(c: Role, cfg: Config, full: dict[str, Barrier], masked: bool) -> None:
    """One block of keys."""
    _wait_copy(c, cfg, "K", full)
    if not cfg.tma:
        _wait_copy(c, cfg, "V", full)
        _barrier(c, cfg)
    _overhead(c, cfg)
    _qk(c, cfg)
    _softmax(c, cfg, masked)
    if cfg.tma:
        _wait_copy(c, cfg, "V", full)
    _pv(c, cfg)
    _spill(c, cfg)
    c.vector("row sum", {"shfl": 2 * cfg.thread_rows, "fadd": 2 * cfg.thread_rows, "ffma": cfg.thread_rows})


def _cold(c: Role, label: str, instructions: float) -> None:
    """Straight-line code that runs once."""
    c.delay(label, COLD_CYCLES * instructions, "work")


def _load_q(c: Role, cfg: Config, q: Tensor) -> None:
    """Q by ordinary loads and through registers into shared memory, or by TMA."""
    _cold(c, "setup", SETUP + SETUP_PER_OUTPUT * cfg.outputs)
    c.copy("load Q", q, q.line_bytes, "load", "tma" if cfg.tma else "threads")
    c.wait_copies("load", "wait Q")
    if not cfg.tma:
        c.vector("store Q", {"sts": q.line_bytes / (512 * c.warps)}, smem_bytes=q.line_bytes, latency={"smem": 1})
    _barrier(c, cfg)


def _prefetch(c: Role, cfg: Config, tensor: Tensor, full: dict[str, Barrier]) -> None:
    """Start the copy of the next block into the buffer that the last but one iteration has left."""
    use = BarrierUse(full[tensor.name].name, full[tensor.name].stages, f"{tensor.name}.load")
    engine: Literal["tma", "threads"] = "tma" if cfg.tma else "threads"
    boxes = -(-tensor.line_bytes // (cfg.n * 128)) if cfg.tma else 1
    c.record(Copy(f"load {tensor.name}", tensor.name, tensor.line_bytes, "load", engine, use, boxes=boxes))


def _wait_copy(c: Role, cfg: Config, name: str, full: dict[str, Barrier]) -> None:
    """Wait for the oldest copy: an mbarrier (TMA), or cp.async.wait_group, which costs no polling."""
    use = BarrierUse(full[name].name, full[name].stages, f"{name}.get")
    c.record(Wait(f"wait {name}", use, "full", named=not cfg.tma))


def _barrier(c: Role, cfg: Config) -> None:
    """__syncthreads of warps that arrive together."""
    sync = cfg.arch.sm.sync
    c.delay("barrier", sync.syncthreads_base_cycles + sync.syncthreads_per_warp_cycles * c.warps, "barrier")


def _spill(c: Role, cfg: Config) -> None:
    """Registers to local memory, which is the L1's part of shared memory, and back."""
    if cfg.spilled:
        nbytes = 2 * 128 * c.warps * cfg.spilled
        c.vector("spill", {"sts": cfg.spilled, "lds": cfg.spilled}, smem_bytes=nbytes, latency={"smem": 1})


def _overhead(c: Role, cfg: Config) -> None:
    c.vector("loop overhead", {"misc": OVERHEAD})
    if cfg.arch.architecture == "hopper":
        c.delay("branch, fences", LOOP_CYCLES)


def _qk(c: Role, cfg: Config) -> None:
    """S = Q K^T, complete when the role goes on."""
    if cfg.arch.architecture == "ampere":
        _mma_sync(c, cfg, "QK", cfg.n * cfg.d, cfg.m * cfg.d, 2.0 * cfg.m * cfg.n * cfg.d)
        return
    _wgmma(c, cfg, "QK", cfg.n, cfg.d, "smem")
    c.wait_mma(0, "wait QK")


def _pv(c: Role, cfg: Config) -> None:
    """O += P V; wgmma is left running."""
    if cfg.arch.architecture == "ampere":
        _mma_sync(c, cfg, "PV", cfg.n * cfg.dv, 0, 2.0 * cfg.m * cfg.n * cfg.dv)
        return
    _wgmma(c, cfg, "PV", cfg.dv, cfg.n, "register")


def _wgmma(c: Role, cfg: Config, label: str, columns: int, depth: int, a: str) -> None:
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
    for _ in range(count if one_by_one else 1):
        c.mma(
            label, m=64, n=columns // shared, k=k, count=groups * (1 if one_by_one else count), a=a,
            dtype="bf16" if cfg.element == 2 else "fp8", slots=SLOTS_PER_WGMMA / groups,
        )  # fmt: skip
        if one_by_one:
            c.wait_mma(0, f"wait {label}")


def _mma_sync(c: Role, cfg: Config, label: str, shared: int, own: int, flops: float) -> None:
    """HMMA fed by ldmatrix: every warp reads the whole tile of K or V and its own rows of Q."""
    nbytes = cfg.element * (c.warps * shared + own)
    c.vector(
        label,
        {"lds": nbytes / 512 / c.warps, "misc": flops / 4096 / c.warps},
        smem_bytes=nbytes,
        mma_sync_flops=flops,
        latency={"smem": 1, "mma_sync": 1},
    )


def _softmax(c: Role, cfg: Config, masked: bool) -> None:
    """Mask, maximum, exponentials, sum, P to 16 bit and the rescaling of O.

    As in the SASS, half of the maxima are taken before the first exponential, the others beside it.
    """
    e, r = cfg.scores, cfg.thread_rows
    if masked:
        c.vector("mask", {"alu": MASK_PER_SCORE * e})
    c.vector("row max", {"fmnmx": e / 2 + 2 * r, "shfl": 2 * r, "fmul": r}, latency={"shfl": 2, "alu": 2, "fma": 1})
    rest = {"fmnmx": e / 2, "ffma": e + r, "ex2": e + r, "fadd": e, "fmul": cfg.outputs, "f2fp": e / 2}
    c.vector("exp, sum, P, rescale O", rest, latency={"ex2": 1, "fma": 1})


def _store_output(c: Role, cfg: Config, o: Tensor, together: Barrier | None = None) -> None:
    """1/l, O to 16 bit, through shared memory and out; the program ends without waiting for plain stores.

    ``together``: the barrier of the instances that share the tile, of which the last one stores.
    """
    share = o.line_bytes / c.count
    _cold(c, "1/l, scale O", EPILOGUE_PER_OUTPUT * cfg.outputs)
    c.vector("O to SMEM", {"sts": share / (512 * c.warps)}, smem_bytes=share, latency={"smem": 1})
    if together is None:
        _barrier(c, cfg)
    else:
        c.sync(together, label="O complete")
    if not cfg.tma:
        c.vector("O from SMEM", {"lds": share / (512 * c.warps)}, smem_bytes=share, latency={"smem": 1})
    with c.only(-1):
        c.copy("store O", o, o.line_bytes, "store", "tma" if cfg.tma else "threads", boxes=-(-cfg.dv // 64))
        if cfg.tma:
            c.wait_copies("store", "wait O store")


# --- warp specialisation on Hopper --------------------------------------------------------------
def _hopper_specialized(k: Kernel, cfg: Config) -> None:
    """A producer warp fills rings by TMA; warpgroups of ``tile_m`` / ``warpgroups`` rows go at their own pace."""
    q, key, value, o = _tensors(k, cfg)
    groups = cfg.warpgroups
    q_ring = k.ring(q, q.line_bytes, 1, consumers=groups, boxes=-(-cfg.d // 64))
    k_ring = k.ring(key, key.line_bytes, cfg.stages, consumers=groups, boxes=-(-cfg.d // 64))
    v_ring = k.ring(value, value.line_bytes, cfg.stages, consumers=groups, boxes=-(-cfg.dv // 64))
    together = k.barrier("epilogue", groups, named=True)
    with k.role("load", warps=1, registers=24) as p, p.tiles():
        p.load(q_ring)
        for trips in ("full", "masked"):
            with p.loop(trips):
                p.load(k_ring)
                p.load(v_ring)
    with k.role("program", warpgroups=groups, registers=cfg.registers) as c, c.tiles():
        _cold(c, "setup", SETUP + SETUP_PER_OUTPUT * cfg.outputs)
        c.wait(q_ring)
        for mask in ("full", "masked"):
            with c.loop(mask):
                c.wait(k_ring)
                _overhead(c, cfg)
                _qk(c, cfg)
                c.release(k_ring)
                _softmax(c, cfg, mask == "masked")
                c.wait(v_ring)
                _pv(c, cfg)
                c.wait_mma(0, "wait PV")
                c.release(v_ring)
        c.release(q_ring)
        _store_output(c, cfg, o, together)


# --- Blackwell ------------------------------------------------------------------------------------
def _tcgen05(c: Role, cfg: Config, label: str, columns: int, depth: int, done: Barrier) -> None:
    """128 rows at a time; a tile of 64 rows takes as long, half of the datapath idles."""
    k = 32 // cfg.element
    c.mma(
        label, m=128, n=columns, k=k, count=depth // k * max(1, cfg.m // 128), a="smem" if label == "QK" else "tmem",
        dtype="bf16" if cfg.element == 2 else "fp8", bar=BarrierUse(done.name, 1, f"{label}.issue"),
    )  # fmt: skip


def _scores(c: Role, cfg: Config, masked: bool) -> None:
    """S from TMEM, its mask and row maximum."""
    c.vector("load S", {"misc": 4}, tmem_load_bytes=4 * cfg.m * cfg.n, latency={"tmem": 1})
    if masked:
        c.vector("mask", {"alu": MASK_PER_SCORE * cfg.scores})
    c.vector("row max", {"fmnmx": cfg.scores / 2 + 4, "fmul": cfg.thread_rows}, latency={"alu": 4, "fma": 1})


def _probabilities(c: Role, cfg: Config) -> None:
    e, r = cfg.scores, cfg.thread_rows
    c.vector("exp, sum, P", {"ffma": e + r, "ex2": e + r, "ffma2": e / 2, "f2fp": e / 2}, latency={"ex2": 1, "fma": 1})


def _p_to_tmem(c: Role, cfg: Config) -> None:
    c.vector("store P", {"misc": 4}, tmem_store_bytes=cfg.element * cfg.m * cfg.n)


def _rescale(c: Role, cfg: Config) -> None:
    """O out of TMEM, times exp2(old maximum - new), and back."""
    nbytes = 4 * cfg.m * cfg.dv
    c.vector("load O", {"misc": 4}, tmem_load_bytes=nbytes, latency={"tmem": 1})
    c.vector("rescale O", {"fmul": cfg.outputs, "misc": 4}, tmem_store_bytes=nbytes)


def _load_output(c: Role, cfg: Config) -> None:
    c.vector("load O", {"misc": 4}, tmem_load_bytes=4 * cfg.m * cfg.dv, latency={"tmem": 1})


def _tmem(k: Kernel, cfg: Config, buffers: int) -> None:
    """Columns for ``buffers`` S of FP32, P and O, allocated as a power of two."""
    rows = max(1, cfg.m // 128)
    columns = rows * (buffers * cfg.n + cfg.n * cfg.element // 4 + cfg.dv)
    k.tmem_columns = 1 << (columns - 1).bit_length()


def _blackwell(k: Kernel, cfg: Config) -> None:
    """All warps in step; PV of this block and QK of the next are issued together, after the softmax."""
    q, key, value, o = _tensors(k, cfg)
    _tmem(k, cfg, 1)
    k.smem("Q", q.line_bytes)
    full = {}
    for tensor in (key, value):
        k.smem(tensor.name, tensor.line_bytes, cfg.stages)
        full[tensor.name] = k.barrier(f"{tensor.name}.full", 1, cfg.stages)
    s_full, pv_done = k.barrier("S.full", 1), k.barrier("PV.done", 1)
    with k.role("program", warps=cfg.warps, registers=255) as c, c.tiles():
        _load_q(c, cfg, q)
        for mask in ("full", "masked"):
            for tensor, trips in ((value, "ahead"), (key, "buffers")):
                with c.loop(f"{mask} {trips}", "prefetch"):
                    _prefetch(c, cfg, tensor, full)
            with c.loop(f"{mask} any", "first QK"):
                _wait_copy(c, cfg, "K", full)
                _tcgen05(c, cfg, "QK", cfg.n, cfg.d, s_full)
            # QK of a block is complete one iteration before its PV, so K is copied one block further ahead than V
            for trips, copied in (("both", (value, key)), ("last V", (value,)), ("drain", ()), ("any", ())):
                with c.loop(f"{mask} {trips}", mask):
                    c.wait_barrier(s_full, reason="dependency", label="wait QK")
                    _scores(c, cfg, mask == "masked")
                    _probabilities(c, cfg)
                    c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
                    _wait_copy(c, cfg, "V", full)
                    _p_to_tmem(c, cfg)
                    _rescale(c, cfg)
                    _barrier(c, cfg)
                    _tcgen05(c, cfg, "PV", cfg.dv, cfg.n, pv_done)
                    if trips != "any":
                        _wait_copy(c, cfg, "K", full)
                        _tcgen05(c, cfg, "QK", cfg.n, cfg.d, s_full)
                    for tensor in copied:
                        _barrier(c, cfg)
                        _prefetch(c, cfg, tensor, full)
                    _overhead(c, cfg)
        c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
        _load_output(c, cfg)
        _store_output(c, cfg, o)


def _blackwell_specialized(k: Kernel, cfg: Config) -> None:
    """The compiler's four partitions; S is double-buffered, so that QK runs ahead of the softmax."""
    q, key, value, o = _tensors(k, cfg)
    _tmem(k, cfg, 2)
    k.launch_registers = 168
    q_ring = k.ring(q, q.line_bytes, 1, consumers=1, boxes=-(-cfg.d // 64))
    full = {}
    for tensor in (key, value):
        k.smem(tensor.name, tensor.line_bytes, cfg.stages)
        full[tensor.name] = k.barrier(f"{tensor.name}.full", 1, cfg.stages)
    qk_done, pv_done = k.barrier("QK.done", 1), k.barrier("PV.done", 1)
    s_free, p_full, maximum, o_ready = (k.barrier(name, 1) for name in ("S.free", "P.full", "maximum", "O.ready"))
    regions = k.barrier("region", 4, named=True)

    def loops(role: Role, *trips: str) -> Iterator[tuple[str, str]]:
        """The loops of both regions; each is a region of its own, at whose end the partitions meet."""
        for mask in ("full", "masked"):
            for name in trips:
                with role.loop(f"{mask} {name}".strip(), mask):
                    yield mask, name
            role.sync(regions, label="end of region")

    with k.role("load", warps=1, registers=24) as p, p.tiles():
        p.load(q_ring)
        for _, trips in loops(p, "primed", "rest", "last"):
            if trips != "primed":
                p.wait_barrier(pv_done, reason="empty", ahead=cfg.stages, label="wait V free")
                _prefetch(p, cfg, value, full)
            if trips != "last":
                p.wait_barrier(qk_done, reason="empty", ahead=cfg.stages, label="wait K free")
                _prefetch(p, cfg, key, full)
    with k.role("mma", warps=1, registers=24) as t, t.tiles():
        t.wait(q_ring)
        for _, trips in loops(t, "primed", "rest", "last"):
            if trips != "primed":
                _wait_copy(t, cfg, "V", full)
                t.wait_barrier(o_ready, reason="full")
                t.wait_barrier(p_full, reason="full")
                _tcgen05(t, cfg, "PV", cfg.dv, cfg.n, pv_done)
            if trips != "last":
                _wait_copy(t, cfg, "K", full)
                t.wait_barrier(s_free, reason="empty", ahead=2)
                _tcgen05(t, cfg, "QK", cfg.n, cfg.d, qk_done)
        t.release(q_ring)
    with k.role("correction", warps=4, registers=168) as c, c.tiles():
        for _ in loops(c, ""):
            c.wait_barrier(maximum, reason="full")
            c.vector("scale", {"fadd": 1, "ex2": 1}, latency={"smem": 1, "ex2": 1})
            c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
            _rescale(c, cfg)
            c.arrive(o_ready)
    with k.role("softmax", warps=cfg.warps, registers=168) as s, s.tiles():
        _cold(s, "setup", SETUP)
        for mask, _ in loops(s, ""):
            s.wait_barrier(qk_done, reason="full", label="wait QK")
            _scores(s, cfg, mask == "masked")
            s.arrive(s_free)
            s.arrive(maximum)
            _probabilities(s, cfg)
            s.wait_barrier(pv_done, reason="empty", ahead=1, label="wait P free")
            _p_to_tmem(s, cfg)
            s.arrive(p_full)
        s.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
        _load_output(s, cfg)
        _store_output(s, cfg, o)
