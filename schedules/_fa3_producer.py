"""What FlashAttention-3's producer does besides issuing TMA copies: gathering packed Q rows, transposing V (FP8).

Sources: hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp of Dao-AILab/flash-attention at 0251105a, and hardware counters.
"""

from __future__ import annotations

from typing import Literal

from fasim.program.effects import Load, Move
from fasim.program.language import Ring, Role, waited
from fasim.program.ops import BarrierUse, Copy
from fasim.program.tiles import Smem

#: Shared-memory wavefronts of the transposition per 128 bytes, bank conflicts included: all wavefronts less those of
#: wgmma and of storing O, over the bytes moved, are 1.07 (d128), 1.21 (d256) and 1.25 (d64) in h200_counters.csv. The
#: counter of stores alone says three times too much, for P at d64 in BF16 too.
TRANSPOSE_WAVEFRONTS = 1.2

#: Exposed latencies of shared memory per ldmatrix, PRMT, stmatrix: stall samples at d256 on an H200 give 115 cycles for
#: such a round (86 at d128, 91 at d64) and 267 per block until the four warps meet, 132 a round in all; what ports and
#: pipes do not explain of them.
ROUND_LATENCIES = 2.5

#: Issue slots of the first producer warp per block of K and V: polls, addresses, descriptors. Instructions in the SASS
#: of the loop that only this warp executes: BF16 67 (d128), 50 (d64), 86 (d256), FP8 60, 55, 86; of them IMAD
#: 8 to 18 and ALU 12 to 19 (BF16), 21 and 18 to 29 (FP8), 2 to 4 and 2 (FA4). Their sub-core is the slowest for it.
LOADS = {
    "16 bit": {"imad": 13.0, "alu": 16.0, "misc": 37.0},
    "fp8": {"imad": 21.0, "alu": 22.0, "misc": 23.0},
    "fa4": {"imad": 3.0, "alu": 2.0, "misc": 61.0},
}

#: Issue slots of a transposing warp beyond its ldmatrix, PRMT and stmatrix, per block and per 512 bytes: the SASS of
#: the loop has 62 instructions with 5 such moves (d64), 137 with 14 (d128) and 171 with 16 (d256).
TRANSPOSE_SLOTS = (20.0, 2.3)


def issue_loads(p: Role, kind: Literal["16 bit", "fp8", "fa4"]) -> None:
    """What the first warp executes around the TMA loads of a block; the others have nothing to do there."""
    p.vector("issue loads", LOADS[kind], warps=1)


def load_q(p: Role, ring: Ring, packed: bool) -> None:
    """One TMA copy; rows of several heads are gathered by cp.async of the producer warpgroup."""
    if not packed:
        p.load(ring)
        return
    p.wait_barrier(ring.empty, reason="empty", ahead=1, label="wait Q empty")
    use = BarrierUse(ring.full.name, 1)
    effects = (Load(Smem("Q")),)
    p.record(Copy("load Q", ring.tensor.name, ring.tensor.line_bytes, "load", "threads", use, effects=effects))


def transpose(p: Role, loads: Ring, ring: Ring) -> None:
    """The producer warpgroup transposes the oldest V block: ldmatrix.trans, byte permutes, stmatrix.

    wgmma takes a K-major B operand only in FP8. Per 512 bytes and warp one load, one store and four PRMT.
    """
    name, nbytes = ring.buffer.name, ring.buffer.bytes
    p.wait(loads)
    p.wait_barrier(ring.empty, reason="empty", ahead=1, label=f"wait {name} empty")
    moves = nbytes / 512 / p.warps
    per_block, per_move = TRANSPOSE_SLOTS
    mix = {"lds": moves, "sts": moves, "alu": 4 * moves, "misc": per_block + per_move * moves}
    smem_bytes = 2 * nbytes * TRANSPOSE_WAVEFRONTS
    effect = Move(Smem(loads.buffer.name), Smem(name, after=waited(ring.empty)))
    p.vector("transpose V", mix, smem_bytes=smem_bytes, latency={"smem": ROUND_LATENCIES * moves}, effects=(effect,))
    p.arrive(ring.full, label=f"{name} full")
    p.release(loads)
