"""What attention kernels share, in FlashAttention's words; a schedule is a file of roles and loops on top of it.

``blocks`` (which KV blocks a tile visits, which of them are masked), ``grid`` (tiles and their order), ``layouts``
(rows behind the memory lines), ``splits``; for wgmma kernels ``forward``, ``warpgroup``, ``softmax``, ``epilogue``; for
mma.sync kernels ``mma_sync`` and ``kv_outer``; for Triton's programs, whose warps move in step, ``programs``,
``programs_registers``, ``programs_tmem``; for attention in separate launches ``batched_gemm``, ``rows``, ``matrices``.
What a schedule of one's own begins with can be imported from here.
"""

from fasim.kernels.blocks import BlockInfo, KVBlocks, WorkTiles, kv_loops
from fasim.kernels.grid import in_order, kv_heads_in_l2, kv_lines, longest_first, q_lines
from fasim.kernels.layouts import kv_layout, query_layout
from fasim.program import effects
from fasim.program.language import Shape, register_tile

__all__ = [
    "BlockInfo",
    "KVBlocks",
    "Shape",
    "WorkTiles",
    "effects",
    "in_order",
    "kv_heads_in_l2",
    "kv_layout",
    "kv_lines",
    "kv_loops",
    "longest_first",
    "q_lines",
    "query_layout",
    "register_tile",
]
