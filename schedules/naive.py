"""Standard attention: GEMM, softmax and GEMM as separate launches with the score matrix in memory between them.

S = Q K^T, P = softmax(S) and O = P V, with a mask kernel after the first for causal attention: 8 N^2 bytes of matrix
traffic per head (12 N^2 causal) for 4 N^2 d FLOP, so d/2 FLOP per byte. The GEMMs are what cuBLAS runs (wgmma or
tcgen05 in a persistent grid, mma.sync on Ampere), the element-wise kernels PyTorch's.

Source of tiles, stages and instruction counts: validation/data/h200_counters.csv, rows ``naive``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.library import schedule
from fasim.ops import BarrierUse, Copy, Wait, scale_mix
from fasim.problem import Problem
from fasim.schedule import Kernel, Ring, Role, Tensor

TILE_M = 128
STEP = 32  # columns of the score matrix in one line of the model's L2: 128 rows x 32 columns x 2 bytes
LINE_BYTES = 2 * TILE_M * STEP

#: Instructions per score element of PyTorch's block-per-row softmax (more than 1024 keys), by pipe: counters of
#: cunn_SoftMaxForwardReg on an H200, sm__inst_executed_pipe_* x 32 / elements; expf and division are IEEE.
SOFTMAX = {"ffma": 34.0, "alu": 22.7, "mufu": 4.2, "lds": 6.8, "misc": 21.0}
#: The warp-per-row softmax (up to 1024 keys) has the exponentials once instead of twice, but loads and stores two bytes
#: at a time. Not counted: this share of the block kernel's was fitted to the one H200 row of 1024 tokens.
WARP_SHARE, WARP_KEYS = 0.65, 1024
#: The mask kernel, per element of a vectorised element-wise kernel: load, compare, select, store and index. Inferred.
MASK = {"alu": 3.0, "imad": 1.0, "ldg": 0.25, "stg": 0.25, "misc": 1.0}


@dataclass(frozen=True)
class Gemm:
    """One batched GEMM: C (rows x columns) = A (rows x depth) B, per head."""

    name: str
    a: str
    b: str
    c: str
    columns: int
    depth: int
    tile_n: int
    step: int  # depth of one stage
    c_lines: bool  # C is the score matrix, kept in lines of ``STEP`` columns


@schedule(architectures=("ampere", "hopper", "blackwell"), dtypes=("bf16", "fp16"))
def naive(
    problem: Problem,
    arch: Arch,
    *,
    stages: Annotated[int, "buffers of each GEMM operand"] = 4,
    softmax_instructions: Annotated[
        float | None, "per score element of the softmax kernel; default: PyTorch 2.11, 89 or 58 up to 1024 keys"
    ] = None,
) -> list[Kernel]:
    """Standard attention in three kernels (four with a causal mask), bound by the traffic of the score matrix."""
    if stages < 2:
        raise ConfigError(f"naive: stages {stages}: a GEMM that loads ahead needs at least 2")
    d, dv = problem.head_dim, problem.head_dim_v
    deep = 64 if d % 64 == 0 else 32 if d % 32 == 0 else 16
    if d % 16 or dv % 16 or dv > 256:
        raise ConfigError(f"naive: head_dim {d}, head_dim_v {dv}: multiples of 16, head_dim_v up to 256")
    per_element = softmax_instructions
    if per_element is None:
        per_element = sum(SOFTMAX.values()) * (WARP_SHARE if problem.seqlen_k <= WARP_KEYS else 1.0)
    if per_element <= 0:
        raise ConfigError(f"naive: softmax_instructions {per_element}: must be positive")
    wide = 128 if arch.architecture == "ampere" else 256
    masked = "S masked" if problem.causal else "S"
    first = Gemm("QK", "Q", "K", "S", problem.seqlen_k, d, wide, deep, c_lines=True)
    second = Gemm("PV", "P", "V", "O", dv, problem.seqlen_k, min(wide, dv), STEP, c_lines=False)
    kernels = [_gemm(problem, arch, first, stages)]
    if problem.causal:
        kernels.append(_mask(problem, arch))
    kernels += [_softmax(problem, arch, masked, per_element), _gemm(problem, arch, second, 2 * stages)]
    for kernel in kernels:
        kernel.knobs |= {"stages": stages, "softmax_instructions": per_element}
    return kernels


def _matrix(k: Kernel, name: str, start: str, nbytes: int = LINE_BYTES) -> Tensor:
    """The score matrix: lines of 128 rows x 32 columns, the same in every kernel."""
    problem = k.problem
    lines = problem.batch * problem.heads_q * problem.q_tiles(TILE_M) * problem.kv_tiles(STEP)
    return k.tensor(name, lines, nbytes, start, 1)


# --- GEMM ----------------------------------------------------------------------------------------
def _gemm(problem: Problem, arch: Arch, g: Gemm, stages: int) -> Kernel:
    k = Kernel(g.name, problem, arch, {})
    _gemm_tiles(k, g)
    steps = -(-g.depth // g.step)
    a_bytes, b_bytes, c_bytes = 2 * TILE_M * g.step, 2 * g.step * g.tile_n, 2 * TILE_M * g.tile_n
    a_lines = problem.batch * problem.heads_q * problem.q_tiles(TILE_M) * steps
    b_lines = problem.batch * problem.heads_kv * -(-g.columns // g.tile_n) * steps
    a = _matrix(k, g.a, "a") if g.a == "P" else k.tensor(g.a, a_lines, a_bytes, "a", 1)
    b = k.tensor(g.b, b_lines, b_bytes, "b", 1)
    c = _matrix(k, g.c, "c") if g.c_lines else k.tensor(g.c, k.tile_count, c_bytes, "c", 1)
    tma = arch.sm.tma is not None
    rings = [
        k.ring(t, n, stages, consumers=2 if arch.architecture == "hopper" else 1)
        for t, n in ((a, a_bytes), (b, b_bytes))
    ]
    if not tma:
        _ampere(k, g, rings, c, steps, stages)
        return k
    k.mode, k.max_ctas_per_sm = "static", 1
    k.smem("C", c_bytes // 2)  # half a tile at a time
    with k.role("producer", warps=1, registers=40) as p, p.tiles(), p.loop(steps):
        for ring in rings:
            p.load(ring)
    if arch.architecture == "hopper":
        _hopper(k, g, rings, c, steps)
    else:
        _blackwell(k, g, rings, c, steps)
    return k


def _mainloop(role: Role, g: Gemm, rings: list[Ring], m: int, steps: int) -> None:
    """One MMA group a stage; a stage is released when the group after it has been issued."""

    def issue() -> None:
        for ring in rings:
            role.wait(ring)
        role.mma(g.name, m=m, n=g.tile_n, k=16, count=g.step // 16)

    issue()
    with role.loop(steps - 1):
        issue()
        role.wait_mma(1)
        for ring in rings:
            role.release(ring)
    role.wait_mma(0)
    for ring in rings:
        role.release(ring)


def _hopper(k: Kernel, g: Gemm, rings: list[Ring], c: Tensor, steps: int) -> None:
    """Two warpgroups of 64 rows each, as cuBLAS' cooperative kernels; math and epilogue take turns."""
    barrier = k.barrier("epilogue", 2, named=True)
    with k.role("consumer", warpgroups=2, registers=232) as w, w.tiles():
        _mainloop(w, g, rings, 64, steps)
        _convert(w, g, 64 * g.tile_n)
        w.sync(barrier, label="C complete")
        with w.only(-1):
            _store(w, c, g)


def _blackwell(k: Kernel, g: Gemm, rings: list[Ring], c: Tensor, steps: int) -> None:
    """Two accumulators in tensor memory: the epilogue of a tile runs beside the next tile's MMAs."""
    k.tmem_columns = 2 * g.tile_n
    full, empty = k.barrier("accumulator.full", 1, 2), k.barrier("accumulator.empty", 1, 2)
    with k.role("mma", warps=1, registers=64) as w, w.tiles():
        w.wait_barrier(empty, reason="empty", ahead=1)
        _mainloop(w, g, rings, TILE_M, steps)
        w.arrive(full)
    with k.role("epilogue", warpgroups=1, registers=168) as w, w.tiles():
        w.wait_barrier(full, reason="full")
        w.vector("load C", {"misc": g.tile_n / 32}, tmem_load_bytes=4 * TILE_M * g.tile_n, latency={"tmem": 1})
        w.arrive(empty)
        _convert(w, g, TILE_M * g.tile_n)
        _store(w, c, g)


def _ampere(k: Kernel, g: Gemm, rings: list[Ring], c: Tensor, steps: int, stages: int) -> None:
    """Four warps of 64 x 64, cp.async into a multistage buffer, one CTA a tile (CUTLASS multistage)."""
    ahead = min(stages - 1, steps)
    elements = TILE_M * g.tile_n
    hmma = elements * g.step / (16 * 8 * 16 * 4)
    ldsm = (64 + g.tile_n / 2) * g.step * 2 / 512

    def fill(role: Role) -> None:
        for ring in rings:
            use = BarrierUse(ring.full.name, ring.full.stages, f"{ring.buffer.name}.load")
            role.record(Copy(f"load {ring.buffer.name}", ring.tensor.name, ring.copy_bytes, "load", "threads", use))

    def step(role: Role) -> None:
        for ring in rings:
            use = BarrierUse(ring.full.name, ring.full.stages, f"{ring.buffer.name}.get")
            role.record(Wait(f"wait {ring.buffer.name}", use, "memory", named=True))
        fills = sum(ring.copy_bytes for ring in rings)
        role.vector(
            g.name,
            {"lds": ldsm, "misc": hmma + 8},
            smem_bytes=4 * 512 * ldsm + fills,
            mma_sync_flops=2.0 * elements * g.step,
        )

    with k.role("warps", warps=4, registers=232) as w, w.tiles():
        for _ in range(ahead):
            fill(w)
        with w.loop(steps - ahead, "main loop"):
            step(w)
            fill(w)
        with w.loop(ahead, "drain"):
            step(w)
        w.delay("last MMA", k.arch.sm.tensor.mma_sync_latency_cycles)
        _convert(w, g, elements)
        _store(w, c, g, "threads")


def _convert(w: Role, g: Gemm, elements: float) -> None:
    """Accumulators to 16 bit and into shared memory (stmatrix: 512 bytes a warp instruction)."""
    w.vector(
        "C to SMEM", {"f2fp": elements / 256, "sts": elements / 1024}, smem_bytes=2 * elements, latency={"smem": 1}
    )


def _store(w: Role, c: Tensor, g: Gemm, engine: str = "tma") -> None:
    with w.loop("c_copies", "store C"):
        w.copy(f"store {g.c}", c, c.line_bytes, "store", engine)  # type: ignore[arg-type]
    w.wait_copies("store", f"wait {g.c} store")


def _gemm_tiles(k: Kernel, g: Gemm) -> None:
    """(head, row tile, column tile), columns fastest, and the first line of each operand."""
    problem = k.problem
    m_tiles, n_tiles = problem.q_tiles(TILE_M), -(-g.columns // g.tile_n)
    heads = problem.batch * problem.heads_q
    head, m, n = (x.ravel() for x in np.mgrid[0:heads, 0:m_tiles, 0:n_tiles])
    kv_head = head // problem.heads_q * problem.heads_kv + head % problem.heads_q // problem.group
    steps = -(-g.depth // g.step)
    row = head * m_tiles + m
    k.tiles = {"a": row * steps, "b": (kv_head * n_tiles + n) * steps}
    if g.c_lines:
        lines, per_tile = problem.kv_tiles(STEP), g.tile_n // STEP
        k.tiles |= {"c": row * lines + n * per_tile, "c_copies": np.minimum(per_tile, lines - n * per_tile)}
    else:
        k.tiles |= {"c": row * n_tiles + n, "c_copies": np.ones_like(row)}


# --- element-wise kernels ------------------------------------------------------------------------
def _row_tiles(k: Kernel, rows: int) -> tuple[int, int]:
    """One CTA per ``rows`` rows of the matrix: lines it touches, and bytes in each."""
    problem = k.problem
    heads = problem.batch * problem.heads_q
    lines = heads * problem.q_tiles(TILE_M) * problem.kv_tiles(STEP)
    ctas = -(-heads * problem.seqlen_q // rows)
    first: npt.NDArray[np.int64] = np.arange(ctas, dtype=np.int64) * lines // ctas
    k.tiles = {"line": first}
    copies = max(1, lines // ctas)
    return copies, 2 * rows * problem.seqlen_k // copies


def _softmax(problem: Problem, arch: Arch, source: str, per_element: float) -> Kernel:
    """PyTorch's softmax: a warp per row up to 1024 keys, else a block of 1024 threads that holds the row."""
    keys = problem.seqlen_k
    by_warp = keys <= WARP_KEYS
    rows = max(4 if by_warp else 1, LINE_BYTES // (2 * keys))
    k = Kernel("softmax", problem, arch, {})
    copies, nbytes = _row_tiles(k, rows)
    scores, out = _matrix(k, source, "line", nbytes), _matrix(k, "P", "line", nbytes)
    warps = rows if by_warp else 32
    held = keys / 32 if by_warp else keys / 1024  # elements of a row per thread
    registers = round(22 + held + (0 if by_warp else held))  # 30 and 37 of the block kernel at 4 and 8: counters
    sync = arch.sm.sync.syncthreads_base_cycles + 32 * arch.sm.sync.syncthreads_per_warp_cycles
    mix = scale_mix(SOFTMAX, held * per_element / sum(SOFTMAX.values()))
    levels = 5 if by_warp else 10  # butterfly of a warp, twice for a block
    with k.role("warps", warps=warps, registers=registers) as w, w.tiles():
        for _ in range(copies):
            w.copy(f"load {source}", scores, nbytes, "load", "threads")
        w.wait_copies("load", f"wait {source}")
        with w.loop(1 if by_warp else rows, "rows"):
            for label, share in (("row max", 0.2), ("exp and sum", 0.4)):
                w.vector(label, scale_mix(mix, share), latency={"shfl": levels, "alu": levels})
                if not by_warp:
                    w.delay("syncthreads", 2 * sync, "barrier")
            w.vector("normalise", scale_mix(mix, 0.4))
        for _ in range(copies):
            w.copy("store P", out, nbytes, "store", "threads")
        w.wait_copies("store", "drain")
    return k


def _mask(problem: Problem, arch: Arch) -> Kernel:
    """The causal mask as an element-wise kernel over the whole matrix, out of place."""
    rows = max(1, LINE_BYTES // (2 * problem.seqlen_k))
    k = Kernel("mask", problem, arch, {})
    copies, nbytes = _row_tiles(k, rows)
    scores, out = _matrix(k, "S", "line", nbytes), _matrix(k, "S masked", "line", nbytes)
    with k.role("warps", warps=4, registers=32) as w, w.tiles():
        for _ in range(copies):
            w.copy("load S", scores, nbytes, "load", "threads")
        w.wait_copies("load", "wait S")
        w.vector("mask", scale_mix(MASK, rows * problem.seqlen_k / 128))
        for _ in range(copies):
            w.copy("store S", out, nbytes, "store", "threads")
        w.wait_copies("store", "drain")
    return k
