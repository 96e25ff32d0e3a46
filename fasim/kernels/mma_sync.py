"""What kernels of mma.sync share: synchronous products fed by ldmatrix, copies by cp.async, __syncthreads.

All warps of the role take rows of one tile; a warp multiplies, copies and computes in turn, so the only overlap is
between the warps of an SM.
"""

from __future__ import annotations

from fasim.arch import Arch
from fasim.program.effects import Effect, Load, Syncthreads
from fasim.program.language import Role, Smem, Tensor
from fasim.program.ops import Latencies, Mix

#: FLOP of an HMMA, m16n8k16, and bytes of an ldmatrix of four registers, each of a warp.
HMMA_FLOPS, LDSM_BYTES = 2 * 16 * 8 * 16, 512


def product(
    w: Role,
    label: str,
    flops: float,
    effects: tuple[Effect, ...],
    *,
    ldsm: float = 0.0,
    smem_bytes: float = 0.0,
    latency: Latencies | None = None,
) -> None:
    """``flops`` as HMMA of all warps of the role, each with ``ldsm`` ldmatrix before them.

    ``smem_bytes``: what goes through the shared-memory port meanwhile; ``latency``: see ``ops.Vector``.
    """
    mix: Mix = {"ldsm": ldsm, "misc": flops / HMMA_FLOPS / w.warps}
    w.vector(label, mix, smem_bytes=smem_bytes, mma_sync_flops=flops, latency=latency, effects=effects)


def load_async(w: Role, tensor: Tensor) -> None:
    """The next block of ``tensor`` into the buffer of its name, by cp.async."""
    into = (Load(Smem(tensor.name)),) if tensor.layout else ()
    w.copy(f"load {tensor.name}", tensor, tensor.line_bytes, "load", "threads", effects=into)


def syncthreads(w: Role, arch: Arch, label: str = "syncthreads") -> None:
    """__syncthreads of warps that arrive together."""
    sync = arch.sm.sync
    cycles = sync.syncthreads_base_cycles + sync.syncthreads_per_warp_cycles * w.warps
    w.delay(label, cycles, "barrier", effects=(Syncthreads(),))
