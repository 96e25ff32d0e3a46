"""FlashAttention-1 forward: the outer loop runs over K/V blocks, O travels through global memory in FP32.

Read beside the paper (Dao et al. 2022): `kv_block` is the body of algorithm 1's outer loop, `step` that of its inner.
The reverse of every later version: a CTA holds one block of K and V in registers and lets 16 query rows at a time pass
by. Its four warps split the keys, so each has a part of every sum: row statistics and O partials meet in shared memory.

Source: Dao-AILab/flash-attention v1.0.8 (9610114c), csrc/flash_attn/src/fmha_fprop_kernel_1xN.h,
fmha_fwd_launch_template.h, fmha/kernel_traits.h. Numbers: builds/fa1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.kv_outer import ROWS, WARPS, Block, block, grid, load_q, q_to_smem, split_heuristic
from fasim.kernels.mma_sync import product, syncthreads
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.effects import (
    Add,
    Clear,
    Effect,
    Load,
    Mask,
    Matmul,
    Move,
    Normalise,
    Probabilities,
    Rescale,
    Resume,
    ResumeOutput,
    Round,
    RowMax,
    RowSum,
    Store,
)  # fmt: skip
from fasim.program.language import Kernel, Register, Role, Smem
from fasim.program.library import schedule
from fasim.program.ops import scale_mix
from fasim.program.tiles import Cursor


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    num_splits: Annotated[
        int | None,
        "CTAs that share the query rows of a head; default: the heuristic of v1.0.8 (the paper's code had 1)",
    ] = None


@schedule(architectures=("ampere", "hopper"), dtypes=("bf16", "fp16"))
def fa1(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> Kernel:
    """FlashAttention-1 forward: K/V blocks outside, 16 query rows a step, warps split the keys."""
    d, splits = problem.head_dim, knobs.num_splits
    for wrong, why in (
        (d != problem.head_dim_v or d > 128 or d % 8, f"head_dim {d}: equal multiples of 8 up to 128 exist"),
        (problem.group > 1, f"heads_kv {problem.heads_kv}: must equal heads_q {problem.heads_q}"),
        (problem.causal and problem.seqlen_q != problem.seqlen_k, "seqlen_k: a causal mask needs seqlen_q = seqlen_k"),
        (splits is not None and splits < 1, f"num_splits {splits}: must be at least 1"),
    ):
        if wrong:
            raise ConfigError(f"fa1: {why}")
    row, padded = build.tile(problem, short=problem.seqlen_k <= 128), int(build.row("padded", problem)["head_dim"])
    keys, ctas = row.tile_n, int(build.cost("ctas_per_sm"))
    heads, blocks, steps = problem.batch * problem.heads_q, problem.kv_tiles(keys), problem.q_tiles(ROWS)
    splits = splits or split_heuristic(heads, arch.chip.sm_count * ctas, problem.seqlen_q)
    k = Kernel("fa1", problem, arch, {"num_splits": splits, "build": build.name}, max_ctas_per_sm=ctas)
    k.smem("Q", 2 * ROWS * padded, 2)
    grid(k, splits, steps, blocks, keys)
    b = block(k, build, padded, keys, splits)
    k.smem("KV", max(2 * keys * padded, b.exchanged_bytes))  # K and V in turn, then what the warps exchange
    k.smem("parts", b.exchanged_bytes, aliases="KV")
    with k.role("warps", warps=WARPS, registers=row.registers or 255) as w, w.tiles():
        if problem.causal:
            for j in range(blocks):
                kv_block(w, b, j == 0, {f"diagonal {j}": True, f"below {j}": False})
        elif blocks == 1:
            kv_block(w, b, True, {"steps": True})
        else:
            kv_block(w, b, True, {"steps": False})
            with w.loop(blocks - 2, "K/V blocks"):
                kv_block(w, b, False, {"steps": False})
            kv_block(w, b, False, {"steps": True})
    return k


def kv_block(w: Role, b: Block, first: bool, loops: dict[str, bool]) -> None:
    """K and V into registers through shared memory, then the steps: trip-count column -> these rows end here."""
    for name in ("K", "V"):
        w.copy(f"load {name}", b.t[name], b.t[name].line_bytes, "load", "threads", effects=(Load(f"{name} in flight"),))
    load_q(w, b.t["Q again"], first)
    w.wait_copies("load", "wait Q, K and V")
    if not first:
        syncthreads(w, b.arch)  # the last step's parts of O have been read
    q_to_smem(w, b, first)
    words, through = 2 * b.keys * b.d / (32 * WARPS * 16), Smem("KV", share=(0, 1))  # 16-byte accesses per thread
    for name in ("V", "K"):
        moves = (f"{name} to SMEM", "sts", f"{name} in flight", through), (f"{name} to registers", "lds", through, name)
        for label, access, source, into in moves:
            effects = (Move(source, into),)
            w.vector(label, {access: words}, smem_bytes=2 * b.keys * b.d, latency={"smem": 1}, effects=effects)
            syncthreads(w, b.arch)
    for trips, final in loops.items():
        for label, more in ((trips, True), (f"{trips} end", False)):
            with w.loop(label):
                step(w, b, first, final, more)


def step(w: Role, b: Block, first: bool, final: bool, more: bool) -> None:
    """16 rows against the block, in program order; the only overlap is with the other CTA of the SM.

    ``final``: the rows end here. ``more``: the block has another step, whose rows of Q are fetched.
    """
    build, t, d, e = b.build, b.t, b.d, b.scores
    begin = (Clear("m"), Clear("l"), Clear("O")) if first else (Move("its lse", "old lse"), Resume("old lse"))
    scores = Matmul("S", Smem("Q", after=Cursor("copy", "load Q"), share=(0, 1)), "K", transposed=True)
    nbytes = 2.0 * ROWS * d * WARPS  # every warp reads all of Q
    latency = {"smem": 1, "mma_sync": 1}
    product(w, "QK", b.flops, (*begin, scores), ldsm=d / 16, smem_bytes=nbytes, latency=latency)
    if not first:
        w.copy("load O", t["O partial again"], t["O partial"].line_bytes, "load", "threads", effects=(Load("O"),))
    if more:
        load_q(w, t["Q" if first else "Q again"], first)
    w.vector("mask", build.total("mask", step=1, element=e, head_dim=d), effects=(Mask("S"),))
    row_max = RowMax("S"), Move("m", b.exchange("max"))
    mix = build.total("row_max", element=e, step=1)
    w.vector("row max", mix, latency={"shfl": 2, "alu": 2}, effects=row_max)
    syncthreads(w, b.arch)
    latency = {"smem": 1, "shfl": 2, "alu": 2, "ex2": 2, "fma": 4}
    shared = (Move(b.exchange("max"), "m"),)
    w.vector("row max of warps", build.mix("row_max_of_warps"), latency=latency, effects=shared)
    syncthreads(w, b.arch)
    p = Probabilities("S"), RowSum("S"), Move("l", b.exchange("sum")), Round("S", "P", b.dtype)
    mix = build.total("exp", element=e, step=1)
    w.vector("exp, sum, P", mix, latency={"smem": 1, "ex2": 1, "shfl": 2}, effects=p)
    if more:
        w.wait_copies("load", "wait Q and O")
        q_to_smem(w, b, first)
    keys = [Register("P", share=(warp / WARPS, (warp + 1) / WARPS)) for warp in range(WARPS)]
    products = tuple(Matmul(f"O{warp}", part, "V") for warp, part in enumerate(keys))
    product(w, "PV", b.flops, products, latency={"mma_sync": 1})
    o_bytes, mix = 4.0 * ROWS * d * WARPS, build.total("o_to_smem", step=1, head_dim=d)
    parts = tuple(Move(f"O{warp}", b.exchange("O", warp)) for warp in range(WARPS))
    w.vector("O to SMEM", mix, smem_bytes=o_bytes, latency={"smem": 1}, effects=parts)
    syncthreads(w, b.arch)
    latency = {"smem": 1, "shfl": 4, "alu": 2, "fma": 4, "ex2": 3}
    mix = build.total("statistics", step=1, head_dim=d)
    w.vector("statistics", mix, latency=latency, effects=(Move(b.exchange("sum"), "l"),))
    if not more and not first:
        w.wait_copies("load", "wait O")
    merge: tuple[Effect, ...] = () if first else (ResumeOutput("O", "old lse"), Rescale("O"))
    merge += (*(Add("O", b.exchange("O", warp)) for warp in range(WARPS)), Normalise("O"))
    merge += (Round("O", "O", b.dtype),) if final else ()
    latency, mix = {"smem": 1, "fma": 4}, scale_mix(build.mix("combine"), d)
    w.vector("sum O", mix, smem_bytes=o_bytes, latency=latency, effects=merge)
    o = t["O" if final else "O partial" if first else "O partial again"]
    w.copy("store O", o, o.line_bytes, "store", "threads", effects=(Store("O"), Store("lse", array="LSE")))
