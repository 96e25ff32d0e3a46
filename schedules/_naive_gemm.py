"""The GEMMs of standard attention, as cuBLAS runs them; see :mod:`naive`.

In 16 bit and TF32: wgmma or tcgen05 in a persistent grid; 16 bit on Ampere: mma.sync. In FP32: FFMA, on every chip.

Tiles and clusters on Hopper in 16 bit are in the names that counters of cuBLAS's kernels carry (h200_counters.csv):
``nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT`` is S = Q K^T, ``.._128x256_64x4_1x2_..`` is O = P V. cuBLAS computes
the transpose, so 256 x 128 are 256 keys by 128 queries and 128 x 256 a head dimension of 128 by 256 queries; the 2 CTAs
of a cluster take neighbouring queries and share K or V by multicast: what L2 sends and SMs receive differ by half of K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.problem import Problem
from fasim.program.effects import Effect, Layout, Load, Matmul, Move, Region, Round, Store
from fasim.program.language import Kernel, Ring, Role, Tensor, waited
from fasim.program.ops import BarrierUse, Copy, Mix, Wait, scale_mix
from fasim.program.tiles import Operand, Smem, Tmem

IntArray = npt.NDArray[np.int64]

TILE_M = 128
STEP = 32  # columns of the score matrix in one line of the model's L2

#: Instructions of the FP32 GEMM (128 x 128 tile, four warps of 64 x 64, cp.async) per thread and depth of 1 beside the
#: 128 FFMA: counters of sm80_xmma_gemm_f32f32 at a depth of 128 and 1024 keys on an H200 (h200_eager_counters.csv).
FP32_STEP: Mix = {"ffma": 128.0, "alu": 8.8, "lds": 8.4, "misc": 2.7}

NOTHING: Mix = {}

#: Where a GEMM on Hopper writes the score matrix, a quarter of its tile is converted and stored at a time: the shared
#: memory of the measured kernels, 213188 bytes, leaves 16 KB beside the four stages.
QUARTERS = 4

#: Instructions per element of that beside F2FP and STS: counters of the kernel that writes S, less those of its
#: 2 x 64 of depth, for which the kernel that reads P has 504 a warp.
EPILOGUE: Mix = {"alu": 0.28, "misc": 1.24}


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
    tile_m: int = TILE_M
    cluster: int = 1  # CTAs of neighbouring rows, which share B by multicast


def row_tiles_beside(problem: Problem) -> int:
    """Row tiles of the score matrix whose lines lie beside each other: a GEMM's tile of 256 rows takes two."""
    return 2 - problem.q_tiles(TILE_M) % 2


def matrix(k: Kernel, name: str, start: str, element: int, layout: Layout | None = None, step: int = 1) -> Tensor:
    """The score matrix: lines of 128 rows x 32 columns, the same in every kernel."""
    problem = k.problem
    lines = problem.batch * problem.heads_q * problem.q_tiles(TILE_M) * problem.kv_tiles(STEP)
    return k.tensor(name, lines, element * TILE_M * STEP, start, step, layout or score_layout(problem))


def rows_of(length: int, first: int, count: int, head: int) -> IntArray:
    """``count`` rows of a head from ``first`` on; -1 beyond its end."""
    row = first + np.arange(count, dtype=np.int64)
    return np.where(row < length, head * length + row, -1)


def keys_of(problem: Problem, head: int, columns: slice) -> IntArray:
    """The rows of K that columns of the score matrix stand for."""
    kv_head = head // problem.heads_q * problem.heads_kv + head % problem.heads_q // problem.group
    return kv_head * problem.seqlen_k + np.arange(columns.start, columns.stop, dtype=np.int64)


def score_layout(problem: Problem, tile_n: int = STEP, tile_m: int = TILE_M) -> Layout:
    """Lines of the score matrix; a GEMM's tile of ``tile_m`` x ``tile_n`` is made of several.

    Numbered by head, ``row_tiles_beside``, column and row tile among those.
    """
    blocks, parts, rows = problem.kv_tiles(STEP), tile_n // STEP, tile_m // TILE_M
    beside = row_tiles_beside(problem)

    def region(line: int, tile: int) -> Region:
        head, block = divmod(line // beside // blocks * beside + line % beside, problem.q_tiles(TILE_M))
        column = line // beside % blocks * STEP
        columns = slice(column, min(column + STEP, problem.seqlen_k))
        return Region(rows_of(problem.seqlen_q, block * TILE_M, TILE_M, head), columns, keys_of(problem, head, columns))

    def share(line: int) -> tuple[float, float]:
        part, of = (line % beside, rows) if rows > 1 else (line // beside % blocks % parts, parts)
        return part / of, (part + 1) / of

    return Layout(problem.batch * problem.heads_q * problem.seqlen_q, problem.seqlen_k, region, share=share)


def operand_layout(problem: Problem, g: Gemm, operand: str) -> Layout:
    """Lines of Q (``a``), K and V (``b``) and O (``c``) as the GEMMs take them; a cluster's CTA takes its part of B."""
    steps, n_tiles, m_tiles = -(-g.depth // g.step), -(-g.columns // g.tile_n), problem.q_tiles(g.tile_m)
    heads_kv, heads_q = (problem.batch * n for n in (problem.heads_kv, problem.heads_q))

    def region(line: int, tile: int) -> Region:
        if operand == "c":
            index, n = divmod(line, n_tiles)
            head, block = divmod(index, m_tiles)
            wide = slice(n * g.tile_n, (n + 1) * g.tile_n)
            return Region(rows_of(problem.seqlen_q, block * g.tile_m, g.tile_m, head), wide)
        line, part = divmod(line, g.cluster) if operand == "b" else (line, 0)
        index, step = divmod(line, steps)
        deep = slice(step * g.step, (step + 1) * g.step)
        if operand == "a":
            head, block = divmod(index, m_tiles)
            return Region(rows_of(problem.seqlen_q, block * g.tile_m, g.tile_m, head), deep)
        index, n = divmod(index, n_tiles)
        wide = slice(n * g.tile_n, (n + 1) * g.tile_n)
        first, count = (wide.start, g.tile_n) if g.c_lines else (deep.start, min(g.step, problem.seqlen_k - deep.start))
        begin, end = (count * of // g.cluster for of in (part, part + 1))
        return Region(rows_of(problem.seqlen_k, first + begin, end - begin, index), deep if g.c_lines else wide)

    def share(line: int) -> tuple[float, float]:
        part = line % g.cluster
        return part / g.cluster, (part + 1) / g.cluster

    rows = heads_kv * problem.seqlen_k if operand == "b" else heads_q * problem.seqlen_q
    columns = g.depth if g.c_lines else g.columns
    array = {"a": "Q", "b": "K" if g.c_lines else "V", "c": "O"}[operand]
    return Layout(rows, columns, region, array, share if operand == "b" else None)


def operand_lines(problem: Problem, g: Gemm) -> tuple[int, int]:
    """Lines of A (where it is not the score matrix) and of B; each is what one copy of a CTA takes."""
    steps = -(-g.depth // g.step)
    rows = problem.batch * problem.heads_q * problem.q_tiles(g.tile_m)
    return rows * steps, problem.batch * problem.heads_kv * -(-g.columns // g.tile_n) * steps * g.cluster


def operand_shape(problem: Problem, first: Gemm, second: Gemm, tensor: str) -> tuple[int, float]:
    """Lines of Q, K, V or O as the two GEMMs have them, and elements in each."""
    q_lines, k_lines = operand_lines(problem, first)
    _, v_lines = operand_lines(problem, second)
    o_lines = problem.batch * problem.heads_q * problem.q_tiles(second.tile_m) * -(-second.columns // second.tile_n)
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
    k = Kernel(g.name, problem, arch, knobs, cluster=g.cluster)
    synchronous = arch.sm.tma is None or (g.element == 4 and not g.tf32)
    hopper = arch.architecture == "hopper" and not synchronous
    rounds = QUARTERS if hopper and g.c_lines else 1
    _tiles(k, g, rounds)
    steps = -(-g.depth // g.step)
    a_bytes, b_bytes, c_bytes = (g.element * n for n in (g.tile_m * g.step, g.step * g.tile_n, g.tile_m * g.tile_n))
    a_lines, b_lines = operand_lines(problem, g)
    b = k.tensor(g.b, b_lines, b_bytes // g.cluster, "b", g.cluster, operand_layout(problem, g, "b"))
    beside, copies = row_tiles_beside(problem), 1
    if g.c_lines:
        a = k.tensor(g.a, a_lines, a_bytes, "a", 1, operand_layout(problem, g, "a"))
        c = matrix(k, g.c, "c", g.element, score_layout(problem, g.tile_n), beside)
    else:
        copies = g.tile_m // TILE_M
        a = matrix(k, g.a, "a", g.element, score_layout(problem, tile_m=g.tile_m), beside // copies)
        c = k.tensor(g.c, k.tile_count, c_bytes, "c", 1, operand_layout(problem, g, "c"))
    consumers = 2 if hopper else 1
    rings = [
        _ring(k, a, a_bytes, stages, consumers, copies),
        k.ring(b, b_bytes, stages, consumers=consumers, multicast=g.cluster > 1),
    ]
    if synchronous:
        _multistage(k, g, rings, c, steps, stages)
        return k
    k.mode, k.max_ctas_per_sm = "static", 1
    k.smem("C", c_bytes // (QUARTERS if hopper else 2))  # not the whole tile at a time
    with k.role("producer", warps=1, registers=40) as p, p.tiles(), p.loop(steps):
        for ring, count in zip(rings, (copies, 1), strict=True):
            _load(p, ring, count)
    if hopper:
        _hopper(k, g, rings, c, steps, rounds)
    else:
        _blackwell(k, g, rings, c, steps)
    return k


def _ring(k: Kernel, tensor: Tensor, nbytes: int, stages: int, consumers: int, copies: int) -> Ring:
    """A ring whose stages are filled by ``copies`` lines of ``tensor`` each."""
    ring = k.ring(tensor, nbytes, stages, consumers=consumers)
    full = replace(ring.full, arrivals=copies)
    k.barriers[k.barriers.index(ring.full)] = full
    return replace(ring, full=full, copy_bytes=nbytes // copies)


def _load(role: Role, ring: Ring, copies: int) -> None:
    """Fill a stage of ``ring``."""
    role.load(ring)
    name = ring.buffer.name
    for copy in range(1, copies):
        use = BarrierUse(ring.full.name, ring.full.stages, part=copy)
        effects = (Load(Smem(name)),)
        role.record(Copy(f"load {name}", ring.tensor.name, ring.copy_bytes, "load", "tma", use, effects=effects))


def _product(g: Gemm, into: Operand) -> tuple[Effect, ...]:
    """The GEMM of one stage."""
    return (Matmul(into, Smem(g.a), Smem(g.b), transposed=g.c_lines, add=True),)


def _mainloop(role: Role, g: Gemm, rings: list[Ring], shape: tuple[int, int], steps: int, into: Operand) -> None:
    """One group of MMAs of ``shape`` a stage; a stage is released when the group after it has been issued."""
    m, n = shape

    def issue() -> None:
        for ring in rings:
            role.wait(ring)
        k = 32 // g.element
        dtype = "tf32" if g.tf32 else "bf16"
        count = g.tile_m * g.tile_n // (role.count * m * n) * (g.step // k)
        role.mma(g.name, m=m, n=n, k=k, count=count, dtype=dtype, effects=_product(g, into))

    issue()
    with role.loop(steps - 1):
        issue()
        role.wait_mma(1)
        for ring in rings:
            role.release(ring)
    role.wait_mma(0)
    for ring in rings:
        role.release(ring)


def _hopper(k: Kernel, g: Gemm, rings: list[Ring], c: Tensor, steps: int, rounds: int) -> None:
    """Two warpgroups of half a tile each, as cuBLAS' cooperative kernels; math and epilogue take turns.

    wgmma of 64 x 128 with the longer side in the rows: counters have 4.19 M warp instructions and 48 wavefronts of
    operands to four of them, in both GEMMs.
    """
    barrier = k.barrier("epilogue", 2, named=True)
    with k.role("consumer", warpgroups=2, registers=232) as w, w.tiles():
        _mainloop(w, g, rings, (64, min(g.tile_m, g.tile_n)), steps, "C")
        for number in range(rounds):  # values: all of them with the first
            w.sync(barrier, label="last C stored")
            elements = g.tile_m * g.tile_n / (2 * rounds)
            _convert(w, g, elements, k.problem.dtype, extra=EPILOGUE, effective=number == 0)
            w.sync(barrier, label="C complete")
            with w.only(-1):
                _store(w, c, g, "tma", Smem("C"), number)


def _blackwell(k: Kernel, g: Gemm, rings: list[Ring], c: Tensor, steps: int) -> None:
    """Two accumulators in tensor memory: the epilogue of a tile runs beside the next tile's MMAs."""
    k.tmem_columns = 2 * g.tile_n
    k.region("C", 0, g.tile_n, 2)
    full, empty = k.barrier("accumulator.full", 1, 2), k.barrier("accumulator.empty", 1, 2)
    with k.role("mma", warps=1, registers=64) as w, w.tiles():
        w.wait_barrier(empty, reason="empty", ahead=1)
        _mainloop(w, g, rings, (TILE_M, g.tile_n), steps, Tmem("C", after=waited(empty)))
        w.arrive(full)
    with k.role("epilogue", warpgroups=1, registers=168) as w, w.tiles():
        w.wait_barrier(full, reason="full")
        nbytes, load = 4 * TILE_M * g.tile_n, (Move(Tmem("C", after=waited(full)), "C"),)
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
            use = BarrierUse(ring.full.name, ring.full.stages)
            name, into = ring.buffer.name, (Load(Smem(ring.buffer.name)),)
            role.record(Copy(f"load {name}", ring.tensor.name, ring.copy_bytes, "load", "threads", use, effects=into))

    def step(role: Role) -> None:
        for ring in rings:
            use = BarrierUse(ring.full.name, ring.full.stages)
            role.record(Wait(f"wait {ring.buffer.name}", use, "memory", named=True))
        if g.element == 4:
            per_depth = {name: count * g.step * g.tile_n / 128 for name, count in FP32_STEP.items()}
            nbytes = 4 * 512 * per_depth["lds"] + fills
            role.vector(g.name, per_depth, smem_bytes=nbytes, effects=_product(g, "C"))
            return
        ldsm = (64 + g.tile_n / 2) * g.step * 2 / 512
        role.vector(
            g.name,
            {"ldsm": ldsm, "misc": elements * g.step / (16 * 8 * 16 * 4) + 8},
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


def _convert(
    w: Role,
    g: Gemm,
    elements: float,
    dtype: str,
    staged: bool = True,
    extra: Mix = NOTHING,
    effective: bool = True,
) -> None:
    """Accumulators to the output's type and into shared memory (512 bytes a warp instruction).

    ``staged``: into a buffer of its own, else into that of the operands, which is not followed. ``extra``: further
    instructions per element. ``effective``: false where values were followed before.
    """
    nbytes = g.element * elements
    effects: tuple[Effect, ...] = (Round("C", "C", dtype),) if g.element == 2 else ()
    effects += (Move("C", Smem("C")),) if staged else ()
    w.vector(
        "C to SMEM",
        {"f2fp": elements / 256 if g.element == 2 else 0.0, "sts": nbytes / 2048, **scale_mix(extra, elements / 128)},
        smem_bytes=nbytes,
        latency={"smem": 1},
        effects=effects if effective else (),
    )


def _store(w: Role, c: Tensor, g: Gemm, engine: Literal["tma", "threads"], source: Operand, number: int = 0) -> None:
    with w.loop(f"c_copies {number}", "store C"):
        w.copy(f"store {g.c}", c, c.line_bytes, "store", engine, effects=(Store(source),))
    w.wait_copies("store", f"wait {g.c} store")


def _tiles(k: Kernel, g: Gemm, rounds: int) -> None:
    """(head, row tiles of a cluster, column tile, row tile), the last fastest, and the first line of each operand.

    What of C is stored is counted for each of ``rounds``.
    """
    problem = k.problem
    m_tiles, n_tiles = problem.q_tiles(g.tile_m), -(-g.columns // g.tile_n)
    heads = problem.batch * problem.heads_q
    grid = np.mgrid[0:heads, 0 : m_tiles // g.cluster, 0:n_tiles, 0 : g.cluster]
    head, group, n, rank = (x.ravel() for x in grid)
    m = group * g.cluster + rank
    kv_head = head // problem.heads_q * problem.heads_kv + head % problem.heads_q // problem.group
    steps = -(-g.depth // g.step)
    row = head * m_tiles + m
    lines, beside = problem.kv_tiles(STEP), row_tiles_beside(problem)
    first = row * (g.tile_m // TILE_M)  # row tile of the score matrix
    score = first // beside * beside * lines + first % beside
    k.tiles = {"b": (kv_head * n_tiles + n) * steps * g.cluster + rank}
    if g.c_lines:
        per_tile, per_round = g.tile_n // STEP, g.tile_n // STEP // rounds
        k.tiles |= {"a": row * steps, "c": score + n * per_tile * beside}
        for number in range(rounds):
            k.tiles[f"c_copies {number}"] = np.clip(lines - n * per_tile - number * per_round, 0, per_round)
    else:
        k.tiles |= {"a": score, "c": row * n_tiles + n, "c_copies 0": np.ones_like(row)}
