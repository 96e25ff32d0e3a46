"""Parts of FlashAttention-4's Blackwell kernels: rings, and what the roles do per block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fasim.kernels.blocks import kv_loops
from fasim.numerics import Exp2
from fasim.program.effects import (
    Effect,
    Mask,
    Move,
    Normalise,
    Probabilities,
    Rescale,
    Round,
    RowMax,
    RowSum,
    Store,
)
from fasim.program.language import Barrier, Kernel, Ring, Role, Tensor
from fasim.program.ops import add_mixes
from fasim.program.tiles import Register

from ._fa4_grid import Layouts
from ._fa4_tile import ROWS, WHOLE, Config, Share, Tile

FRAGMENT = 32  # columns of S that are converted and stored together

#: Before a CTA's first copy: barriers, TMEM allocation, cluster synchronisation. 335 ns at 1845 MHz in the public notes
#: of a decode kernel of this structure.
PROLOGUE_CYCLES = 620.0

#: Cycles per tile in which a warp waits for instructions: straight code outside the loop (here the first block and the
#: epilogue, 600 to 700 instructions each) runs once per tile and is fetched anew. Measured for FA3 on an H200.
FETCH_CYCLES = 750.0

#: Instructions per tcgen05.mma in the MMA warp's loop: 202 for 32, descriptors, waits and commits included.
SLOTS_PER_MMA = 6.3

#: TMEM load latencies exposed in a rescale of 128 columns, which loads them 16 at a time with 80 registers. Fitted to
#: the 8 % that LLMFA (docs/schedules/fa4.md) lost by rescaling always.
RESCALE_WAITS = 3.75

Operands = Callable[[Ring], None]  # how the MMA role waits for the next stage of a ring
Effects = tuple[Effect, ...]


def operands(
    k: Kernel, c: Config, layouts: Layouts, stage_bytes: int, stages: int, halves: int = 1
) -> tuple[Ring, Ring, Tensor, Tensor]:
    """Rings of Q and of K and V together, tensors of K and V; a CTA of a pair loads half of every block.

    ``halves``: copies per block.
    """
    problem = k.problem
    q_bytes = c.size(ROWS * c.d)
    q_tensor = k.tensor("Q", k.tile_count * c.queries, q_bytes, "q", 1, layouts.q)
    q_ring = k.ring(q_tensor, q_bytes, c.queries, consumers=1)
    parts = c.ctas * halves
    lines = problem.batch * problem.heads_kv * -(-problem.seqlen_k // c.n) * parts
    k_tensor, v_tensor = (
        k.tensor(name, lines, c.size(c.n * width // parts), "kv", -c.ctas, layout)
        for name, width, layout in (("K", c.d, layouts.k), ("V", c.dv, layouts.v))
    )
    kv_ring = k.ring(replace(k_tensor, name="KV"), stage_bytes, stages, consumers=1)
    return q_ring, kv_ring, k_tensor, v_tensor


def setup(r: Role) -> None:
    """What every role waits for at the start of a CTA."""
    r.delay("setup", PROLOGUE_CYCLES, "launch")


def load(r: Role, ring: Ring, tensor: Tensor) -> None:
    """Fill the ring's next stage from ``tensor``."""
    r.load(ring, tensor, boxes=-(-tensor.line_bytes // 2**14))


# --- MMA ------------------------------------------------------------------------------------------------------------


@contextmanager
def leader(k: Kernel, r: Role, c: Config, q_ring: Ring, kv_ring: Ring, halves: int = 1) -> Iterator[Operands]:
    """Body of the MMA role; yields how to wait for operands, ``halves`` stages of K and of V a block.

    A pair of CTAs has one issuer; the tile table's column ``lead`` is 1 for its CTA. The other CTA's copies complete
    at the issuer's barrier: here that CTA's idle MMA warp passes them on.
    """
    if c.ctas == 1:
        yield r.wait
        return
    peers = {ring.buffer.name: k.barrier(f"{ring.buffer.name}.peer", 1, ring.full.stages) for ring in (q_ring, kv_ring)}

    def wait(ring: Ring) -> None:
        r.wait(ring)
        r.wait_barrier(peers[ring.buffer.name], reason="full")

    def relay(ring: Ring, times: int) -> None:
        for _ in range(times):
            r.wait(ring)
            r.arrive(peers[ring.buffer.name], scope="leader")

    with r.loop("lead"):
        yield wait
    with r.loop("follow"):
        relay(kv_ring, halves)
        relay(q_ring, c.queries)
        relay(kv_ring, halves)
        with r.loop("steps"):
            relay(kv_ring, 2 * halves)


def mma(r: Role, c: Config, label: str, n: int, count: int, done: Barrier | None = None, effects: Effects = ()) -> None:
    """``count`` MMAs of all query rows; PV takes P from where the softmax left it. ``done``: commit."""
    a = "smem" if label != "PV" else "tmem" if c.tmem else "register"
    options = dict(a=a, dtype=c.dtype, two_cta=c.ctas > 1, done=done, slots=SLOTS_PER_MMA)
    r.mma(label, m=ROWS * c.ctas, n=n, k=c.depth, count=count, effects=effects, **options)


def commit(r: Role, c: Config, done: Barrier) -> None:
    """tcgen05.commit: ``done`` is arrived at when all MMAs so far are complete."""
    mma(r, c, "commit", ROWS, 0, done)


# --- softmax --------------------------------------------------------------------------------------------------------


def softmax_role(k: Kernel, r: Role, c: Config, tile: Tile) -> None:
    """All blocks of a work tile; without tensor memory also the output."""
    setup(r)
    with r.tiles():
        r.delay("instruction fetch", FETCH_CYCLES / 2, "issue")
        _softmax_step(r, c, tile, masked=True)
        for trips, masked in kv_loops(k.tiles):
            with r.loop(trips):
                _softmax_step(r, c, tile, masked)
        if c.tmem:
            sums = (Move("l", tile.scale), Move("m", tile.row_max)) if c.softmax else ()
            r.vector("publish sum", {"sts": 2, "misc": 10}, smem_bytes=8 * ROWS, effects=sums)
            r.arrive(tile.stats)
            r.wait_barrier(tile.read, reason="empty")
        else:
            r.wait_barrier(tile.output, reason="full")
            store_output(r, c, tile)


def _softmax_step(r: Role, c: Config, tile: Tile, masked: bool) -> None:
    """One block: row maximum, P in fragments with the scale of O published meanwhile, then the row sum."""
    scores = (Move(tile.s, "S"),)
    r.wait_barrier(tile.scores, reason="full", label="wait S", effects=() if c.tmem else scores)
    if c.tmem:
        r.vector("load S", {"misc": 4}, tmem_load_bytes=4 * ROWS * c.n, latency={"tmem": 1}, effects=scores)
    if c.softmax:
        if masked:
            r.vector("mask", {"alu": 1.35 * c.n}, effects=(Mask("S"),))  # FSEL per element, R2P per 8, LOP3
        comparisons = 4 if c.hardware_max and not masked else c.n / 2 + 4  # three-input FMNMX
        mix = {"fmnmx": comparisons, "ffma": 2, "alu": 9}
        r.vector("row max", mix, latency={"fma": 1, "alu": 2}, effects=(RowMax("S", threshold=c.threshold),))
        mix, publish = {"ffma": 3, "ex2": 1, "alu": 4, "sts": 1}, (Move("alpha", tile.scale),)
        r.vector("scale of O", mix, smem_bytes=4 * ROWS if c.tmem else 0, effects=publish if c.tmem else ())
    if c.tmem:
        r.arrive(tile.stats)
    else:
        r.vector("rescale O", {"ffma2": c.dv / 2}, effects=rescale_output(c, tile))
    _probabilities(r, c, tile)
    if c.tmem:
        r.wait_barrier(tile.read, reason="empty")
    if c.softmax:
        r.vector("row sum", {"ffma2": c.n / 2, "misc": 24}, effects=(RowSum("E"),))


def _probabilities(r: Role, c: Config, tile: Tile) -> None:
    """Exponentials, conversion and store of P, fragment by fragment, released in two parts.

    Per pair of elements: FFMA2 (scale), two EX2 or, emulated, 2 FMNMX (clamp), 3 FADD2, 3 FFMA2 and 2 IMAD; F2FP.
    The slow conversions to FP8, packed by PRMT, do not hide behind the exponentials of their fragment: a fit to FA4's
    counters. FP4, which no kernel has: a scale per 16 elements is assumed, one FMNMX3 and one FMUL2 a pair.
    """
    pack = {8: {"alu": FRAGMENT / 4}, 4: {"fmnmx": FRAGMENT / 2, "ffma2": FRAGMENT / 2}}.get(c.bits, {})
    convert = {"f2fp8" if c.bits == 8 else "f2fp": FRAGMENT / 2}
    last = len(c.emulated) - 1
    for part, pairs in enumerate(c.emulated):
        exp = {"ex2": FRAGMENT - 2.0 * pairs, "ffma2": FRAGMENT / 2 + 6.0 * pairs, "imad": 2.0 * pairs}
        exp = add_mixes(exp if c.softmax else {}, {"fmnmx": 2.0 * pairs, "misc": 2}, pack)
        latency: dict[str, float] = {}
        if part in (c.early - 1, last):
            latency = {"fma": 6, "alu": 3} if pairs else {"ex2": 1, "alu": 1}  # the polynomial, or EX2, then F2FP
            latency["tmem_store"] = 1 if c.tmem else 0
        columns = (part / (last + 1), (part + 1) / (last + 1))
        s, e = Register("S", share=columns), Register("E", share=columns)
        power = Probabilities(s, e, method=Exp2(2 * pairs / FRAGMENT)) if c.softmax else Move(s, e)
        write = Round(e, tile.p(columns), c.formats[0])
        store = c.size(ROWS * FRAGMENT) if c.tmem else 0
        if c.bits == 8:
            r.vector("exp", exp, effects=(power,))
            r.vector("P", convert, tmem_store_bytes=store, latency=latency, effects=(write,))
        else:
            mix = add_mixes(exp, convert)
            r.vector("exp, P", mix, tmem_store_bytes=store, latency=latency, effects=(power, write))
        if part == c.early - 1:
            r.arrive(tile.ready, scope=c.scope)
        elif part == last:
            r.arrive(tile.last, scope=c.scope)


# --- correction -----------------------------------------------------------------------------------------------------


def read_scale(c: Config, tile: Tile) -> Effects:
    """What the softmax published in a block."""
    return (Move(tile.scale, "alpha"),) if c.softmax else ()


def read_sum(c: Config, tile: Tile) -> Effects:
    """What the softmax published after the last block."""
    return (Move(tile.scale, "l"), Move(tile.row_max, "m")) if c.softmax else ()


def rescale_output(c: Config, tile: Tile, parts: Sequence[Share] = (WHOLE,)) -> Effects:
    """Rescale of the columns of O that one MMA each writes."""
    return tuple(Rescale(tile.o(part)) for part in parts) if c.softmax else ()


def rescale(r: Role, c: Config, effects: Effects, waits: float = RESCALE_WAITS) -> None:
    """O of one query tile through registers; ``waits`` exposed load latencies."""
    nbytes = 4 * ROWS * c.dv
    mix = {"ffma2": c.dv / 2, "misc": c.dv / 8}
    latency = {"tmem": waits, "tmem_store": 1}
    r.vector("rescale O", mix, tmem_load_bytes=nbytes, tmem_store_bytes=nbytes, latency=latency, effects=effects)


def normalise(r: Role, c: Config, tile: Tile, store: dict[str, float], smem_bytes: int = 0) -> None:
    """1/l and O to 16 bit: 300 instructions of a tile at d_v 128, ``store`` among them."""
    divide = (Normalise("O"), Store("lse", "O", array="LSE", line=tile.index)) if c.softmax else ()
    effects: Effects = (Move(tile.o(), "O"), *divide, Round("O", "O", c.formats[1]))
    if smem_bytes:
        effects += (Move("O", tile.staged_o),)
    r.delay("instruction fetch", FETCH_CYCLES / 2, "issue")
    mix = {"ffma2": c.dv / 2, "f2fp": c.dv / 2, "mufu": 2, "stg": 1, "misc": 1.2 * c.dv}
    latency = {"tmem": RESCALE_WAITS if c.tmem else 0, "smem": 1, "ex2": 2}
    nbytes = 4 * ROWS * c.dv if c.tmem else 0
    mix = add_mixes(mix, store)
    r.vector("normalise O", mix, tmem_load_bytes=nbytes, smem_bytes=smem_bytes, latency=latency, effects=effects)


def store_output(r: Role, c: Config, tile: Tile) -> None:
    """O to shared memory for the epilogue role."""
    r.wait_barrier(tile.stored, reason="empty", ahead=1)
    normalise(r, c, tile, {"sts": c.dv / 8}, smem_bytes=2 * ROWS * c.dv)
    r.arrive(tile.staged)
