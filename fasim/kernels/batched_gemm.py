"""The batched GEMMs of standard attention, as cuBLAS runs them: one product per head.

In 16 bit and TF32: wgmma or tcgen05 in a persistent grid; in 16 bit on Ampere: mma.sync. In FP32: FFMA, on every chip.
The build says what the kernels execute beside their products, see ``builds/naive``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fasim.arch import Arch
from fasim.kernels.matrices import Matrix, score_matrix
from fasim.kernels.mma_sync import HMMA_FLOPS, LDSM_BYTES
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.effects import Effect, Matmul, Move, Round, Store
from fasim.program.language import Group, Kernel, Ring, Role, Shape, Smem, Tensor, Tile, Tmem, register_tile, waited
from fasim.program.ops import CopyEngine, Mix, scale_mix
from fasim.program.tiles import FORMAT_BITS


class Tiling(NamedTuple):
    """A CTA has ``m`` x ``n`` of C in steps of ``depth``; CTAs of a ``cluster`` take neighbouring rows and share B."""

    m: int
    n: int
    depth: int
    cluster: int = 1


@dataclass(frozen=True)
class Gemm:
    """C = A B, or A B^T if ``transposed``, per head, in number format ``format``; ``names``: of tensors A, B and C."""

    name: str
    names: tuple[str, str, str]
    a: Matrix
    b: Matrix
    c: Matrix
    tiling: Tiling
    format: str
    transposed: bool = False

    @property
    def steps(self) -> int:
        """Steps of the main loop."""
        return -(-self.a.columns // self.tiling.depth)

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return FORMAT_BITS[self.format] // 8


def score_product(problem: Problem, tiling: Tiling, format: str) -> Gemm:
    """S = Q K^T."""
    m, n, depth, cluster = tiling
    q_heads, kv_heads, d = problem.batch * problem.heads_q, problem.batch * problem.heads_kv, problem.head_dim
    q = Matrix(q_heads, problem.seqlen_q, d, m, depth, array="Q")
    k = Matrix(kv_heads, problem.seqlen_k, d, n // cluster, depth, beside=cluster, array="K")
    return Gemm("QK", ("Q", "K", "S"), q, k, score_matrix(problem), tiling, format, transposed=True)


def output_product(problem: Problem, tiling: Tiling, format: str, p: str) -> Gemm:
    """O = P V, with P in the tensor ``p``. V is taken column by column of its tiles; P ends with the last key."""
    m, n, depth, cluster = tiling
    q_heads, kv_heads, dv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv, problem.head_dim_v
    blocks = problem.kv_tiles(depth) * cluster
    v = Matrix(kv_heads, problem.seqlen_k, dv, depth // cluster, n, beside=blocks, padded=False, array="V")
    o = Matrix(q_heads, problem.seqlen_q, dv, m, n, array="O")
    return Gemm("PV", (p, "V", "O"), score_matrix(problem), v, o, tiling, format)


def batched_gemm(
    problem: Problem, arch: Arch, build: Build, g: Gemm, stages: int, knobs: Mapping[str, object]
) -> Kernel:
    """The kernel of ``g``, with ``stages`` buffers of each operand."""
    k = Kernel(g.name, problem, arch, dict(knobs), cluster=g.tiling.cluster)
    by_threads = arch.sm.tma is None or g.format == "fp32"
    hopper = arch.architecture == "hopper" and not by_threads
    parts = 1 if by_threads else int(build.cost("output_parts", arch.architecture))
    rounds = parts if hopper and g.transposed else 1
    _grid(k, g, rounds)
    m, n, depth, cluster = g.tiling
    copies, consumers = m // g.a.line_rows, 2 if hopper else 1
    b_shape = Shape(n, depth, g.format) if g.transposed else Shape(depth, n, g.format)

    def tensor(of: str, name: str, matrix: Matrix, step: int, stage: tuple[int, int]) -> Tensor:
        nbytes = g.element * matrix.line_rows * matrix.line_columns
        return k.tensor(name, matrix.lines, nbytes, of, step, matrix.layout(stage))

    b = tensor("b", g.names[1], g.b, cluster, b_shape[:2])  # copies of A and B go along the depth
    a = tensor("a", g.names[0], g.a, g.a.beside // copies, (m, depth))
    c = tensor("c", g.names[2], g.c, g.c.beside, (m, n))  # those of C along its columns
    rings = (
        k.ring(a, Shape(m, depth, g.format), stages, consumers=consumers, copies=copies, boxes=1),
        k.ring(b, b_shape, stages, consumers=consumers, multicast=cluster > 1, boxes=1),
    )
    if by_threads:
        _multistage(k, build, g, rings, c, stages)
        return k
    k.mode, k.max_ctas_per_sm = "static", 1
    k.smem("C", g.element * m * n // parts)
    with k.role("producer", warps=1, registers=_registers(build, "producer")) as p, p.tiles(), p.loop(g.steps):
        for ring in rings:
            p.load(ring)
    if hopper:
        _hopper(k, build, g, rings, c, rounds)
    else:
        _blackwell(k, build, g, rings, c)
    return k


def _grid(k: Kernel, g: Gemm, rounds: int) -> None:
    """(head, row tiles of a cluster, column tile, row tile), the last fastest, and the first line of each operand.

    Lines of C that are stored are counted for each of ``rounds``.
    """
    rows, columns, _, cluster = g.tiling
    m_tiles, n_tiles = -(-g.c.rows // rows), -(-g.c.columns // columns)
    head, group, n, rank = (x.ravel() for x in np.mgrid[0 : g.c.heads, 0 : m_tiles // cluster, 0:n_tiles, 0:cluster])
    m, kv_head = group * cluster + rank, head // k.problem.group
    b = g.b.line(kv_head, n * cluster + rank) if g.transposed else g.b.line(kv_head, rank, n)
    row, beside = m * (rows // g.c.line_rows), columns // g.c.line_columns
    k.tiles = {"b": b, "a": g.a.line(head, m * (rows // g.a.line_rows)), "c": g.c.line(head, row, n * beside)}
    part = beside // rounds
    for number in range(rounds):
        k.tiles[f"c_copies {number}"] = np.clip(g.c.column_blocks - n * beside - number * part, 0, part)


def _registers(build: Build, role: str) -> int:
    return int(build.cost("gemm_registers", role))


def _mainloop(role: Role, g: Gemm, rings: tuple[Ring, Ring], into: Tile) -> None:
    """One group of MMAs a stage; a stage is released when the group after it has been issued."""

    def product() -> Group:
        for ring in rings:
            role.wait(ring)
        return role.gemm(g.name, *rings, into, add=True, transposed=g.transposed)

    def finish(group: Group) -> None:
        role.finish(group)
        for ring in rings:
            role.release(ring)

    first = product()
    with role.loop(g.steps - 1):
        last = product()
        finish(first)
    finish(last)


def _hopper(k: Kernel, build: Build, g: Gemm, rings: tuple[Ring, Ring], c: Tensor, rounds: int) -> None:
    """Two warpgroups of half a tile each, as cuBLAS' cooperative kernels; math and epilogue take turns.

    cuBLAS computes the transpose where that has more rows: counters have 4.19 M warp instructions and 48 wavefronts of
    operands to four of them, in both GEMMs.
    """
    m, n, *_ = g.tiling
    long, short = (max(m, n), min(m, n)) if max(m, n) % 128 == 0 else (m, n)  # no half instructions
    accumulator = register_tile("C", long // 2, short)
    barrier = k.barrier("epilogue", 2, named=True)
    with k.role("consumer", warpgroups=2, registers=_registers(build, "consumer")) as w, w.tiles():
        _mainloop(w, g, rings, accumulator)
        for number in range(rounds):  # values: all of them with the first
            w.sync(barrier, label="last C stored")
            _convert(w, g, m * n / (2 * rounds), build.mix("epilogue"), effective=number == 0)
            w.sync(barrier, label="C complete")
            with w.only(-1):
                _store(w, g, c, "tma", number)


def _blackwell(k: Kernel, build: Build, g: Gemm, rings: tuple[Ring, Ring], c: Tensor) -> None:
    """Two accumulators in tensor memory: the epilogue of a tile runs beside the next tile's MMAs."""
    m, n, *_ = g.tiling
    k.tmem_columns = 2 * n
    k.region("C", 0, n, 2)
    full, empty = k.barrier("accumulator.full", 1, 2), k.barrier("accumulator.empty", 1, 2)
    with k.role("mma", warps=1, registers=_registers(build, "mma")) as w, w.tiles():
        w.wait_barrier(empty, reason="empty", ahead=1)
        _mainloop(w, g, rings, Tile(Tmem("C", after=waited(empty)), Shape(m, n, "fp32")))
        w.arrive(full)
    with k.role("epilogue", warpgroups=1, registers=_registers(build, "epilogue")) as w, w.tiles():
        w.wait_barrier(full, reason="full")
        load = (Move(Tmem("C", after=waited(full)), "C"),)
        w.vector("load C", {"misc": n / 32}, tmem_load_bytes=4 * m * n, latency={"tmem": 1}, effects=load)
        w.arrive(empty)
        _convert(w, g, m * n)
        _store(w, g, c, "tma")


def _multistage(k: Kernel, build: Build, g: Gemm, rings: tuple[Ring, Ring], c: Tensor, stages: int) -> None:
    """Four warps of 64 x 64, cp.async into a multistage buffer, one CTA a tile (CUTLASS multistage)."""
    m, n, depth, _ = g.tiling
    ahead = min(stages - 1, g.steps)
    fp32, fills = g.format == "fp32", sum(ring.copy_bytes for ring in rings)
    flops = 0.0 if fp32 else 2.0 * m * n * depth
    hmma = flops / HMMA_FLOPS / 4
    mix: Mix = {"ldsm": (64 + n / 2) * depth * 2 / LDSM_BYTES, "misc": hmma + build.cost("step_slots")}
    if fp32:
        mix = scale_mix(build.mix("fp32_step"), depth * n / 128)
    smem_bytes = 4 * LDSM_BYTES * mix["lds" if fp32 else "ldsm"] + fills
    product = Matmul("C", Smem(g.names[0]), Smem(g.names[1]), transposed=g.transposed, add=True)

    def fill(role: Role) -> None:
        for ring in rings:
            role.fill(ring, "threads")

    def step(role: Role) -> None:
        for ring in rings:
            role.wait_filled(ring)
        role.vector(g.name, mix, smem_bytes=smem_bytes, mma_sync_flops=flops, effects=(product,))

    with k.role("warps", warps=4, registers=_registers(build, "warps")) as w, w.tiles():
        for _ in range(ahead):
            fill(w)
        with w.loop(g.steps - ahead, "main loop"):
            step(w)
            fill(w)
        with w.loop(ahead, "drain"):
            step(w)
        if not fp32:
            w.delay("last MMA", k.arch.sm.tensor.mma_sync_latency_cycles)
        _convert(w, g, m * n, staged=False)
        _store(w, g, c, "threads")


def _convert(
    w: Role, g: Gemm, elements: float, more: Mix | None = None, staged: bool = True, effective: bool = True
) -> None:
    """Accumulators to the output's type and into shared memory (512 bytes a warp instruction).

    ``staged``: into a buffer of its own, else into that of the operands, which is not followed. ``more``: instructions
    per element. ``effective``: false where values were followed before.
    """
    narrow, nbytes = g.element == 2, g.element * elements
    mix = {"f2fp": elements / 256 if narrow else 0.0, "sts": nbytes / 2048, **scale_mix(more or {}, elements / 128)}
    effects: tuple[Effect, ...] = (Round("C", "C", g.format),) if narrow else ()
    effects += (Move("C", Smem("C")),) if staged else ()
    w.vector("C to SMEM", mix, smem_bytes=nbytes, latency={"smem": 1}, effects=effects if effective else ())


def _store(w: Role, g: Gemm, c: Tensor, engine: CopyEngine, number: int = 0) -> None:
    name, source = g.names[2], Smem("C") if engine == "tma" else "C"
    with w.loop(f"c_copies {number}", "store C"):
        w.copy(f"store {name}", c, c.line_bytes, "store", engine, effects=(Store(source),))
    w.wait_copies("store", f"wait {name} store")
