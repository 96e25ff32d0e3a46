"""FlashAttention-4 forward: Blackwell kernels with accumulators in tensor memory, and their Hopper sisters.

Blackwell, head dims up to 128 and (192, 128): a CTA owns two tiles of 128 query rows. One thread issues every MMA, in
the order PV0 QK0 PV1 QK1; S, P and O live in tensor memory, P in the upper half of the columns of its S. Each softmax
warpgroup takes one tile, a thread a row, and writes P in parts: PV starts when three quarters are there. A correction
warpgroup rescales O beside the critical path, only where a maximum grew above a threshold, and does the epilogue.
The paper's four moves have a switch each: ``exp2_emulation`` (some exponentials as a polynomial on the FMA pipe),
``conditional_rescale``, ``two_cta`` (MMAs over pairs of SMs that share K and V), ``accumulator``.
Head dim 256 is a kernel of its own (``_fa4_d256.py``), and so are Hopper's (``_fa4_hopper.py``).

Sources: flash_attn/cute of Dao-AILab/flash-attention at 0251105a (flash_fwd_sm100.py, sm100_hd256_2cta_fmha_forward.py,
flash_fwd_sm90.py, softmax.py, tile_scheduler.py, interface.py) for tiles, roles, barriers, order and the tuning table;
instruction counts from the disassembly of that build (nvidia-cutlass-dsl 4.8.1). More in docs/schedules/fa4.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.program.effects import Matmul, Store
from fasim.program.language import Kernel, Ring, Role
from fasim.program.library import schedule
from fasim.program.tiles import Smem

from ._fa4_d256 import d256_kernel
from ._fa4_grid import Layouts, Order, grid, rescales
from ._fa4_parts import (
    FRAGMENT,
    commit,
    leader,
    load,
    mma,
    operands,
    read_scale,
    read_sum,
    rescale,
    rescale_output,
    setup,
    softmax_role,
    store_output,
)
from ._fa4_tile import ROWS, Config, Tile, query_tile

SMEM_BYTES = 224 * 1024  # for Q, K, V and O; barriers and scales of O have the rest

#: Share of blocks that rescale O below 16 bits, where the threshold is 0. Random inputs give nearly all; FA4's counters
#: refute that: FP8 has 17 (B200) and 8 (B300) FMA-pipe instructions a block and sub-core more than BF16, a rescale 128.
NARROW_RESCALE_RATE = 0.1


@dataclass(frozen=True)
class Tuning:
    """A row of the real kernel's table: registers, and which exponentials are emulated.

    Pair k (even) of a fragment of 32 is emulated where k mod frequency >= frequency - residue, in the fragments from
    ``start`` to the last but one of a row.
    """

    softmax: int
    correction: int
    frequency: int
    residue: int = 4
    start: int = 1


#: (two_cta, causal, head_dim) -> tuning.
TUNING = {
    (True, False, 128): Tuning(176, 88, 10),
    (False, True, 128): Tuning(192, 72, 16),
    (False, False, 128): Tuning(192, 80, 16),
    (True, False, 192): Tuning(184, 80, 16, start=0),
    (False, True, 192): Tuning(192, 72, 32),
    (False, False, 192): Tuning(192, 80, 16),
}
TUNING_SMALL = {16: Tuning(200, 64, 16), 8: Tuning(168, 96, 16)}  # head_dim below 96, by bits
TUNING_256 = Tuning(256, 160, 14, 6, 0)


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    exp2_emulation: Annotated[bool | None, "some exp2 as polynomials; default: on where EX2 is slow (B200)"] = None
    emulation_frequency: Annotated[int | None, "period of emulation in a fragment; default: tuning table"] = None
    emulation_residue: Annotated[int | None, "elements emulated per period; default: tuning table"] = None
    emulation_start: Annotated[int | None, "first fragment with emulation; default: tuning table"] = None
    conditional_rescale: Annotated[bool, "rescale O only where a maximum grew by more than the threshold"] = True
    rescale_threshold: Annotated[float | None, "growth in powers of two; default: 8, or 0 below 16 bits"] = None
    rescale_rate: Annotated[float | None, "share of blocks that rescale; default: random inputs, FP8 0.1"] = None
    two_cta: Annotated[bool | None, "MMAs over pairs of CTAs; default: as the real interface decides"] = None
    accumulator: Annotated[Literal["tmem", "registers"], "registers: what if there were no tensor memory"] = "tmem"
    query_tiles: Annotated[int | None, "tiles of 128 query rows per CTA; default: 2 where there are rows"] = None
    early_p: Annotated[float, "share of P that PV waits for before it starts"] = 0.75
    hardware_row_max: Annotated[bool | None, "row maximum comes with the TMEM load; default: B300"] = None
    mma_order: Annotated[Literal["interleaved", "grouped"], "PV0 QK0 PV1 QK1, or PV0 PV1 QK0 QK1"] = "interleaved"
    scheduler: Annotated[Literal["static", "lpt", "clc"] | None, "default: static; lpt for a causal mask"] = None
    pack_gqa: Annotated[bool | None, "heads of a group share a query tile; default: where there are groups"] = None
    softmax: Annotated[bool, "off: no maximum, exponential, sum; data movement and barriers stay"] = True


@schedule(architectures=("blackwell",), dtypes=("bf16", "fp16", "fp8", "fp4"))
def fa4(problem: Problem, arch: Arch, knobs: Knobs) -> Kernel:
    """FlashAttention-4 forward: TMEM accumulators, two query tiles, emulated exp2; CuTe kernels on Hopper."""
    exp2_emulation = knobs.exp2_emulation
    emulation_frequency = knobs.emulation_frequency
    emulation_residue = knobs.emulation_residue
    emulation_start = knobs.emulation_start
    conditional_rescale = knobs.conditional_rescale
    rescale_threshold = knobs.rescale_threshold
    rescale_rate = knobs.rescale_rate
    two_cta = knobs.two_cta
    accumulator = knobs.accumulator
    query_tiles = knobs.query_tiles
    early_p = knobs.early_p
    hardware_row_max = knobs.hardware_row_max
    mma_order = knobs.mma_order
    scheduler = knobs.scheduler
    pack_gqa = knobs.pack_gqa
    softmax = knobs.softmax
    packed = problem.group > 1 if pack_gqa is None else pack_gqa
    d, dv = problem.head_dim, problem.head_dim_v
    big, tmem = d == 256, accumulator == "tmem"
    if d % 16 or dv % 16 or not (max(d, dv) <= 128 or (d, dv) in ((192, 128), (256, 256))):
        raise ConfigError(f"fa4: no kernel for head_dim {d}, head_dim_v {dv} (has up to 128, (192, 128), (256, 256))")
    if big and not (tmem and problem.bits == 16):
        raise ConfigError("fa4: the kernel of head_dim 256 is for 16-bit types and accumulators in tensor memory")
    rows = problem.seqlen_q * (problem.group if packed else 1)
    queries = query_tiles or (1 if big or rows <= ROWS else 2)
    if queries > (1 if big else 2):
        raise ConfigError(f"fa4: query_tiles {queries} (choices: {'1' if big else '1, 2'})")
    pairs = d in (128, 192) and not problem.causal and rows > 2 * ROWS and queries == 2 and tmem
    pairs = (pairs and not (packed and ROWS % problem.group)) or big
    pair = pairs if two_cta is None else two_cta
    if pair and not pairs:
        raise ConfigError(
            "fa4: two_cta is for head_dim 128 and 192, no mask, two query tiles, more than 256 query rows"
        )
    if big and not (pair and scheduler is None):
        raise ConfigError("fa4: the kernel of head_dim 256 has no version without two_cta or with another scheduler")
    slow_exp2 = arch.sm.mufu.ops_per_cycle < arch.sm.alu.ops_per_cycle / 2
    table = _tuning(problem, pair, packed, slow_exp2)
    frequency = table.frequency if emulation_frequency is None else emulation_frequency
    residue = table.residue if emulation_residue is None else emulation_residue
    start = table.start if emulation_start is None else emulation_start
    if frequency < 1:
        raise ConfigError(f"fa4: emulation_frequency {frequency}: at least 1 (exp2_emulation=off switches it off)")
    if rescale_rate is not None and not 0 <= rescale_rate <= 1:
        raise ConfigError(f"fa4: rescale_rate {rescale_rate}: a share between 0 and 1")
    emulate = softmax and (slow_exp2 if exp2_emulation is None else exp2_emulation)
    n = 128 if tmem else 64  # 128 columns of S beside 128 of O do not fit a thread's registers
    parts = n // FRAGMENT
    conditional = conditional_rescale and not big
    narrow = problem.bits < 16
    if narrow and rescale_threshold is None and rescale_rate is None:
        rescale_rate = NARROW_RESCALE_RATE
    threshold = (0.0 if narrow else 8.0) if rescale_threshold is None else rescale_threshold
    c = Config(
        d=d,
        dv=dv,
        n=n,
        dtype=problem.dtype,
        bits=problem.bits,
        queries=queries,
        ctas=2 if pair else 1,
        registers=(table.softmax, table.correction) if tmem else (n + dv + n // 2 + 16, 0),
        threshold=threshold if conditional else 0.0,
        emulated=_emulated(parts, frequency, residue, start) if emulate else (0,) * parts,
        early=parts if big or not tmem else min(parts, max(1, round(early_p * parts))),
        hardware_max=arch.compute_capability == "10.3" if hardware_row_max is None else hardware_row_max,
        softmax=softmax,
        tmem=tmem,
        grouped=mma_order == "grouped",
    )
    order: Order = "single" if big else scheduler or ("lpt" if problem.causal else "static")
    chosen: dict[str, object] = dict(exp2_emulation=emulate, emulation_frequency=frequency, emulation_residue=residue)
    chosen |= dict(emulation_start=start, conditional_rescale=conditional, rescale_threshold=threshold)
    chosen |= dict(rescale_rate=rescale_rate, two_cta=pair, accumulator=accumulator, query_tiles=queries)
    chosen |= dict(early_p=c.early / parts, hardware_row_max=c.hardware_max, mma_order=mma_order, scheduler=order)
    chosen |= dict(pack_gqa=packed, softmax=softmax)
    k = Kernel("fa4", problem, arch, chosen, cluster=c.ctas, max_ctas_per_sm=1, launch_registers=128)
    if not softmax:
        k.not_attention = "softmax=off leaves maximum, exponential and sum out"
    layouts = grid(k, ROWS * queries * c.ctas, n, order, packed, queries, halves=2 if big else 1)
    rescales(k, n, ROWS * c.ctas, conditional, threshold, rescale_rate)
    return d256_kernel(k, c, layouts) if big else _kernel(k, c, layouts)


def _tuning(problem: Problem, pair: bool, packed: bool, slow_exp2: bool) -> Tuning:
    """Row of the real kernel's table; FP8 has entries of its own, and FP4 is taken as FP8."""
    d, narrow = problem.head_dim, problem.bits < 16
    if d == 256:
        return TUNING_256
    if d < 96:
        return TUNING_SMALL[8 if narrow else 16]
    row = TUNING[pair, problem.causal, 192 if d > 128 else 128]
    if narrow and pair and d <= 128:
        row = replace(row, softmax=160, correction=72)
    if narrow and problem.causal and d <= 128:
        row = replace(row, frequency=8)
    if packed and not problem.causal:
        row = replace(row, frequency=10)
    if not slow_exp2:
        row = replace(row, softmax=176, correction=64 if problem.causal else 80)
    return row


def _emulated(parts: int, frequency: int, residue: int, start: int) -> tuple[int, ...]:
    """Emulated pairs per fragment: 6 of 16 for (10, 4), which in the two middle fragments are 24 of 128 elements."""
    pairs = sum(k % frequency >= frequency - residue for k in range(0, FRAGMENT, 2))
    return tuple(pairs if start <= part < parts - 1 else 0 for part in range(parts))


def _kernel(k: Kernel, c: Config, layouts: Layouts) -> Kernel:
    """The kernel of head dims up to 128 and (192, 128)."""
    o_bytes = 2 * ROWS * c.dv
    alias = c.d > 128  # O reuses the space of Q
    room = SMEM_BYTES - c.queries * (c.size(ROWS * c.d) + (0 if alias else o_bytes))
    stage = c.size(c.n * max(c.d, c.dv) // c.ctas)
    stages = max(3, room // stage)  # (192, 128) without pairs fits three of the two sizes in turn
    q_ring, kv_ring, k_tensor, v_tensor = operands(k, c, layouts, min(stage, room // stages), stages)
    k.smem("O", c.queries * o_bytes, aliases="Q" if alias else None)
    o_tensor = k.tensor("O", k.tile_count * c.queries, o_bytes, "q", 1, layouts.o)
    if c.tmem:
        k.tmem_columns = 512  # S0, S1, O0, O1; the kernel allocates all
    tiles = [query_tile(k, c, i, str(i)) for i in range(c.queries)]
    others = 512 - 2 * c.registers[0] - c.registers[1]

    with k.role("load", warps=1, registers=others) as r:
        setup(r)
        with r.tiles(draws=True):
            load(r, kv_ring, k_tensor)
            for tile in tiles if alias else ():
                r.wait_barrier(tile.stored, reason="empty", ahead=1)
            for _ in tiles:
                load(r, q_ring, q_ring.tensor)
            load(r, kv_ring, v_tensor)
            with r.loop("steps"):
                load(r, kv_ring, k_tensor)
                load(r, kv_ring, v_tensor)
    with k.role("mma", warps=1, registers=others) as r:
        _mma_role(k, r, c, tiles, q_ring, kv_ring)
    for i, tile in enumerate(tiles):
        with k.role(f"softmax{i}", warpgroups=1, registers=c.registers[0]) as r:
            softmax_role(k, r, c, tile)
    if c.tmem:
        with k.role("correction", warpgroups=1, registers=c.registers[1]) as r:
            _correction_role(r, c, tiles)
    with k.role("epilogue", warps=1, registers=others) as r:
        setup(r)
        with r.tiles():
            for tile in tiles:
                r.wait_barrier(tile.staged, reason="full", label="wait O")
                r.copy("store O", o_tensor, o_bytes, "store", boxes=-(-c.dv // 64), effects=(Store(tile.staged_o),))
            r.wait_copies("store", "wait O store")
            for tile in tiles:
                r.arrive(tile.stored)
    return k


def _mma_role(k: Kernel, r: Role, c: Config, tiles: list[Tile], q_ring: Ring, kv_ring: Ring) -> None:
    """The one thread that issues all MMAs. K of the next block is needed before V of this one is free."""
    setup(r)
    with r.tiles(), leader(k, r, c, q_ring, kv_ring) as wait:
        wait(kv_ring)
        for tile in tiles:
            wait(q_ring)
            _qk(r, c, tile)
        commit(r, c, kv_ring.empty)
        with r.loop("steps"):
            wait(kv_ring)
            for tile in tiles:
                _pv(r, c, tile, v_is_last=tile is tiles[0] or c.grouped)
                if not c.grouped:
                    if tile is tiles[-1]:
                        commit(r, c, kv_ring.empty)
                    if tile is tiles[0]:
                        wait(kv_ring)
                    _qk(r, c, tile)
            if c.grouped:
                commit(r, c, kv_ring.empty)
                wait(kv_ring)
                for tile in tiles:
                    _qk(r, c, tile)
            commit(r, c, kv_ring.empty)
        for _ in tiles:
            commit(r, c, q_ring.empty)
        wait(kv_ring)
        for tile in tiles:
            _pv(r, c, tile)
            commit(r, c, tile.output)
        commit(r, c, kv_ring.empty)


def _qk(r: Role, c: Config, tile: Tile) -> None:
    scores = Matmul(tile.next_s, tile.q(), Smem("KV"), transposed=True)
    mma(r, c, "QK", c.n, -(-c.d // c.depth), tile.scores, (scores,))


def _pv(r: Role, c: Config, tile: Tile, v_is_last: bool = True) -> None:
    """O += P V in two parts, as P arrives. ``v_is_last``: K of the next block was not waited for yet."""
    count, parts = c.n // c.depth, len(c.emulated)
    early = count * c.early // parts
    v = Smem("KV", back=0 if v_is_last else 1)
    first, rest = (Matmul(tile.o(), tile.ready_p(x), v, add=True) for x in ((0, early / count), (early / count, 1)))
    r.wait_barrier(tile.ready, reason="full")
    if early:
        mma(r, c, "PV", c.dv, early, effects=(first,))
    if c.early < parts:
        r.wait_barrier(tile.last, reason="full")
        mma(r, c, "PV", c.dv, count - early, effects=(rest,))


def _correction_role(r: Role, c: Config, tiles: list[Tile]) -> None:
    """Rescales O where needed and writes it out. A tile's scale slot is freed after the other tile's is handled."""
    setup(r)
    for tile in tiles:
        r.arrive(tile.ready, scope=c.scope, label="O free")
    with r.tiles():
        for tile in tiles:  # the first block has nothing to rescale
            r.wait_barrier(tile.stats)
        r.arrive(tiles[0].read)
        for trips, needed in (("rescaled", True), ("kept", False)):
            with r.loop(trips):
                for tile, other in zip(tiles, reversed(tiles), strict=True):
                    r.wait_barrier(tile.stats)
                    read, correct = read_scale(c, tile), rescale_output(c, tile)
                    vote = read if needed else (*read, *correct)  # the trips are an estimate, the numbers decide
                    r.vector("vote", {"lds": 1, "alu": 3, "misc": 4}, latency={"smem": 1, "alu": 2}, effects=vote)
                    if needed:
                        rescale(r, c, correct)
                    r.arrive(tile.ready, scope=c.scope)
                    r.arrive(other.read)
        if len(tiles) > 1:
            r.arrive(tiles[1].read)
        for tile in tiles:
            r.wait_barrier(tile.stats, effects=read_sum(c, tile))
            r.arrive(tile.read)
            r.wait_barrier(tile.output, reason="full", label="wait O")
            store_output(r, c, tile)
            r.arrive(tile.ready, scope=c.scope, label="O free")
