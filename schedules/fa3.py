"""FlashAttention-3 forward on Hopper: warp-specialised, ping-pong, intra-warpgroup overlap.

One producer warp loads Q, K and V by TMA into rings of mbarriers; two or three consumer warpgroups
own 64 query rows each. A consumer issues S = Q K(n) and O += P V(n+1) back to back, then computes
the softmax of block n. Two tricks hide that softmax: the tensor core works for the *other*
warpgroup meanwhile (ping-pong: named barriers hand the right to issue around), and a warpgroup's
own PV still runs while its row maximum is taken (overlap). KV blocks are visited last to first.
FP8 (e4m3) has wider tiles and a producer warpgroup that transposes V. Splits cut the keys of a tile
into parts that a second kernel adds (decoding); heads of a group then share tiles. The first release, which the paper
measured, draws causal tiles in their natural order, takes a turn for the first QK too, rescales O before PV at
every head dim, and in FP8 runs QK, softmax and PV one after the other, with turns for QK alone.

Sources: the hopper/ folder of Dao-AILab/flash-attention at 0251105a (tile_size.h,
mainloop_fwd_sm90_tma_gmma_ws.hpp, tile_scheduler.hpp) for tiles, roles, barriers and order, at 7f67966c and
(FP8) 5018ac6a, July 2024, for the first release, whose instruction counts are taken to be the same;
instruction counts from the disassembly of that build (nvcc 13.0): per thread and iteration with
E = tile_n / 2 elements and 2 rows, E+4 FMNMX, E+2 FFMA, E+2 EX2, E FADD, dv/2+4 FMUL, E/2 F2FP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fasim.arch import Arch
from fasim.errors import BudgetError, ConfigError
from fasim.kernels.blocks import kv_loops
from fasim.kernels.layouts import kv_layout, partial_layout, query_layout
from fasim.problem import Problem
from fasim.program.effects import (
    Rescale,
)
from fasim.program.language import Barrier, Kernel, Ring, Role
from fasim.program.library import schedule

from ._fa3_grid import block_info, combine, grid, tile
from ._fa3_parts import (
    DRAW_CYCLES,
    FETCH_CYCLES,
    LOOP_CYCLES,
    SETUP_CYCLES,
    Config,
    order,
    pv,
    qk,
    softmax,
    store_output,
)
from ._fa3_producer import issue_loads, load_q, transpose

#: consumer warpgroups -> (producer, consumer) registers after setmaxnreg, registers at launch
REGISTERS = {1: (56, 256, 128), 2: (24, 240, 168), 3: (32, 160, 128)}


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    tile_m: Annotated[int | None, "query rows per CTA, 64 per consumer warpgroup; default: tile table"] = None
    tile_n: Annotated[int | None, "keys per iteration; default: tile table"] = None
    stages: Annotated[int | None, "buffers each of K and V; default: 2, or as the first release's FP8 table says"] = (
        None
    )
    pingpong: Annotated[bool | None, "named barriers order the warpgroups' MMAs; default: on up to d128"] = None
    overlap: Annotated[
        bool | None, "issue QK of the next block before PV of the last; default: on, but for FP8 of the first release"
    ] = None
    p_in_registers: Annotated[bool | None, "P is the register operand of PV, else it goes through SMEM"] = None
    cluster: Annotated[int | None, "CTAs that share K and V by multicast; default: 2 for full attention, d >= 128"] = (
        None
    )
    exp: Annotated[bool, "off leaves the exponential out, as the ablation builds do"] = True
    persistent: Annotated[bool, "one CTA per SM loops over tiles; off: one CTA per tile"] = True
    two_level: Annotated[bool, "FP8: PV of a block is summed apart and added to O, for accuracy"] = False
    splits: Annotated[int, "parts the keys of a tile are split into; 0: FlashAttention-3's heuristic"] = 1
    build: Annotated[Literal["2026", "2024"], "release: August 2026, or the first one (July 2024), the paper's"] = (
        "2026"
    )


@schedule(architectures=("hopper",), dtypes=("bf16", "fp16", "fp8"))
def fa3(problem: Problem, arch: Arch, knobs: Knobs) -> list[Kernel]:
    """FlashAttention-3 forward on Hopper: ping-pong warpgroups, QK and softmax overlapped."""
    tile_m = knobs.tile_m
    tile_n = knobs.tile_n
    stages = knobs.stages
    pingpong = knobs.pingpong
    overlap = knobs.overlap
    p_in_registers = knobs.p_in_registers
    cluster = knobs.cluster
    exp = knobs.exp
    persistent = knobs.persistent
    two_level = knobs.two_level
    splits = knobs.splits
    build = knobs.build
    d, dv = problem.head_dim, problem.head_dim_v
    fp8 = problem.dtype == "fp8"
    first_release = build == "2024"
    row = tile(problem, first_release)
    m, n, stages = tile_m or row[0], tile_n or row[1], stages or row[3]
    warpgroups = m // 64
    if m % 64 or warpgroups not in REGISTERS:
        raise ConfigError(f"fa3: tile_m {m} is not 64 per warpgroup for 1 to 3 warpgroups (64, 128, 192)")
    if n % (32 if fp8 else 16) or not 16 <= n <= 256:
        raise ConfigError(f"fa3: tile_n {n} is not a multiple of {32 if fp8 else 16} (one wgmma of PV) up to 256")
    in_registers = row[2] if p_in_registers is None else p_in_registers
    if fp8 and not in_registers:
        raise ConfigError("fa3: p_in_registers=off does not exist for fp8")
    if overlap is None:
        overlap = not (fp8 and first_release)
    if two_level and not fp8:
        raise ConfigError(f"fa3: two_level is an option of fp8, not {problem.dtype}")
    if pingpong is None:
        ordered = d >= 128 if fp8 else d <= 128
        pingpong = (warpgroups >= 2 and ordered) if overlap or first_release else warpgroups == 2
    if pingpong and warpgroups < 2:
        raise ConfigError("fa3: pingpong needs two consumer warpgroups (tile_m >= 128)")
    if splits < 0:
        raise ConfigError(f"fa3: splits {splits}: 0 (heuristic), 1 (off) or more")
    cut = block_info(problem, arch, m, n, splits)
    m_blocks = cut.m_blocks
    persistent = persistent and cut.num_splits == 1
    if cluster is None:
        shared = (first_release or 128 < d <= 192) if fp8 else d >= 128
        cluster = 2 if shared and not problem.causal and m_blocks % 2 == 0 and persistent else 1
    if m_blocks % cluster:
        raise ConfigError(f"fa3: {m_blocks} query tiles per head do not divide into clusters of {cluster}")
    rescale_early = (max(d, dv) > 128 or first_release) and overlap and not fp8
    output: Literal["tma", "threads", "partial"] = (
        "partial" if cut.num_splits > 1 else "threads" if cut.packed_heads > 1 else "tma"
    )
    cfg = Config(
        m,
        n,
        d,
        dv,
        stages,
        pingpong,
        overlap,
        in_registers,
        exp,
        warpgroups,
        rescale_early,
        first_release,
        fp8,
        two_level,
        output,
        ("e4m3" if fp8 else problem.dtype, "bf16" if fp8 else problem.dtype),
        problem.causal,
    )
    _check_registers(cfg, arch)

    chosen: dict[str, object] = dict(
        tile_m=m, tile_n=n, stages=stages, pingpong=pingpong, overlap=overlap, p_in_registers=in_registers
    )
    chosen |= dict(cluster=cluster, exp=exp, persistent=persistent)
    chosen |= dict(two_level=two_level, splits=cut.num_splits, build=build)
    k = Kernel(
        "fa3", problem, arch, chosen, cluster=cluster, max_ctas_per_sm=1, launch_registers=REGISTERS[warpgroups][2]
    )
    if not exp:
        k.not_attention = "exp=off leaves the exponential out"
    tiles = grid(k, cut, persistent, first_release)
    rows = min(m, cut.rows)  # of a tile, that exist
    q_bytes, kv_rows = cfg.element * m * d, cfg.element * n
    shared = cluster > 1
    boxes, v_boxes = -(-d * cfg.element // 128), -(-dv * cfg.element // 128)  # a TMA box is 128 bytes wide
    q_layout, o_layout = (query_layout(cut, columns, tiles) for columns in (d, dv))
    q_tensor = k.tensor("Q", cut.pairs * m_blocks, q_bytes * rows // m, "q", layout=q_layout)
    q_ring = k.ring(q_tensor, q_bytes, 1, consumers=warpgroups, boxes=boxes)
    lines = cut.kv_pairs * cut.n_blocks * cluster
    keys, values = (kv_layout(cut, columns, cluster) for columns in (d, dv))
    k_tensor = k.tensor("K", lines, kv_rows * d // cluster, "kv", -cluster, keys)
    v_tensor = k.tensor("V", lines, kv_rows * dv // cluster, "kv", -cluster, values)
    k_ring = k.ring(k_tensor, kv_rows * d, stages, consumers=warpgroups, multicast=shared, boxes=boxes)
    v_loads = v_ring = k.ring(
        v_tensor, kv_rows * dv, stages, consumers=1 if fp8 else warpgroups, multicast=shared, boxes=v_boxes
    )
    if fp8:  # V lands as it is and is transposed into a ring of its own
        full, empty = k.barrier("Vt.full", 1, stages), k.barrier("Vt.empty", warpgroups, stages)
        v_ring = Ring(k.smem("Vt", kv_rows * dv, stages), full, empty, v_tensor, 0, False, 0)
    if output == "partial":
        lines = cut.pairs * m_blocks * cut.num_splits
        o_tensor = k.tensor("O.partial", lines, 4 * rows * dv, "partial", layout=partial_layout(cut))
    else:
        o_tensor = k.tensor("O", k.tile_count, 2 * rows * dv, "q", layout=o_layout)
    k.smem("O", 2 * m * dv, aliases=v_ring.buffer.name)
    if not in_registers:
        k.smem("P", 2 * m * n)
    o_free = k.barrier("O.free", cluster)  # O shares V's space: V may land once the stores of all CTAs have read O
    turn = k.turns("turn", warpgroups)
    epilogue = k.barrier("epilogue", warpgroups, named=True)
    staged = k.barrier("O.staged", warpgroups, named=True)

    with k.role("producer", warps=4 if fp8 or cut.packed_heads > 1 else 1, registers=REGISTERS[warpgroups][0]) as p:
        p.delay("setup", 2 * arch.launch.registers_realloc_cycles, "launch")  # barriers, setmaxnreg
        with p.tiles(draws=True):
            if fp8:
                p.load(v_loads)
            p.load(k_ring)
            load_q(p, q_ring, packed=cut.packed_heads > 1)
            p.wait_barrier(o_free, reason="empty", ahead=1)
            for trips, _ in kv_loops(k.tiles):
                with p.loop(trips):
                    issue_loads(p, "fp8" if fp8 else "16 bit")
                    if fp8:
                        p.load(v_loads)
                    p.load(k_ring)
                    if fp8:
                        transpose(p, v_loads, v_ring)
                    else:
                        p.load(v_ring)
            if fp8:
                transpose(p, v_loads, v_ring)
            else:
                p.load(v_ring)

    with k.role("consumer", warpgroups=warpgroups, registers=REGISTERS[warpgroups][1]) as c:
        c.delay("setup", 2 * arch.launch.registers_realloc_cycles, "launch")
        with c.tiles():
            kind = "fp8" if fp8 else "16 bit"
            drawn = DRAW_CYCLES[kind] if problem.causal and persistent else 0.0
            c.delay("tile set-up", SETUP_CYCLES[kind] + drawn, "issue")
            c.delay("instruction fetch", FETCH_CYCLES[0], "issue")
            c.wait(q_ring)
            if overlap:
                _wait_polled(c, k_ring, True)
                if pingpong and first_release:
                    c.wait_barrier(turn, "own", label="wait turn")
                qk(c, cfg)
                if pingpong and first_release:
                    c.arrive(turn, "next", label="pass turn")
                c.wait_mma(0, "wait QK")
                c.release(k_ring)
                softmax(c, cfg, order(cfg, overlap=False), masked=True, first=True)
                for trips, masked in kv_loops(k.tiles):
                    with c.loop(trips):
                        _overlapped_step(c, cfg, k_ring, v_ring, turn, masked)
                c.release(q_ring)
                if cfg.rescale_early:
                    c.vector("rescale O", {"fmul": cfg.dv / 2}, effects=(Rescale("O"),))
                _wait_polled(c, v_ring, True)
                pv(c, cfg)
                c.wait_mma(0, "wait PV")
                c.release(v_ring)
            else:
                _serial_step(c, cfg, k_ring, v_ring, turn, masked=True, first=True)
                for trips, masked in kv_loops(k.tiles):
                    with c.loop(trips):
                        _serial_step(c, cfg, k_ring, v_ring, turn, masked)
                if pingpong and not first_release:
                    c.arrive(turn, "next", label="pass turn")
                c.release(q_ring)
            store_output(c, cfg, epilogue, staged, o_tensor, o_free)
    return [k, combine(problem, arch, cut)] if cut.num_splits > 1 else [k]


def _overlapped_step(c: Role, cfg: Config, k_ring: Ring, v_ring: Ring, turn: Barrier, masked: bool) -> None:
    """QK of this block and PV of the last, then the softmax; the compiler waits for PV early in it."""
    _wait_polled(c, k_ring, not cfg.pingpong)
    if cfg.pingpong:
        c.wait_barrier(turn, "own", label="wait turn")
    qk(c, cfg, rescale=cfg.rescale_early)
    _wait_polled(c, v_ring, not cfg.pingpong)
    pv(c, cfg)
    if cfg.pingpong:
        c.arrive(turn, "next", label="pass turn")
    c.wait_mma(1, "wait QK")

    def wait_pv() -> None:
        c.release(k_ring)
        c.wait_mma(0, "wait PV")
        c.release(v_ring)

    softmax(c, cfg, order(cfg), masked, between=wait_pv)
    c.delay("loop", LOOP_CYCLES, "issue")


def _serial_step(
    c: Role, cfg: Config, k_ring: Ring, v_ring: Ring, turn: Barrier, masked: bool, first: bool = False
) -> None:
    """QK, softmax, PV one after the other; with ping-pong a turn covers PV and the next QK.

    In the first release it covers QK from its issue to its end.
    """
    if cfg.pingpong and (first or cfg.first_release):
        c.wait_barrier(turn, "own", label="wait turn")
    c.wait(k_ring)
    qk(c, cfg)
    if cfg.pingpong and not cfg.first_release:
        c.arrive(turn, "next", label="pass turn")
    c.wait_mma(0, "wait QK")
    if cfg.pingpong and cfg.first_release:
        c.arrive(turn, "next", label="pass turn")
    c.release(k_ring)
    softmax(c, cfg, order(cfg, overlap=False), masked, first=first)
    c.wait(v_ring)
    if cfg.pingpong and not cfg.first_release:
        c.wait_barrier(turn, "own", label="wait turn")
    pv(c, cfg)
    c.wait_mma(0, "wait PV")
    c.release(v_ring)
    c.delay("loop", LOOP_CYCLES, "issue")


def _wait_polled(c: Role, ring: Ring, everyone: bool) -> None:
    """With ping-pong only the first warpgroup polls; the order of turns covers the others."""
    if everyone:
        c.wait(ring)
        return
    with c.only(0):
        c.wait(ring)
    with c.only(0, others=True):
        c.wait(ring, polled=False)


def _check_registers(cfg: Config, arch: Arch) -> None:
    """S and O accumulators and P must fit a consumer's registers beside a handful of others."""
    p = cfg.n * cfg.element // 8 if cfg.in_registers else 0
    needed = cfg.n / 2 + cfg.dv / 2 + p + 8
    limit = REGISTERS[cfg.warpgroups][1]
    if needed > limit:
        raise BudgetError(
            f"fa3 on {arch.name}: a consumer needs {needed:.0f} registers per thread for S {cfg.n // 2}, "
            f"O {cfg.dv // 2}{f', P {p}' if cfg.in_registers else ''}; it has {limit}: use a smaller tile_n"
        )
