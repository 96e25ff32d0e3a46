"""FlashAttention-4 forward at head dim 256: pairs of CTAs, one query tile each, S double-buffered."""

from __future__ import annotations

from fasim.program.effects import Matmul, Store
from fasim.program.language import Kernel, Ring, Role, Tensor
from fasim.program.tiles import Smem

from ._fa4_grid import Layouts
from ._fa4_parts import (
    RESCALE_WAITS,
    Operands,
    commit,
    leader,
    load,
    mma,
    normalise,
    operands,
    read_scale,
    read_sum,
    rescale,
    rescale_output,
    setup,
    softmax_role,
)
from ._fa4_tile import ROWS, WHOLE, Config, Share, Tile, query_tile

#: Halves of the columns of Q and K, or V and O, in the order of their copies.
HALVES: tuple[Share, Share] = ((0.5, 1.0), (0.0, 0.5))


def d256_kernel(k: Kernel, c: Config, layouts: Layouts) -> Kernel:
    """One tile of 128 rows a CTA; K and V in halves of 128 columns; QK one block ahead of PV.

    O is rescaled in every block, and the correction waits for the last PV itself: with QK ahead, S being complete no
    longer says so. The correction has twice the registers of the other kernel's, so it waits half as often.
    """
    q_ring, kv_ring, k_tensor, v_tensor = operands(k, c, layouts, c.size(ROWS * 128 // c.ctas), 4, halves=2)
    k.tmem_columns = 512  # S in 0-127 and 128-255, O above
    tile = query_tile(k, c, stages=2)
    o_bytes = 2 * ROWS * c.dv
    o_tensor = k.tensor("O", k.tile_count, o_bytes, "q", 1, layouts.o)

    with k.role("load", warps=1, registers=32) as r:
        setup(r)
        with r.tiles(draws=True):
            load(r, q_ring, q_ring.tensor)
            _load_halves(r, kv_ring, k_tensor)
            with r.loop("steps"):
                _load_halves(r, kv_ring, k_tensor)
                _load_halves(r, kv_ring, v_tensor)
            _load_halves(r, kv_ring, v_tensor)
    with k.role("mma", warps=1, registers=32) as r:
        setup(r)
        with r.tiles(), leader(k, r, c, q_ring, kv_ring, halves=2) as wait:
            wait(q_ring)
            _qk_halves(r, c, tile, kv_ring, wait)
            with r.loop("steps"):
                _qk_halves(r, c, tile, kv_ring, wait)
                _pv_halves(r, c, tile, kv_ring, wait)
            commit(r, c, q_ring.empty)
            _pv_halves(r, c, tile, kv_ring, wait)
    with k.role("softmax", warpgroups=1, registers=c.registers[0]) as r:
        softmax_role(k, r, c, tile)
    with k.role("correction", warpgroups=1, registers=c.registers[1]) as r:
        setup(r)
        with r.tiles():
            r.wait_barrier(tile.stats)
            r.arrive(tile.read)
            r.arrive(tile.ready, scope=c.scope)
            with r.loop("steps"):
                r.wait_barrier(tile.stats, effects=read_scale(c, tile))
                r.arrive(tile.read)
                r.wait_barrier(tile.output, reason="full", label="wait PV")
                rescale(r, c, rescale_output(c, tile, HALVES), RESCALE_WAITS / 2)
                r.arrive(tile.ready, scope=c.scope)
            r.wait_barrier(tile.stats, effects=read_sum(c, tile))
            r.arrive(tile.read)
            r.wait_barrier(tile.output, reason="full", label="wait O")
            normalise(r, c, tile, {"stg": c.dv / 2})
            r.copy("store O", o_tensor, o_bytes, "store", engine="threads", effects=(Store("O"),))
            r.wait_copies("store")
    return k


def _load_halves(r: Role, ring: Ring, tensor: Tensor) -> None:
    for _ in range(2):
        load(r, ring, tensor)


def _qk_halves(r: Role, c: Config, tile: Tile, ring: Ring, wait: Operands) -> None:
    """S over both halves of the head dimension."""
    for half, done in zip(HALVES, (None, tile.scores), strict=True):
        wait(ring)
        scores = Matmul(tile.next_s, tile.q(half), Smem("KV"), transposed=True, add=half != HALVES[0])
        mma(r, c, "QK", c.n, c.d // 2 // c.depth, done, (scores,))
        commit(r, c, ring.empty)


def _pv_halves(r: Role, c: Config, tile: Tile, ring: Ring, wait: Operands) -> None:
    """Both halves of the columns of O."""
    r.wait_barrier(tile.ready, reason="full")
    for half, done in zip(HALVES, (None, tile.output), strict=True):
        wait(ring)
        output = Matmul(tile.o(half), tile.ready_p(WHOLE), Smem("KV"), add=True)
        mma(r, c, "PV", c.dv // 2, c.n // c.depth, done, (output,))
        commit(r, c, ring.empty)
