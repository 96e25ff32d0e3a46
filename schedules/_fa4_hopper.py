"""The Hopper kernels of FlashAttention-4: the structure of FA3, not persistent, written in the CuTe DSL.

One warp loads; two or three consumer warpgroups of 64 rows issue QK of a block and PV of the last back to back
(up to head dim 128 in turn, by named barriers), then compute the softmax of the block. Other than in FA3: a CTA per
tile, blocks of 128 keys at head dim 128 with or without a mask, no clusters, the mask in every block of a causal tile,
the maxima of both rows before all exponentials, O through the space of Q.

Sources: flash_attn/cute/flash_fwd_sm90.py and interface.py of Dao-AILab/flash-attention at 0251105a for tiles, roles,
barriers and order; instruction counts and what stands before which wait from the disassembly of that source, compiled
for sm_90a in BF16 by nvidia-cutlass-dsl 4.8.1, head dims 64, 96, 128, 192, (192, 128) and 256.
"""

from __future__ import annotations

from dataclasses import dataclass

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.program.effects import Mask, Move, Normalise, Rescale, Round, Store
from fasim.program.language import Barrier, Kernel, Ring, Role, Tensor
from fasim.program.tiles import Smem

from ._fa3_order import FA4, FA4_CAUSAL
from ._fa3_order import Order as Softmax
from ._fa3_parts import (
    FENCE_O_CYCLES,
    FETCH_CYCLES,
    LOOP_CYCLES,
    SETUP_CYCLES,
    Config,
    exp_to_p,
    pv,
    qk,
    row_max,
)
from ._fa3_producer import issue_loads
from ._fa4_grid import Order, grid


@dataclass(frozen=True)
class Shape:
    """Tile of a kernel; ``p_in_smem``: P is an operand in shared memory instead of registers."""

    m: int
    n: int
    p_in_smem: bool = False


#: (head_dim up to, head_dim_v up to) -> shapes without and with a causal mask; interface.py.
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

#: What a block's maxima scale, with the checks for infinity.
SCALE = {"fsel": 4, "fadd": 2, "fmul": 4, "ex2": 2, "ffma": 2}


def hopper_kernel(problem: Problem, arch: Arch, packed: bool) -> Kernel:
    """The kernel for ``problem``. Raises ConfigError for a type or head dimension without one."""
    d, dv = problem.head_dim, problem.head_dim_v
    widths = next(((a, b) for a, b in SHAPES if d <= a and dv <= b), None)
    if widths is None or d % 16 or dv % 16:
        raise ConfigError(
            f"fa4 on {arch.name}: no tile for head_dim {d}, head_dim_v {dv}; multiples of 16 up to 256 exist"
        )
    if problem.bits != 16:
        raise ConfigError(f"fa4 on {arch.name}: no dtype '{problem.dtype}' (has bf16, fp16)")
    shape = SHAPES[widths][problem.causal]
    sequence = (FA4_CAUSAL if problem.causal else FA4)[widths]
    warpgroups = shape.m // 64
    registers = REGISTERS[warpgroups]
    order: Order = "lpt" if problem.causal else "single"
    knobs: dict[str, object] = dict(tile_m=shape.m, tile_n=shape.n, scheduler=order, pack_gqa=packed)
    k = Kernel("fa4", problem, arch, knobs, max_ctas_per_sm=1, launch_registers=registers[2])
    layouts = grid(k, shape.m, shape.n, order, packed)
    c = _config(problem, shape)
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
            # 107 instructions before the first copy and about 70 for a pair of K and V; FA3 has 120 and 50 to 86
            r.delay("tile set-up", SETUP_CYCLES["16 bit"], "issue")
            r.load(k_ring)
            r.load(q_ring)
            with r.loop("steps"):
                issue_loads(r, "fa4")
                r.load(k_ring)
                r.load(v_ring)
            r.load(v_ring)
    with k.role("consumer", warpgroups=warpgroups, registers=registers[1]) as r:
        r.delay("setup", 2 * arch.launch.registers_realloc_cycles, "launch")
        with r.tiles():
            r.delay("tile set-up", SETUP_CYCLES["16 bit"], "issue")  # beside the producer's
            r.delay("instruction fetch", FETCH_CYCLES[0], "issue")
            r.wait(q_ring)
            r.wait(k_ring)
            qk(r, c)
            r.wait_mma(0, "wait QK")
            r.release(k_ring)
            _row_max(r, c, sequence, masked=True)
            exp_to_p(r, c, sequence, SCALE, rescale=False)
            with r.loop("steps"):
                _step(r, c, sequence, k_ring, v_ring, turn)
            r.release(q_ring)
            if c.rescale_early:
                r.vector("rescale O", {"fmul": c.dv / 2}, effects=(Rescale("O"),))
            r.wait(v_ring)
            pv(r, c)
            r.wait_mma(0, "wait PV")
            r.release(v_ring)
            _store_output(r, c, staged, o_tensor)
    return k


def _config(problem: Problem, shape: Shape) -> Config:
    """The kernel in FA3's words."""
    return Config(
        m=shape.m,
        n=shape.n,
        d=problem.head_dim,
        dv=problem.head_dim_v,
        stages=STAGES,
        pingpong=problem.head_dim <= 128,
        overlap=True,
        in_registers=not shape.p_in_smem,
        exp=True,
        warpgroups=shape.m // 64,
        rescale_early=problem.head_dim_v > 128,
        first_release=False,
        fp8=False,
        two_level=False,
        output="tma",
        formats=(problem.dtype, problem.dtype),
        causal=problem.causal,
    )


def _step(r: Role, c: Config, sequence: Softmax, k_ring: Ring, v_ring: Ring, turn: Barrier) -> None:
    """QK of this block, PV of the last, softmax; the compiler waits for PV among the exponentials."""
    r.wait(k_ring)  # all warps poll, before they wait for their turn
    if c.pingpong:
        r.wait_barrier(turn, "own", label="wait turn")
    qk(r, c, rescale=c.rescale_early)
    r.wait(v_ring)
    pv(r, c)
    if c.pingpong:
        r.arrive(turn, "next", label="pass turn")
    r.wait_mma(1, "wait QK")
    _row_max(r, c, sequence, masked=c.causal)

    def wait_pv() -> None:
        r.release(k_ring)
        r.wait_mma(0, "wait PV")
        r.release(v_ring)

    exp_to_p(r, c, sequence, SCALE, rescale=not c.rescale_early, between=wait_pv)
    r.delay("loop", LOOP_CYCLES, "issue")


def _row_max(r: Role, c: Config, sequence: Softmax, masked: bool) -> None:
    """The mask and the maxima that come first.

    The mask is an FSEL per element, R2P and LOP3 per eight, and the place of the diagonal where there is one.
    """
    if masked:
        r.vector("mask", {"fsel": 1.25 * c.elements + 16 * c.causal}, effects=(Mask("S"),))
    row_max(r, c, sequence)


def _store_output(r: Role, c: Config, staged: Barrier, o_tensor: Tensor) -> None:
    """Row sums, 1/l, O to 16 bit, through shared memory and out by TMA, which a warp of the first warpgroup starts.

    The others only arrive at the second barrier and are done.
    """
    r.delay("instruction fetch", FETCH_CYCLES[1], "issue")
    r.sync(staged, label="Q read")  # O takes its place
    r.vector("row sum", {"shfl": 4, "fadd": 4, "mufu": 4, "fmul": 4}, latency={"shfl": 2, "fma": 2, "ex2": 2})
    divide = (Normalise("O"), Round("O", "O", c.formats[1]), Store("lse", "O", array="LSE"))
    r.vector("scale O", {"fmul": c.dv / 2, "f2fp": c.dv / 4}, latency={"fma": 1}, effects=divide)
    nbytes, write = 2 * 64 * c.dv, (Move("O", Smem("O")),)
    r.vector("store O", {"sts": nbytes / 512 / 4}, smem_bytes=nbytes, effects=write)
    r.delay("fence O", FENCE_O_CYCLES)
    r.arrive(staged, label="O staged")
    with r.only(0):
        r.wait_barrier(staged, label="wait O staged")
        r.copy("store O", o_tensor, o_tensor.line_bytes, "store", boxes=-(-c.dv // 64), effects=(Store(Smem("O")),))
        r.wait_copies("store", "wait O store")
