"""The Hopper kernels of FlashAttention-4: the structure of FA3, not persistent, written in the CuTe DSL.

One warp loads; two or three consumer warpgroups of 64 rows issue QK of a block and PV of the last back to back
(ping-pong by named barriers), then compute the softmax of the block. Other than in FA3: a CTA per tile, blocks of 128
keys at head dim 128 with or without a mask, no clusters, O through the space of Q.
"""

from __future__ import annotations

from dataclasses import dataclass

from fasim.arch import Arch
from fasim.effects import (
    Mask,
    Matmul,
    Move,
    Normalise,
    Probabilities,
    Rescale,
    Round,
    RowMax,
    RowSum,
    Smem,
    Store,
)
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.schedule import Barrier, Kernel, Ring, Role, Tensor

from ._fa3_parts import FENCE_CYCLES, FETCH_CYCLES, LOOP_CYCLES  # measured for FA3, taken over
from ._fa4_grid import Order, grid


@dataclass(frozen=True)
class Shape:
    """Tile of a kernel. ``p_in_smem``: P is an operand in shared memory instead of registers."""

    m: int
    n: int
    p_in_smem: bool = False


#: (head_dim up to, head_dim_v up to) -> shapes without and with a causal mask (interface.py).
SHAPES = {
    (64, 64): (Shape(192, 128), Shape(192, 128)),
    (96, 96): (Shape(192, 144, True), Shape(192, 128, True)),
    (128, 128): (Shape(128, 128), Shape(128, 128)),
    (192, 128): (Shape(128, 128), Shape(128, 128)),
    (192, 192): (Shape(128, 112), Shape(128, 112)),
    (256, 256): (Shape(128, 80), Shape(128, 80)),
}

#: consumer warpgroups -> (producer, consumer) registers, registers at launch
REGISTERS = {2: (24, 240, 168), 3: (32, 160, 128)}

STAGES = 2  # buffers each of K and V

#: Issue slots per wgmma: (450 - 346 softmax instructions) / 16.
SLOTS_PER_WGMMA = 6.5


def hopper_kernel(problem: Problem, arch: Arch, packed: bool) -> Kernel:
    """The kernel for ``problem``. Raises ConfigError for a type or head dimension without one."""
    d, dv = problem.head_dim, problem.head_dim_v
    found = next((shapes for (a, b), shapes in SHAPES.items() if d <= a and dv <= b), None)
    if found is None or d % 16 or dv % 16:
        raise ConfigError(
            f"fa4 on {arch.name}: no tile for head_dim {d}, head_dim_v {dv}; multiples of 16 up to 256 exist"
        )
    if problem.bits != 16:
        raise ConfigError(f"fa4 on {arch.name}: no dtype '{problem.dtype}' (has bf16, fp16)")
    shape = found[problem.causal]
    warpgroups = shape.m // 64
    registers = REGISTERS[warpgroups]
    order: Order = "lpt" if problem.causal else "single"
    knobs: dict[str, object] = dict(tile_m=shape.m, tile_n=shape.n, scheduler=order, pack_gqa=packed)
    k = Kernel("fa4", problem, arch, knobs, max_ctas_per_sm=1, launch_registers=registers[2])
    layouts = grid(k, shape.m, shape.n, order, packed)
    q_bytes, o_bytes = 2 * shape.m * d, 2 * shape.m * dv
    lines = problem.batch * problem.heads_kv * -(-problem.seqlen_k // shape.n)
    q_tensor = k.tensor("Q", k.tile_count, q_bytes, "q", layout=layouts.q)
    k_tensor = k.tensor("K", lines, 2 * shape.n * d, "kv", -1, layouts.k)
    v_tensor = k.tensor("V", lines, 2 * shape.n * dv, "kv", -1, layouts.v)
    q_ring = k.ring(q_tensor, q_bytes, 1, consumers=warpgroups, boxes=-(-d // 64))
    k_ring, v_ring = (
        k.ring(tensor, tensor.line_bytes, STAGES, consumers=warpgroups, boxes=-(-width // 64))
        for tensor, width in ((k_tensor, d), (v_tensor, dv))
    )
    k.smem("O", o_bytes, aliases="Q")
    if shape.p_in_smem:
        k.smem("P", 2 * shape.m * shape.n)
    o_tensor = k.tensor("O", k.tile_count, o_bytes, "q", layout=layouts.o)
    turn = k.turns("turn", warpgroups)
    staged = k.barrier("O.staged", warpgroups, named=True)

    with k.role("producer", warps=1, registers=registers[0]) as r:
        r.delay("setup", 2 * arch.launch.registers_realloc_cycles, "launch")
        with r.tiles(draws=True):
            r.load(q_ring)
            r.load(k_ring)
            with r.loop("steps"):
                r.load(k_ring)
                r.load(v_ring)
            r.load(v_ring)
    with k.role("consumer", warpgroups=warpgroups, registers=registers[1]) as r:
        r.delay("setup", 2 * arch.launch.registers_realloc_cycles, "launch")
        with r.tiles():
            r.delay("instruction fetch", FETCH_CYCLES / 2, "issue")
            r.wait(q_ring)
            r.wait(k_ring)
            _qk(r, problem, shape)
            r.wait_mma(0, "wait QK")
            r.release(k_ring)
            _softmax(r, problem, shape, masked=True)
            for trips, masked in (("masked", True), ("full", False)):
                with r.loop(trips):
                    _step(r, problem, shape, k_ring, v_ring, turn, masked)
            r.release(q_ring)
            r.wait(v_ring)
            _pv(r, problem, shape)
            r.wait_mma(0, "wait PV")
            r.release(v_ring)
            _store_output(r, problem, shape, staged, o_tensor)
    return k


def _step(r: Role, problem: Problem, shape: Shape, k_ring: Ring, v_ring: Ring, turn: Barrier, masked: bool) -> None:
    """QK of this block, PV of the last, softmax; PV is waited for after the exponentials, before P is packed."""
    r.wait(k_ring)
    r.wait_barrier(turn, "own", label="wait turn")
    _qk(r, problem, shape)
    r.wait(v_ring)
    _pv(r, problem, shape)
    r.arrive(turn, "next", label="pass turn")
    r.wait_mma(1, "wait QK")
    r.release(k_ring)
    _softmax(r, problem, shape, masked, v_ring)
    r.delay("loop", LOOP_CYCLES, "issue")


def _softmax(r: Role, problem: Problem, shape: Shape, masked: bool, v_ring: Ring | None = None) -> None:
    """Softmax of a block: per thread 2 rows and n / 2 elements. With ``v_ring``, a PV runs beside it."""
    e = shape.n / 2
    if masked:
        r.vector("mask", {"alu": 1.4 * e}, effects=(Mask("S"),))  # FSEL per element, R2P per 8
    r.vector("row max", {"fmnmx": e + 4, "shfl": 4}, latency={"shfl": 2, "alu": 2})
    r.vector("scale", {"ffma": 2, "ex2": 2, "fmul": 2}, latency={"fma": 1, "ex2": 1}, effects=(RowMax("S"),))
    r.vector("exp, sum", {"ffma": e, "ex2": e, "fadd": e}, effects=(Probabilities("S"), RowSum("S")))
    if v_ring is not None:
        r.wait_mma(0, "wait PV")
        r.release(v_ring)
        r.vector("rescale O", {"fmul": problem.head_dim_v / 2 + 4}, effects=(Rescale("O"),))
    r.vector("P", {"f2fp": e / 2}, effects=(Round("S", "P", problem.dtype),))
    if shape.p_in_smem:  # stmatrix, 512 bytes a warp instruction, then a proxy fence
        nbytes, write = 2 * 64 * shape.n, (Move("P", Smem("P")),)
        r.vector("store P", {"sts": nbytes / 512 / 4}, smem_bytes=nbytes, effects=write)
        r.delay("fence P", FENCE_CYCLES)


def _qk(r: Role, problem: Problem, shape: Shape) -> None:
    scores = Matmul("S", Smem("Q"), Smem("K"), transposed=True)
    r.mma("QK", m=64, n=shape.n, k=16, count=problem.head_dim // 16, slots=SLOTS_PER_WGMMA, effects=(scores,))


def _pv(r: Role, problem: Problem, shape: Shape) -> None:
    a, p = ("smem", Smem("P")) if shape.p_in_smem else ("register", "P")
    output = Matmul("O", p, Smem("V"), add=True)
    count = shape.n // 16
    r.mma("PV", m=64, n=problem.head_dim_v, k=16, count=count, a=a, slots=SLOTS_PER_WGMMA, effects=(output,))


def _store_output(r: Role, problem: Problem, shape: Shape, staged: Barrier, o_tensor: Tensor) -> None:
    """Row sums, 1/l, O to 16 bit, through shared memory and out by TMA; the last warpgroup sends it."""
    dv = problem.head_dim_v
    r.delay("instruction fetch", FETCH_CYCLES / 2, "issue")
    r.vector("row sum", {"shfl": 4, "fadd": 4, "mufu": 4, "fmul": 4}, latency={"shfl": 2, "fma": 2, "ex2": 2})
    divide = (Normalise("O"), Round("O", "O", problem.dtype), Store("lse", "O", array="LSE"))
    r.vector("scale O", {"fmul": dv / 2, "f2fp": dv / 4}, latency={"fma": 1}, effects=divide)
    r.sync(staged, label="Q read")  # O takes its place
    nbytes, write = 2 * 64 * dv, (Move("O", Smem("O")),)
    r.vector("store O", {"sts": nbytes / 512 / 4}, smem_bytes=nbytes, effects=write)
    r.delay("fence O", FENCE_CYCLES)
    r.sync(staged, label="O staged")
    with r.only(-1):
        r.copy("store O", o_tensor, 2 * shape.m * dv, "store", boxes=-(-dv // 64), effects=(Store(Smem("O")),))
        r.wait_copies("store", "wait O store")
