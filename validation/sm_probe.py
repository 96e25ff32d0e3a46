"""A Triton kernel that reads the SM cycle counter next to the nanosecond timer; two launches give the mean SM clock."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def probe_kernel(out_ptr):
    """Program i writes (SM number, SM cycles, nanoseconds) to row i of an int64 tensor of three columns."""
    row = out_ptr + tl.program_id(0) * 3
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    ns = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(row, sm.to(tl.int64))
    tl.store(row + 1, cycles)
    tl.store(row + 2, ns)
