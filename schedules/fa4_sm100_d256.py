"""FlashAttention-4 forward on Blackwell at head dim 256: pairs of CTAs, one query tile each, S double-buffered.

K and V come in halves of 128 columns, and QK is one block ahead of PV. O is rescaled in every block, and the
correction waits for the last PV itself: with QK ahead, S being complete no longer says so.

Source: sm100_hd256_2cta_fmha_forward.py in flash_attn/cute of Dao-AILab/flash-attention at 0251105a; what the compiler
made of it is builds/fa4/sm100.toml. More in docs/schedules/fa4.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.blocks import BlockInfo
from fasim.kernels.correction import normalise, read_scale, read_sum, rescale, rescale_columns
from fasim.kernels.softmax_sm100 import Softmax, SoftmaxKnobs, choose
from fasim.kernels.tcgen05 import Issuer, issuer
from fasim.kernels.tmem import ROWS, Operands, QueryTile, TmemForward, begin, load, operands, query_tile, setup
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.effects import Store
from fasim.program.language import Kernel, Ring, Role, Tensor
from fasim.program.library import schedule

#: Halves of the columns of Q and K, or V and O, in the order of their copies.
HALVES = ((0.5, 1.0), (0.0, 0.5))
FIRST, SECOND = HALVES


@dataclass(frozen=True)
class Knobs(SoftmaxKnobs):
    """What can be changed: the softmax, as in the other kernels."""


@schedule(architectures=("blackwell",), dtypes=("bf16", "fp16"), head_dims=(256,))
def fa4(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> Kernel:
    """FlashAttention-4 forward at head dim 256: pairs of CTAs, QK a block ahead of PV."""
    if problem.head_dim_v != 256:
        raise ConfigError(f"fa4: no kernel for head_dim 256, head_dim_v {problem.head_dim_v} (has (256, 256))")
    packed = problem.group > 1 if knobs.pack_gqa is None else knobs.pack_gqa
    f = TmemForward(problem, arch, build, BlockInfo(problem, 2 * ROWS, 128, packed), queries=1, ctas=2, early=4)
    knobs, f = choose(knobs, f)
    k = begin(f, knobs)
    x = operands(k, f, "single", ROWS * 128 * problem.bits // 8 // f.ctas, stages=4, parts=2)
    k.tiles |= rescale_columns(k, f, conditional=False)
    k.tmem_columns = 512  # S in 0-127 and 128-255, O above
    tile = query_tile(k, f, stages=2)

    with k.role("load", warps=1, registers=32) as r:
        setup(r, f)
        with r.tiles(draws=True):
            r.load(x.q)
            load_halves(r, x.kv, x.k)
            with r.loop("steps"):
                load_halves(r, x.kv, x.k)
                load_halves(r, x.kv, x.v)
            load_halves(r, x.kv, x.v)
    with k.role("mma", warps=1, registers=32) as r:
        setup(r, f)
        with r.tiles(), issuer(k, r, f, x, parts=2) as mma:
            mma.wait(x.q)
            qk(mma, x, tile)
            with r.loop("steps"):
                qk(mma, x, tile)
                pv(mma, x, tile)
            mma.release(x.q)
            pv(mma, x, tile)
    with k.role("softmax", warpgroups=1, registers=f.registers.softmax) as r:
        softmax = Softmax(k, r, f, tile)
        with softmax.tiles():
            for masked in softmax.blocks():
                softmax.block(masked)
            softmax.end()
    with k.role("correction", warpgroups=1, registers=f.registers.correction) as r:
        setup(r, f)
        with r.tiles():
            r.wait_barrier(tile.stats)  # the first block has nothing to rescale
            r.arrive(tile.read)
            r.arrive(tile.ready, scope=f.scope)
            with r.loop("steps"):
                r.wait_barrier(tile.stats, effects=read_scale(f, tile))
                r.arrive(tile.read)
                r.wait_barrier(tile.output, reason="full", label="wait PV")
                rescale(r, f, *(tile.o.columns(*half) for half in HALVES))
                r.arrive(tile.ready, scope=f.scope)
            read_sum(r, f, tile)
            normalise(r, f, tile, to_smem=False)
            r.copy("store O", x.o, f.o_bytes, "store", engine="threads", effects=(Store("O"),))
            r.wait_copies("store")
    return k


def load_halves(r: Role, ring: Ring, tensor: Tensor) -> None:
    """A block of K or V."""
    for _ in HALVES:
        load(r, ring, tensor)


def qk(mma: Issuer, x: Operands, tile: QueryTile) -> None:
    """S over both halves of the head dimension."""
    for half, done in ((FIRST, None), (SECOND, tile.scores)):
        mma.wait(x.kv)
        mma.qk(tile.q.columns(*half), x.keys, into=tile.next_s, done=done, add=half is SECOND)
        mma.release(x.kv)


def pv(mma: Issuer, x: Operands, tile: QueryTile) -> None:
    """Both halves of the columns of O."""
    mma.role.wait_barrier(tile.ready, reason="full")
    for half, done in ((FIRST, None), (SECOND, tile.output)):
        mma.wait(x.kv)
        mma.pv(tile.ready_p, x.values, into=tile.o.columns(*half), done=done)
        mma.release(x.kv)
