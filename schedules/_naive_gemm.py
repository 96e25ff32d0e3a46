"""The GEMMs of standard attention, as cuBLAS runs them; see :mod:`naive`.

In 16 bit and TF32: wgmma or tcgen05 in a persistent grid; 16 bit on Ampere: mma.sync. In FP32: FFMA, on every chip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasim.arch import Arch
from fasim.ops import BarrierUse, Copy, Mix, Wait
from fasim.problem import Problem
from fasim.schedule import Kernel, Ring, Role, Tensor

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


def matrix(k: Kernel, name: str, start: str, element: int) -> Tensor:
    """The score matrix: lines of 128 rows x 32 columns, the same in every kernel."""
    problem = k.problem
    lines = problem.batch * problem.heads_q * problem.q_tiles(TILE_M) * problem.kv_tiles(STEP)
    return k.tensor(name, lines, element * TILE_M * STEP, start, 1)


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
    a = k.tensor(g.a, a_lines, a_bytes, "a", 1) if g.c_lines else matrix(k, g.a, "a", g.element)
    b = k.tensor(g.b, b_lines, b_bytes, "b", 1)
    c = matrix(k, g.c, "c", g.element) if g.c_lines else k.tensor(g.c, k.tile_count, c_bytes, "c", 1)
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


def _mainloop(role: Role, g: Gemm, rings: list[Ring], m: int, steps: int) -> None:
    """One MMA group a stage; a stage is released when the group after it has been issued."""

    def issue() -> None:
        for ring in rings:
            role.wait(ring)
        k = 32 // g.element
        role.mma(g.name, m=m, n=g.tile_n, k=k, count=g.step // k, dtype="tf32" if g.tf32 else "bf16")

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


def _multistage(k: Kernel, g: Gemm, rings: list[Ring], c: Tensor, steps: int, stages: int) -> None:
    """Four warps of 64 x 64, cp.async into a multistage buffer, one CTA a tile (CUTLASS multistage)."""
    ahead = min(stages - 1, steps)
    elements = TILE_M * g.tile_n
    fills = sum(ring.copy_bytes for ring in rings)

    def fill(role: Role) -> None:
        for ring in rings:
            use = BarrierUse(ring.full.name, ring.full.stages, f"{ring.buffer.name}.load")
            role.record(Copy(f"load {ring.buffer.name}", ring.tensor.name, ring.copy_bytes, "load", "threads", use))

    def step(role: Role) -> None:
        for ring in rings:
            use = BarrierUse(ring.full.name, ring.full.stages, f"{ring.buffer.name}.get")
            role.record(Wait(f"wait {ring.buffer.name}", use, "memory", named=True))
        if g.element == 4:
            per_depth = {name: count * g.step * g.tile_n / 128 for name, count in FP32_STEP.items()}
            role.vector(g.name, per_depth, smem_bytes=4 * 512 * per_depth["lds"] + fills)
            return
        ldsm = (64 + g.tile_n / 2) * g.step * 2 / 512
        role.vector(
            g.name,
            {"lds": ldsm, "misc": elements * g.step / (16 * 8 * 16 * 4) + 8},
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
        if g.element == 2:
            w.delay("last MMA", k.arch.sm.tensor.mma_sync_latency_cycles)
        _convert(w, g, elements)
        _store(w, c, g, "threads")


def _convert(w: Role, g: Gemm, elements: float) -> None:
    """Accumulators to the output's type and into shared memory (512 bytes a warp instruction)."""
    nbytes = g.element * elements
    w.vector(
        "C to SMEM",
        {"f2fp": elements / 256 if g.element == 2 else 0.0, "sts": nbytes / 2048},
        smem_bytes=nbytes,
        latency={"smem": 1},
    )


def _store(w: Role, c: Tensor, g: Gemm, engine: str = "tma") -> None:
    with w.loop("c_copies", "store C"):
        w.copy(f"store {g.c}", c, c.line_bytes, "store", engine)  # type: ignore[arg-type]
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
