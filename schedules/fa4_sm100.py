"""FlashAttention-4 forward on Blackwell: accumulators in tensor memory, two query tiles, emulated exponentials.

A CTA owns two tiles of 128 query rows. One thread issues every MMA, in the order PV0 QK0 PV1 QK1; S, P and O live in
tensor memory, P in the upper half of the columns of its S. Each softmax warpgroup takes one tile, a thread a row, and
writes P in parts: PV starts when three quarters are there. A correction warpgroup rescales O off the critical path,
only where a maximum grew above a threshold, and does the epilogue. The paper's four moves have a switch each:
``exp2_emulation`` (some exponentials as a polynomial on the FMA pipe), ``conditional_rescale``, ``two_cta`` (MMAs over
pairs of SMs that share K and V), ``accumulator``.

Source: flash_attn/cute of Dao-AILab/flash-attention at 0251105a (flash_fwd_sm100.py, softmax.py, tile_scheduler.py,
interface.py) for tiles, roles, barriers and order; what the compiler made of it is builds/fa4/sm100.toml. More in
docs/schedules/fa4.md. Head dim 256 is a kernel of its own (fa4_sm100_d256.py), and so are Hopper's (fa4_sm90.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.blocks import BlockInfo
from fasim.kernels.correction import correction, rescale_columns
from fasim.kernels.softmax_sm100 import Softmax, SoftmaxKnobs, choose
from fasim.kernels.tcgen05 import Issuer, issuer
from fasim.kernels.tmem import ROWS, Operands, Order, QueryTile, TmemForward, begin, load, operands, query_tile, setup
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.effects import Store
from fasim.program.language import Kernel, Tile
from fasim.program.library import schedule


@dataclass(frozen=True)
class Knobs(SoftmaxKnobs):
    """What can be changed; None is what the real kernel picks."""

    conditional_rescale: Annotated[bool, "rescale O only where a maximum grew by more than the threshold"] = True
    rescale_threshold: Annotated[float | None, "growth in powers of two; default: 8, or 0 below 16 bits"] = None
    rescale_rate: Annotated[float | None, "share of blocks that rescale; default: random inputs, FP8 0.1"] = None
    two_cta: Annotated[bool | None, "MMAs over pairs of CTAs; default: as the real interface decides"] = None
    accumulator: Annotated[Literal["tmem", "registers"], "registers: what if there were no tensor memory"] = "tmem"
    query_tiles: Annotated[int | None, "tiles of 128 query rows per CTA; default: 2 where there are rows"] = None
    early_p: Annotated[float, "share of P that PV waits for before it starts"] = 0.75
    mma_order: Annotated[Literal["interleaved", "grouped"], "PV0 QK0 PV1 QK1, or PV0 PV1 QK0 QK1"] = "interleaved"
    scheduler: Annotated[Literal["static", "lpt", "clc"] | None, "default: static; lpt for a causal mask"] = None


@schedule(architectures=("blackwell",), dtypes=("bf16", "fp16", "fp8", "fp4"))
def fa4(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> Kernel:
    """FlashAttention-4 forward: TMEM accumulators, two query tiles, emulated exp2; CuTe kernels on Hopper."""
    knobs, f = resolve(problem, arch, knobs, build)
    k = begin(f, knobs)
    o_over_q = f.d > 128
    staged_bytes = 0 if o_over_q else f.o_bytes
    room = int(build.cost("smem")) - f.queries * (f.q_shape.bytes + staged_bytes)
    stage = max(f.k_shape.bytes, f.v_shape.bytes) // f.ctas
    stages = max(3, room // stage)  # (192, 128) without pairs fits three of the two sizes in turn
    x = operands(k, f, knobs.scheduler or "static", min(stage, room // stages), stages)
    k.smem("O", f.queries * f.o_bytes, aliases="Q" if o_over_q else None)
    k.tiles |= rescale_columns(k, f, knobs.conditional_rescale, knobs.rescale_threshold or 0.0, knobs.rescale_rate)
    k.tmem_columns = 512 if f.tmem else 0  # S0, S1, O0, O1; the kernel allocates all
    tiles = [query_tile(k, f, i, str(i)) for i in range(f.queries)]

    with k.role("load", warps=1, registers=f.registers.others) as r:
        setup(r, f)
        with r.tiles(draws=True):
            load(r, x.kv, x.k)
            for tile in tiles if o_over_q else ():
                r.wait_barrier(tile.stored, reason="empty", ahead=1)
            for _ in tiles:
                r.load(x.q)
            load(r, x.kv, x.v)
            with r.loop("steps"):
                load(r, x.kv, x.k)
                load(r, x.kv, x.v)
    with k.role("mma", warps=1, registers=f.registers.others) as r:
        setup(r, f)
        with r.tiles(), issuer(k, r, f, x) as mma:
            mma_tile(mma, x, tiles, grouped=knobs.mma_order == "grouped")
    for tile in tiles:
        with k.role(f"softmax{tile.index}", warpgroups=1, registers=f.registers.softmax) as r:
            softmax = Softmax(k, r, f, tile)
            with softmax.tiles():
                for masked in softmax.blocks():
                    softmax.block(masked)
                softmax.end()
    if f.tmem:
        with k.role("correction", warpgroups=1, registers=f.registers.correction) as r:
            correction(r, f, tiles)
    with k.role("epilogue", warps=1, registers=f.registers.others) as r:
        setup(r, f)
        with r.tiles():
            for tile in tiles:
                r.wait_barrier(tile.staged, reason="full", label="wait O")
                r.copy("store O", x.o, f.o_bytes, "store", boxes=-(-f.dv // 64), effects=(Store(tile.staged_o),))
            r.wait_copies("store", "wait O store")
            for tile in tiles:
                r.arrive(tile.stored)
    return k


def mma_tile(mma: Issuer, x: Operands, tiles: list[QueryTile], grouped: bool) -> None:
    """All products of a work tile: QK of the first block, then PV of a block and QK of the next in turn, then PV."""

    def qk(tile: QueryTile) -> None:
        mma.qk(tile.q, x.keys, into=tile.next_s, done=tile.scores)

    mma.wait(x.kv)
    for tile in tiles:
        mma.wait(x.q)
        qk(tile)
    mma.release(x.kv)
    with mma.role.loop("steps"):
        mma.wait(x.kv)  # V
        if grouped:  # PV0 PV1 QK0 QK1
            for tile in tiles:
                pv(mma, tile, x.values)
            mma.release(x.kv)
            mma.wait(x.kv)  # K of the next block
            for tile in tiles:
                qk(tile)
        else:  # PV0 QK0 PV1 QK1: S of a tile may overwrite its P, because that PV comes first
            for tile in tiles:
                pv(mma, tile, x.values if tile is tiles[0] else x.values.before())
                if tile is tiles[-1]:
                    mma.release(x.kv)
                if tile is tiles[0]:
                    mma.wait(x.kv)  # K of the next block, before V of this one is free
                qk(tile)
        mma.release(x.kv)
    for _ in tiles:
        mma.release(x.q)
    mma.wait(x.kv)
    for tile in tiles:
        pv(mma, tile, x.values)
        mma.commit(tile.output)
    mma.release(x.kv)


def pv(mma: Issuer, tile: QueryTile, values: Tile) -> None:
    """O += P V in two parts, as P arrives. The first has whole instructions only."""
    f, count = tile.f, tile.f.n * tile.f.problem.bits // 256
    first = count * f.early // len(f.emulated) / count
    mma.role.wait_barrier(tile.ready, reason="full")
    if first:
        mma.pv(tile.ready_p.columns(0, first), values, into=tile.o)
    if f.early < len(f.emulated):
        mma.role.wait_barrier(tile.last, reason="full")
        mma.pv(tile.ready_p.columns(first, 1), values, into=tile.o)


def resolve(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> tuple[Knobs, TmemForward]:
    """Every choice made, as the real interface makes it. Raises ConfigError for what does not exist."""
    d, dv, tmem, narrow = problem.head_dim, problem.head_dim_v, knobs.accumulator == "tmem", problem.bits < 16
    if d % 16 or dv % 16 or not (max(d, dv) <= 128 or (d, dv) == (192, 128)):
        raise ConfigError(f"fa4: no kernel for head_dim {d}, head_dim_v {dv} (has up to 128, (192, 128), (256, 256))")
    n = 128 if tmem else 64  # 128 columns of S beside 128 of O do not fit a thread's registers
    cut = BlockInfo(problem, ROWS, n, problem.group > 1 if knobs.pack_gqa is None else knobs.pack_gqa)
    queries = knobs.query_tiles or (1 if cut.rows <= ROWS else 2)
    if queries > 2:
        raise ConfigError(f"fa4: query_tiles {queries} (choices: 1, 2)")
    pairs = d in (128, 192) and not problem.causal and cut.rows > 2 * ROWS and queries == 2 and tmem
    pairs = pairs and ROWS % cut.packed_heads == 0
    two_cta = pairs if knobs.two_cta is None else knobs.two_cta
    if two_cta and not pairs:
        why = "head_dim 128 and 192, no mask, two query tiles, more than 256 query rows"
        raise ConfigError(f"fa4: two_cta is for {why}")
    threshold, rate = knobs.rescale_threshold, knobs.rescale_rate
    if rate is not None and not 0 <= rate <= 1:
        raise ConfigError(f"fa4: rescale_rate {rate}: a share between 0 and 1")
    if narrow and threshold is None and rate is None:
        rate = build.cost("narrow_rescale_rate")
    threshold = threshold if threshold is not None else 0.0 if narrow else 8.0
    parts = n // int(build.cost("fragment"))
    early = min(parts, max(1, round(knobs.early_p * parts))) if tmem else parts
    ctas = 2 if two_cta else 1
    f = TmemForward(problem, arch, build, replace(cut, tile_m=ROWS * queries * ctas), queries, ctas, early, tmem=tmem)
    order: Order = knobs.scheduler or ("lpt" if problem.causal else "static")
    knobs = replace(knobs, rescale_threshold=threshold, rescale_rate=rate, two_cta=two_cta, query_tiles=queries)
    knobs, f = choose(replace(knobs, early_p=early / parts, scheduler=order), f)
    return knobs, replace(f, threshold=threshold if knobs.conditional_rescale else 0.0)
