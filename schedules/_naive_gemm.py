"""The GEMMs of standard attention, as cuBLAS runs them; see :mod:`naive`.

In 16 bit and TF32: wgmma or tcgen05 in a persistent grid; 16 bit on Ampere: mma.sync. In FP32: FFMA, on every chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.effects import Effect, Layout, Load, Matmul, Move, Operand, Region, Round, Smem, Store, Tmem
from fasim.ops import BarrierUse, Copy, Mix, Wait
from fasim.problem import Problem
from fasim.schedule import Kernel, Ring, Role, Tensor

IntArray = npt.NDArray[np.int64]

TILE_M = 128
STEP = 32  # columns of the score matrix in one line of the model's L2

#: Instructions of the FP32 GEMM (128 x 128 tile, four warps of 64 x 64, cp.async) per thread and depth of 1 beside the
#: 128 FFMA: counters of sm80_xmma_gemm_f32f32 at a depth of 128 and 1024 keys on an H200 (h200_eager_counters.csv).
FP32_STEP: Mix = {"ffma": 128.0, "alu": 8.8, "lds": 8.4, "misc": 2.7}


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
    element: int = 2  # bytes
    tf32: bool = False  # FP32 operands on the tensor cores


def matrix(k: Kernel, name: str, start: str, element: int, layout: Layout | None = None) -> Tensor:
    """The score matrix: lines of 128 rows x 32 columns, the same in every kernel."""
    problem = k.problem
    lines = problem.batch * problem.heads_q * problem.q_tiles(TILE_M) * problem.kv_tiles(STEP)
    return k.tensor(name, lines, element * TILE_M * STEP, start, 1, layout or score_layout(problem))


def rows_of(length: int, first: int, count: int, head: int) -> IntArray:
    """``count`` rows of a head from ``first`` on; -1 beyond its end."""
    row = first + np.arange(count, dtype=np.int64)
    return np.where(row < length, head * length + row, -1)


def keys_of(problem: Problem, head: int, columns: slice) -> IntArray:
    """The rows of K that columns of the score matrix stand for."""
    kv_head = head // problem.heads_q * problem.heads_kv + head % problem.heads_q // problem.group
    return kv_head * problem.seqlen_k + np.arange(columns.start, columns.stop, dtype=np.int64)


def score_layout(problem: Problem, tile_n: int = STEP) -> Layout:
    """Lines of the score matrix; a GEMM's tile of ``tile_n`` columns is stored in several."""
    blocks, parts = problem.kv_tiles(STEP), tile_n // STEP

    def region(line: int, tile: int) -> Region:
        (head, block), column = divmod(line // blocks, problem.q_tiles(TILE_M)), line % blocks * STEP
        columns = slice(column, min(column + STEP, problem.seqlen_k))
        rows = rows_of(problem.seqlen_q, block * TILE_M, TILE_M, head)
        return Region(rows, columns, keys_of(problem, head, columns))

    def share(line: int) -> tuple[float, float]:
        part = line % blocks % parts
        return part / parts, (part + 1) / parts

    return Layout(problem.batch * problem.heads_q * problem.seqlen_q, problem.seqlen_k, region, share=share)


def operand_layout(problem: Problem, g: Gemm, operand: str) -> Layout:
    """Lines of Q (``a``), K and V (``b``) and O (``c``) as the GEMMs take them."""
    steps, n_tiles = -(-g.depth // g.step), -(-g.columns // g.tile_n)
    heads_kv, heads_q = (problem.batch * n for n in (problem.heads_kv, problem.heads_q))

    def region(line: int, tile: int) -> Region:
        index, step = divmod(line, steps) if operand != "c" else (line, 0)
        deep = slice(step * g.step, (step + 1) * g.step)
        if operand == "a":
            head, block = divmod(index, problem.q_tiles(TILE_M))
            return Region(rows_of(problem.seqlen_q, block * TILE_M, TILE_M, head), deep)
        index, n = divmod(index, n_tiles)
        wide = slice(n * g.tile_n, (n + 1) * g.tile_n)
        if operand == "c":
            head, block = divmod(index, problem.q_tiles(TILE_M))
            return Region(rows_of(problem.seqlen_q, block * TILE_M, TILE_M, head), wide)
        if g.c_lines:
            return Region(rows_of(problem.seqlen_k, wide.start, g.tile_n, index), deep)
        keys = min(g.step, problem.seqlen_k - deep.start)
        return Region(rows_of(problem.seqlen_k, deep.start, keys, index), wide)

    rows = heads_kv * problem.seqlen_k if operand == "b" else heads_q * problem.seqlen_q
    columns = g.depth if g.c_lines else g.columns
    return Layout(rows, columns, region, {"a": "Q", "b": "K" if g.c_lines else "V", "c": "O"}[operand])


def operand_lines(problem: Problem, g: Gemm) -> tuple[int, int]:
    """Lines of A (where it is not the score matrix) and of B; each is what one stage takes."""
    steps = -(-g.depth // g.step)
    rows = problem.batch * problem.heads_q * problem.q_tiles(TILE_M)
    return rows * steps, problem.batch * problem.heads_kv * -(-g.columns // g.tile_n) * steps


def operand_shape(problem: Problem, first: Gemm, second: Gemm, tensor: str) -> tuple[int, float]:
    """Lines of Q, K, V or O as the two GEMMs have them, and elements in each."""
    q_lines, k_lines = operand_lines(problem, first)
    _, v_lines = operand_lines(problem, second)
    o_lines = problem.batch * problem.heads_q * problem.q_tiles(TILE_M) * -(-second.columns // second.tile_n)
    queries, keys = problem.heads_q * problem.seqlen_q, problem.heads_kv * problem.seqlen_k
    lines, elements = {
        "Q": (q_lines, queries * first.depth),
        "K": (k_lines, keys * first.depth),
        "V": (v_lines, keys * second.columns),
        "O": (o_lines, queries * second.columns),
    }[tensor]
    return lines, problem.batch * elements / lines


def gemm(problem: Problem, arch: Arch, g: Gemm, stages: int, knobs: dict[str, object]) -> Kernel:
    """The kernel of ``g``, with ``stages`` buffers of each operand."""
    k = Kernel(g.name, problem, arch, knobs)
    _tiles(k, g)
    steps = -(-g.depth // g.step)
    a_bytes, b_bytes, c_bytes = (g.element * n for n in (TILE_M * g.step, g.step * g.tile_n, TILE_M * g.tile_n))
    a_lines, b_lines = operand_lines(problem, g)
    b = k.tensor(g.b, b_lines, b_bytes, "b", 1, operand_layout(problem, g, "b"))
    if g.c_lines:
        a = k.tensor(g.a, a_lines, a_bytes, "a", 1, operand_layout(problem, g, "a"))
        c = matrix(k, g.c, "c", g.element, score_layout(problem, g.tile_n))
    else:
        a = matrix(k, g.a, "a", g.element)
        c = k.tensor(g.c, k.tile_count, c_bytes, "c", 1, operand_layout(problem, g, "c"))
    synchronous = arch.sm.tma is None or (g.element == 4 and not g.tf32)
    rings = [
        k.ring(t, n, stages, consumers=2 if arch.architecture == "hopper" and not synchronous else 1)
        for t, n in ((a, a_bytes), (b, b_bytes))
    ]
    if synchronous:
        _multistage(k, g, rings, c, steps, stages)
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


def _product(g: Gemm, into: Operand) -> tuple[Effect, ...]:
    """The GEMM of one stage."""
    return (Matmul(into, Smem(g.a), Smem(g.b), transposed=g.c_lines, add=True),)


def _mainloop(role: Role, g: Gemm, rings: list[Ring], m: int, steps: int, into: Operand) -> None:
    """One MMA group a stage; a stage is released when the group after it has been issued."""

    def issue() -> None:
        for ring in rings:
            role.wait(ring)
        k = 32 // g.element
        dtype = "tf32" if g.tf32 else "bf16"
        role.mma(g.name, m=m, n=g.tile_n, k=k, count=g.step // k, dtype=dtype, effects=_product(g, into))

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
        _mainloop(w, g, rings, 64, steps, "C")
        w.sync(barrier, label="last C stored")
        _convert(w, g, 64 * g.tile_n, k.problem.dtype)
        w.sync(barrier, label="C complete")
        with w.only(-1):
            _store(w, c, g, "tma", Smem("C"))


def _blackwell(k: Kernel, g: Gemm, rings: list[Ring], c: Tensor, steps: int) -> None:
    """Two accumulators in tensor memory: the epilogue of a tile runs beside the next tile's MMAs."""
    k.tmem_columns = 2 * g.tile_n
    k.region("C", 0, g.tile_n, 2)
    full, empty = k.barrier("accumulator.full", 1, 2), k.barrier("accumulator.empty", 1, 2)
    with k.role("mma", warps=1, registers=64) as w, w.tiles():
        w.wait_barrier(empty, reason="empty", ahead=1)
        _mainloop(w, g, rings, TILE_M, steps, Tmem("C", counter="accumulator.empty.shared.wait"))
        w.arrive(full)
    with k.role("epilogue", warpgroups=1, registers=168) as w, w.tiles():
        w.wait_barrier(full, reason="full")
        nbytes, load = 4 * TILE_M * g.tile_n, (Move(Tmem("C", counter="accumulator.full.shared.wait"), "C"),)
        w.vector("load C", {"misc": g.tile_n / 32}, tmem_load_bytes=nbytes, latency={"tmem": 1}, effects=load)
        w.arrive(empty)
        _convert(w, g, TILE_M * g.tile_n, k.problem.dtype)
        _store(w, c, g, "tma", Smem("C"))


def _multistage(k: Kernel, g: Gemm, rings: list[Ring], c: Tensor, steps: int, stages: int) -> None:
    """Four warps of 64 x 64, cp.async into a multistage buffer, one CTA a tile (CUTLASS multistage)."""
    ahead = min(stages - 1, steps)
    elements = TILE_M * g.tile_n
    fills = sum(ring.copy_bytes for ring in rings)

    def fill(role: Role) -> None:
        for ring in rings:
            use = BarrierUse(ring.full.name, ring.full.stages, f"{ring.buffer.name}.load")
            name, into = ring.buffer.name, (Load(Smem(ring.buffer.name)),)
            role.record(Copy(f"load {name}", ring.tensor.name, ring.copy_bytes, "load", "threads", use, effects=into))

    def step(role: Role) -> None:
        for ring in rings:
            use = BarrierUse(ring.full.name, ring.full.stages, f"{ring.buffer.name}.get")
            role.record(Wait(f"wait {ring.buffer.name}", use, "memory", named=True))
        if g.element == 4:
            per_depth = {name: count * g.step * g.tile_n / 128 for name, count in FP32_STEP.items()}
            nbytes = 4 * 512 * per_depth["lds"] + fills
            role.vector(g.name, per_depth, smem_bytes=nbytes, effects=_product(g, "C"))
            return
        ldsm = (64 + g.tile_n / 2) * g.step * 2 / 512
        role.vector(
            g.name,
            {"lds": ldsm, "misc": elements * g.step / (16 * 8 * 16 * 4) + 8},
            smem_bytes=4 * 512 * ldsm + fills,
            mma_sync_flops=2.0 * elements * g.step,
            effects=_product(g, "C"),
        )

    with k.role("warps", warps=4, registers=232) as w, w.tiles():
        for _ in range(ahead):
            fill(w)
        with w.loop(steps - ahead, "main loop"):
            step(w)
            fill(w)
        with w.loop(ahead, "drain"):
            step(w)
        if g.element == 2:
            w.delay("last MMA", k.arch.sm.tensor.mma_sync_latency_cycles)
        _convert(w, g, elements, k.problem.dtype, staged=False)
        _store(w, c, g, "threads", "C")


def _convert(w: Role, g: Gemm, elements: float, dtype: str, staged: bool = True) -> None:
    """Accumulators to the output's type and into shared memory (512 bytes a warp instruction).

    ``staged``: into a buffer of its own, else into that of the operands, which is not followed.
    """
    nbytes = g.element * elements
    effects: tuple[Effect, ...] = (Round("C", "C", dtype),) if g.element == 2 else ()
    effects += (Move("C", Smem("C")),) if staged else ()
    w.vector(
        "C to SMEM",
        {"f2fp": elements / 256 if g.element == 2 else 0.0, "sts": nbytes / 2048},
        smem_bytes=nbytes,
        latency={"smem": 1},
        effects=effects,
    )


def _store(w: Role, c: Tensor, g: Gemm, engine: Literal["tma", "threads"], source: Operand) -> None:
    with w.loop("c_copies", "store C"):
        w.copy(f"store {g.c}", c, c.line_bytes, "store", engine, effects=(Store(source),))
    w.wait_copies("store", f"wait {g.c} store")


def _tiles(k: Kernel, g: Gemm) -> None:
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
