"""What FlashAttention-3's producer does besides issuing TMA copies: gathering packed Q rows, transposing V (FP8).

Sources: hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp of Dao-AILab/flash-attention at 0251105a, and hardware counters.
"""

from __future__ import annotations

from fasim.effects import Load, Move, Smem
from fasim.ops import BarrierUse, Copy
from fasim.schedule import Ring, Role

#: head_dim_v up to -> shared-memory wavefronts of the transposition per 128 bytes, bank conflicts included. Mean of
#: ldmatrix (1.23, 1.74, 1.82) and stmatrix (1.68, 1.90, 2.57): h200_counters.csv, op_ld and op_st per V block.
TRANSPOSE_WAVEFRONTS = {64: 1.45, 128: 1.8, 256: 2.2}


def load_q(p: Role, ring: Ring, packed: bool) -> None:
    """One TMA copy; rows of several heads are gathered by cp.async of the producer warpgroup."""
    if not packed:
        p.load(ring)
        return
    p.wait_barrier(ring.empty, reason="empty", ahead=1, label="wait Q empty")
    use = BarrierUse(ring.full.name, 1, "Q.load")
    effects = (Load(Smem("Q")),)
    p.record(Copy("load Q", ring.tensor.name, ring.tensor.line_bytes, "load", "threads", use, effects=effects))


def transpose(p: Role, loads: Ring, ring: Ring, dv: int) -> None:
    """The producer warpgroup transposes the oldest V block: ldmatrix.trans, byte permutes, stmatrix.

    wgmma takes a K-major B operand only in FP8. Per 512 bytes and warp one load, one store and four PRMT; two such
    pieces are in flight, so half of the round trips to shared memory are exposed.
    """
    name, nbytes = ring.buffer.name, ring.buffer.bytes
    p.wait(loads)
    p.wait_barrier(ring.empty, reason="empty", ahead=1, label=f"wait {name} empty")
    moves = nbytes / 512 / p.warps
    mix = {"lds": moves, "sts": moves, "alu": 4 * moves}
    smem_bytes = 2 * nbytes * next(waves for limit, waves in TRANSPOSE_WAVEFRONTS.items() if dv <= limit)
    effect = Move(Smem(loads.buffer.name), Smem(name, counter=f"{ring.empty.name}.shared.wait"))
    p.vector("transpose V", mix, smem_bytes=smem_bytes, latency={"smem": moves / 2}, effects=(effect,))
    p.arrive(ring.full, label=f"{name} full")
    p.release(loads)
