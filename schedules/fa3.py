"""FlashAttention-3 forward on Hopper: a producer warp, ping-pong warpgroups, the softmax overlapped with GEMMs.

Read beside the paper (Shah et al. 2024): `serial` is algorithm 1, `overlapped` algorithm 2 and figure 2, a `turn` is
figure 1, `transpose` section 3.3. KV blocks come last to first; the first is always masked and stands before the loop.
Splits cut the keys of a tile into parts that a second kernel adds (decoding); heads of a group then share tiles.
Source: hopper/ of Dao-AILab/flash-attention at 0251105a (mainloop_fwd_sm90_tma_gmma_ws.hpp, tile_scheduler.hpp), and at
7f67966c and (FP8) 5018ac6a, July 2024, for the first release, which the paper measured. Numbers: builds/fa3.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

from fasim.arch import Arch
from fasim.kernels.epilogue import store_by_last
from fasim.kernels.forward import Forward, Output, operands, staging
from fasim.kernels.grid import in_order, kv_heads_in_l2, longest_first, peeled
from fasim.kernels.splits import combine, cut_tiles
from fasim.kernels.warpgroup import Consumer, Producer, kv_blocks
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.language import Group, Kernel, Ring
from fasim.program.library import schedule


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks by head dim, type and mask."""

    tile_m: Annotated[int | None, "query rows per CTA, 64 per consumer warpgroup; default: tile table"] = None
    tile_n: Annotated[int | None, "keys per iteration; default: tile table"] = None
    stages: Annotated[int | None, "buffers each of K and V; default: tile table"] = None
    pingpong: Annotated[bool | None, "named barriers order the warpgroups' MMAs; default: on up to d128"] = None
    overlap: Annotated[bool | None, "QK of the next block before PV of the last; default: but for 2024's FP8"] = None
    p_in_registers: Annotated[bool | None, "P is the register operand of PV, else it goes through SMEM"] = None
    cluster: Annotated[int | None, "CTAs that multicast K and V; default: 2 for full attention, d >= 128"] = None
    exp: Annotated[bool, "off leaves the exponential out, as the ablation builds do"] = True
    persistent: Annotated[bool, "one CTA per SM loops over tiles; off: one CTA per tile"] = True
    two_level: Annotated[bool, "FP8: PV of a block is summed apart and added to O, for accuracy"] = False
    splits: Annotated[int, "parts the keys of a tile are split into; 0: FlashAttention-3's heuristic"] = 1


@schedule(architectures=("hopper",), dtypes=("bf16", "fp16", "fp8"))
def fa3(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> list[Kernel]:
    """FlashAttention-3 forward on Hopper: ping-pong warpgroups, QK and softmax overlapped."""
    f = resolve(problem, arch, knobs, build)
    fp8, cut, wg, split = f.fp8, f.cut, f.warpgroups, f.cut.num_splits > 1
    persistent, first_release = knobs.persistent and not split, build.has("first release")
    chosen = replace(
        knobs, tile_m=f.m, tile_n=f.n, stages=f.stages, pingpong=f.turns, overlap=f.overlap, cluster=f.cluster,
        p_in_registers=f.p_in_registers, persistent=persistent, splits=cut.num_splits,
    )  # fmt: skip
    k = Kernel("fa3", problem, arch, {**asdict(chosen), "build": build.name}, f.cluster, max_ctas_per_sm=1)
    k.launch_registers = f.registers["launch"]
    k.not_attention = None if f.exp else "exp=off leaves the exponential out"
    k.mode = ("dynamic" if problem.causal else "static") if persistent else "single"
    tiles = in_order(cut)
    if problem.causal and not split and not first_release:
        # As in tile_scheduler.hpp, a section counts the query heads of a group even where they are packed into one.
        tiles = longest_first(cut, kv_heads_in_l2(problem, build.cost("l2_section")) * problem.group)
    peeled(k, cut, tiles, more_masked=int(first_release and problem.causal))
    mem = operands(k, f, None if split else tiles, rows=min(f.m, cut.rows))
    landed = values = mem.v
    if fp8:  # V lands as it lies in memory and is transposed into a ring of its own
        values = k.ring(landed.tensor, landed.shape, f.stages, consumers=wg, name="Vt")
    staging(k, f, over=values)
    o_free = k.barrier("O.free", k.cluster)  # V may land in O's space once the stores of all CTAs have read O
    turn = k.turns("turn", wg)
    done, staged = k.barrier("epilogue", wg, named=True), k.barrier("O.staged", wg, named=True)

    warps = 4 if fp8 or cut.packed_heads > 1 else 1  # who transposes V or gathers rows of several heads
    with k.role("producer", warps=warps, registers=f.registers["producer"]) as role:
        p = Producer(k, role, f)

        def hand_over() -> None:
            """V of a block: loaded, or (FP8, which wants keys contiguous) transposed from where it landed."""
            p.transpose(landed, values) if fp8 else role.load(values)

        with role.tiles(draws=True):
            if fp8:
                role.load(landed)
            role.load(mem.k)
            p.load_q(mem.q)
            role.wait_barrier(o_free, reason="empty", ahead=1)
            for _ in p.blocks():
                if fp8:
                    role.load(landed)
                role.load(mem.k)
                hand_over()
            hand_over()

    with k.role("consumer", warpgroups=wg, registers=f.registers["consumer"]) as role:
        c = Consumer(k, role, f, turn)
        with role.tiles():
            c.set_up_tile(drawn=problem.causal and persistent)
            c.wait(mem.q)
            (overlapped if f.overlap else serial)(c, mem.q, mem.k, values, first_release)
            store_by_last(role, f, done, staged, mem.o, o_free)
    return [k, combine("fa3_combine", cut, arch, build)] if split else [k]


def overlapped(c: Consumer, q: Ring, keys: Ring, values: Ring, first_release: bool) -> None:
    """Algorithm 2: QK of this block and PV of the last are in flight together; then the softmax of this block."""
    c.wait(keys)
    with c.turn(when=first_release):
        s = c.qk(q, keys)
    c.finish(s, "QK", free=keys)
    c.softmax(masked=True, first=True)
    for masked in kv_blocks(c.kernel, c.role):
        c.wait(keys, ordered=True)
        with c.turn():
            s = c.qk(q, keys, rescale=True)
            c.wait(values, ordered=True)
            o = c.pv(values)
        c.finish(s, "QK")

        def at_wait_pv(o: Group = o) -> None:  # where the compiler waits for PV: among the exponentials
            c.release(keys)
            c.finish(o, "PV", free=values)

        c.softmax(masked, at_wait_pv=at_wait_pv)
        c.branch()
    c.release(q)
    c.rescale_late()
    c.wait(values)
    c.finish(c.pv(values), "PV", free=values)


def serial(c: Consumer, q: Ring, keys: Ring, values: Ring, first_release: bool) -> None:
    """Algorithm 1: one after the other. A turn covers PV and the next QK; in the first release QK alone."""

    def block(masked: bool, first: bool = False) -> None:
        c.take_turn(first or first_release)
        c.wait(keys)
        s = c.qk(q, keys)
        c.pass_turn(not first_release)
        c.finish(s, "QK")
        c.pass_turn(first_release)
        c.release(keys)
        c.softmax(masked, first=first)
        c.wait(values)
        c.take_turn(not first_release)
        c.finish(c.pv(values), "PV", free=values)
        c.branch()

    block(masked=True, first=True)
    for masked in kv_blocks(c.kernel, c.role):
        block(masked)
    c.pass_turn(not first_release)
    c.release(q)


def resolve(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> Forward:
    """Every choice made: where a knob leaves it open, as the real kernel picks. Raises ConfigError."""
    d, fp8, first_release = problem.head_dim, problem.dtype == "fp8", build.has("first release")
    row = build.tile(problem)
    cut = cut_tiles(problem, arch, knobs.tile_m or row.tile_m, knobs.tile_n or row.tile_n, knobs.splits)
    overlap = not (fp8 and first_release) if knobs.overlap is None else knobs.overlap
    turns = knobs.pingpong
    if turns is None:
        several = d >= 128 if fp8 else d <= 128
        turns = cut.tile_m >= 128 and several if overlap or first_release else cut.tile_m // 64 == 2
    cluster = knobs.cluster
    if cluster is None:
        shared = (first_release or 128 < d <= 192) if fp8 else d >= 128
        pairs = shared and not problem.causal and cut.m_blocks % 2 == 0 and knobs.persistent and cut.num_splits == 1
        cluster = 2 if pairs else 1
    output: Output = "partial" if cut.num_splits > 1 else "threads" if cut.packed_heads > 1 else "tma"
    return Forward(
        problem, arch, build, cut, knobs.stages or row.stages, overlap, turns,
        p_in_registers=row.p_in_registers if knobs.p_in_registers is None else knobs.p_in_registers,
        rescale_early=(max(d, problem.head_dim_v) > 128 or first_release) and overlap and not fp8,
        cluster=cluster, output=output, two_level=knobs.two_level, exp=knobs.exp,
    )  # fmt: skip
