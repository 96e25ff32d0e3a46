"""The correction warpgroup of FA4: rescales O in tensor memory beside the softmax, and divides it by the row sums.

O is rescaled only where the maximum of some row grew by more than a threshold. The numbers decide that where they are
computed (``fasim check``); what it costs is an estimate of how many blocks do (:func:`rescale_columns`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fasim.kernels.tmem import ROWS, QueryTile, TmemForward, setup
from fasim.program.effects import Effect, Move, Normalise, Rescale, Round, Store
from fasim.program.language import Kernel, Role, Tile
from fasim.program.ops import Latencies, add_mixes, scale_mix

Effects = tuple[Effect, ...]


def read_scale(f: TmemForward, tile: QueryTile) -> Effects:
    """What the softmax published in a block."""
    return (Move(tile.scale, "alpha"),) if f.softmax else ()


def rescale_effects(f: TmemForward, *parts: Tile) -> Effects:
    """Rescale of columns of O that one MMA each writes."""
    return tuple(Rescale(part.place) for part in parts) if f.softmax else ()


def vote(r: Role, f: TmemForward, tile: QueryTile, needed: bool) -> None:
    """Has any row a new maximum? If not ``needed`` by the estimate, the numbers may still rescale O here."""
    effects = read_scale(f, tile) if needed else (*read_scale(f, tile), *rescale_effects(f, tile.o))
    r.vector("vote", f.build.mix("vote"), latency={"smem": 1, "alu": 2}, effects=effects)


def rescale(r: Role, f: TmemForward, *parts: Tile) -> None:
    """O of a query tile through registers; ``parts``: columns of it that one MMA each writes."""
    nbytes, mix = 4 * ROWS * f.dv, scale_mix(f.build.mix("rescale"), f.dv)
    waits = f.build.cost("rescale_waits", 256 if f.dv > 128 else 128)
    latency: Latencies = {"tmem": waits, "tmem_store": 1}
    effects = rescale_effects(f, *parts)
    r.vector("rescale O", mix, tmem_load_bytes=nbytes, tmem_store_bytes=nbytes, latency=latency, effects=effects)


def read_sum(r: Role, f: TmemForward, tile: QueryTile) -> None:
    """Wait for the row sum, and then for the last PV."""
    sums = (Move(tile.scale, "l"), Move(tile.row_max, "m")) if f.softmax else ()
    r.wait_barrier(tile.stats, effects=sums)
    r.arrive(tile.read)
    r.wait_barrier(tile.output, reason="full", label="wait O")


def normalise(r: Role, f: TmemForward, tile: QueryTile, to_smem: bool) -> None:
    """O / l to 16 bit, on its way to shared memory, or left in registers for stores to global memory."""
    divide: Effects = (Normalise("O"), Store("lse", "O", array="LSE", line=tile.index)) if f.softmax else ()
    effects: Effects = (Move(tile.o.place, "O"), *divide, Round("O", "O", f.output_format))
    if to_smem:
        effects += (Move("O", tile.staged_o),)
    r.delay("instruction fetch", f.build.cost("fetch") / 2, "issue")
    store = scale_mix(f.build.mix("store_output", "smem" if to_smem else "d256"), f.dv)
    mix = add_mixes(scale_mix(f.build.mix("normalise", "column"), f.dv), f.build.mix("normalise", "tile"), store)
    waits = f.build.cost("rescale_waits", 128) if f.tmem else 0
    latency: Latencies = {"tmem": waits, "smem": 1, "ex2": 2}
    nbytes = 4 * ROWS * f.dv if f.tmem else 0
    smem = f.o_bytes if to_smem else 0
    r.vector("normalise O", mix, tmem_load_bytes=nbytes, smem_bytes=smem, latency=latency, effects=effects)


def store_output(r: Role, f: TmemForward, tile: QueryTile) -> None:
    """O to shared memory for the epilogue role."""
    r.wait_barrier(tile.stored, reason="empty", ahead=1)
    normalise(r, f, tile, to_smem=True)
    r.arrive(tile.staged)


def rescale_columns(
    kernel: Kernel, f: TmemForward, conditional: bool, threshold: float = 0.0, rate: float | None = None
) -> dict[str, npt.NDArray[np.int64]]:
    """Tile columns ``rescaled`` and ``kept``: steps that rescale O, put first because there maxima grow, and others.

    PV waits until O is right for all rows of a tile, of both CTAs of a pair. ``rate`` is the share of steps that
    rescale, None for that of random inputs (:func:`rescale_chance`).
    """
    steps = kernel.tiles["steps"]
    if not conditional:
        rescaled = steps
    elif rate is not None:
        rescaled = np.rint(steps * rate).astype(np.int64)
    else:
        chance = rescale_chance(int(steps.max()) + 1, f.n, threshold)
        any_row = np.cumsum(1.0 - (1.0 - chance) ** (ROWS * f.ctas))
        rescaled = np.rint(any_row[steps]).astype(np.int64)
    return {"rescaled": rescaled, "kept": steps - rescaled}


def rescale_chance(blocks: int, n: int, threshold: float) -> npt.NDArray[np.float64]:
    """Chance that a row is rescaled at each of ``blocks`` blocks of ``n`` keys; shape ``(blocks,)``, the first is 0.

    Scores are independent standard normal numbers: queries and keys of unit variance, scaled by the root of the head
    dimension. A row is rescaled when a block's maximum exceeds the maximum in use by more than ``threshold`` powers of
    two, and uses the new one from then on: a Markov chain, carried here on a grid of maxima. With threshold 0, block
    i sets a record with chance 1/i. With 8, 5.5 standard deviations, it never happens.
    """
    edges = np.arange(-4.0, 12.0, 0.01)
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in edges]) ** n  # a block's maximum is below
    centre = 0.5 * (edges[1:] + edges[:-1])
    density, middle = np.diff(below), 0.5 * (below[1:] + below[:-1])
    jump = threshold * math.log(2.0)
    grows = 1.0 - np.interp(centre + jump, centre, middle, right=1.0)
    chance = np.zeros(blocks)
    in_use = density
    for i in range(1, blocks):
        chance[i] = in_use @ grows
        reached = np.interp(
            centre - jump, centre, np.cumsum(in_use) - in_use / 2, left=0.0
        )  # from maxima this far below
        in_use = in_use * (1.0 - grows) + density * reached
    return chance


def correction(r: Role, f: TmemForward, tiles: list[QueryTile]) -> None:
    """Rescales O where needed and writes it out. A tile's scale slot is freed after the other tile's is handled."""
    setup(r, f)
    for tile in tiles:
        r.arrive(tile.ready, scope=f.scope, label="O free")
    with r.tiles():
        for tile in tiles:  # the first block has nothing to rescale
            r.wait_barrier(tile.stats)
        r.arrive(tiles[0].read)
        for trips, needed in (("rescaled", True), ("kept", False)):
            with r.loop(trips):
                for tile, other in zip(tiles, reversed(tiles), strict=True):
                    r.wait_barrier(tile.stats)
                    vote(r, f, tile, needed)
                    if needed:
                        rescale(r, f, tile.o)
                    r.arrive(tile.ready, scope=f.scope)
                    r.arrive(other.read)
        if len(tiles) > 1:
            r.arrive(tiles[1].read)
        for tile in tiles:
            read_sum(r, f, tile)
            store_output(r, f, tile)
            r.arrive(tile.ready, scope=f.scope, label="O free")
