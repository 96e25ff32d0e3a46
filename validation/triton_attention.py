"""A forward attention kernel in Triton with plain pointers: the companion of the ``triton`` schedule.

    python validation/triton_attention.py --seqlen 1024 --head-dim 128 --causal --tile-m 128 --tile-n 64

runs it once and compares the result with float64 attention. Needs PyTorch, Triton and an NVIDIA GPU. Exit code 0: it
agrees; 2: bad usage, or something is missing; 3: the error is above the tolerance.

The kernel is the online softmax of FlashAttention-2 (Dao 2023, algorithm 1): one program per block of ``tile_m`` query
rows and head, a loop over blocks of ``tile_n`` keys, first those without a mask, exponentials in base 2. Causal masks
are aligned bottom right. On Hopper Triton turns the two dots into wgmma and the loads of the loop into cp.async.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as error:
    print(f"{sys.argv[0]}: {error}; PyTorch and Triton are needed", file=sys.stderr)
    raise SystemExit(2) from None


@dataclass(frozen=True)
class Knobs:
    """Tile shape (query rows, keys), software-pipelining depth and warps of one program."""

    tile_m: int
    tile_n: int
    stages: int
    warps: int


#: Fastest of the grid that ``time_kernels.py --sweep`` tries, by head dim (H200, 4096 tokens).
DEFAULT_KNOBS = {64: Knobs(128, 64, 3, 8), 128: Knobs(128, 64, 3, 8), 256: Knobs(128, 64, 2, 8)}


@triton.jit
def _visit_blocks(
    acc, total, peak, q, k_ptrs, v_ptrs, step_k, step_v, rows, first, last, keys_end, shift, scale,
    TILE_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys [first, last) into the running output, row sum and row maximum (of scaled scores, base 2)."""
    columns = tl.arange(0, TILE_N)
    for start in range(first, last, TILE_N):
        if MASKED:
            k = tl.load(k_ptrs + start * step_k, mask=(start + columns)[None, :] < keys_end, other=0.0)
        else:
            k = tl.load(k_ptrs + start * step_k)
        scores = tl.dot(q, k)
        if MASKED:
            visible = ((start + columns)[None, :] <= rows[:, None] + shift) & ((start + columns)[None, :] < keys_end)
            scores = tl.where(visible, scores, -1.0e30)
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - higher[:, None])
        rescale = tl.math.exp2(peak - higher)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if MASKED:
            v = tl.load(v_ptrs + start * step_v, mask=(start + columns)[:, None] < keys_end, other=0.0)
        else:
            v = tl.load(v_ptrs + start * step_v)
        acc = tl.dot(p.to(v.dtype), v, acc)
        peak = higher
    return acc, total, peak


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, group, queries, keys, scale,
    HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One block of query rows of one head. ``scale`` is the softmax scale times log2(e)."""
    block = tl.program_id(0)
    if CAUSAL:  # the longest blocks first
        block = tl.num_programs(0) - 1 - block
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    rows = block * TILE_M + tl.arange(0, TILE_M)
    columns = tl.arange(0, TILE_N)
    dims = tl.arange(0, HEAD_DIM)
    in_range = rows[:, None] < queries

    q = tl.load(q_ptr + batch * q_batch + head * q_head + rows[:, None] * q_row + dims[None, :], in_range, 0.0)
    k_ptrs = k_ptr + batch * k_batch + (head // group) * k_head + columns[None, :] * k_row + dims[:, None]
    v_ptrs = v_ptr + batch * v_batch + (head // group) * v_head + columns[:, None] * v_row + dims[None, :]

    acc = tl.zeros([TILE_M, HEAD_DIM], tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    peak = tl.full([TILE_M], -1.0e30, tl.float32)
    # Row i sees keys j <= i + shift; without a mask every row sees every key.
    shift = keys - queries
    end = keys
    full = keys
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(keys, (block + 1) * TILE_M + shift))
        full = tl.maximum(0, tl.minimum(keys, block * TILE_M + shift + 1))
    else:
        shift = keys
    full = full // TILE_N * TILE_N
    acc, total, peak = _visit_blocks(
        acc, total, peak, q, k_ptrs, v_ptrs, k_row, v_row, rows, 0, full, keys, shift, scale, TILE_N, False
    )
    acc, total, peak = _visit_blocks(
        acc, total, peak, q, k_ptrs, v_ptrs, k_row, v_row, rows, full, end, keys, shift, scale, TILE_N, True
    )
    seen = rows + shift >= 0
    out = tl.where(seen[:, None], acc / total[:, None], 0.0)
    o_ptrs = o_ptr + batch * o_batch + head * o_head + rows[:, None] * o_row + dims[None, :]
    tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=in_range)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, knobs: Knobs) -> torch.Tensor:
    """Attention of ``q`` (batch, heads, queries, dim) over ``k``, ``v`` (batch, kv_heads, keys, dim), one 16-bit dtype.

    ``heads`` is a multiple of ``kv_heads``; the last dimension is contiguous; the softmax scale is 1/sqrt(dim).
    """
    batch, heads, queries, dim = q.shape
    out = torch.empty_like(q)
    grid = (triton.cdiv(queries, knobs.tile_m), batch * heads)
    strides = [s for tensor in (q, k, v, out) for s in tensor.stride()[:3]]
    attention_kernel[grid](
        q, k, v, out, *strides, heads, heads // k.shape[1], queries, k.shape[2], math.log2(math.e) / math.sqrt(dim),
        HEAD_DIM=dim, TILE_M=knobs.tile_m, TILE_N=knobs.tile_n, CAUSAL=causal,
        num_stages=knobs.stages, num_warps=knobs.warps,
    )  # fmt: skip
    return out


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """The same in float64, one head at a time; rows that see no key are zero."""
    group = q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    out = torch.empty_like(q, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = q[b, h].double() @ k[b, h // group].double().T / math.sqrt(q.shape[3])
            if causal:
                hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
                scores.masked_fill_(hidden, -math.inf)
            out[b, h] = torch.softmax(scores, -1).nan_to_num(0.0) @ v[b, h // group].double()
    return out


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, knobs: Knobs) -> tuple[float, float]:
    """Largest absolute error, and relative error in the Frobenius norm, of :func:`attention` against float64."""
    exact = reference(q, k, v, causal=causal)
    error = attention(q, k, v, causal=causal, knobs=knobs).double() - exact
    return error.abs().max().item(), (error.norm() / exact.norm()).item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run the Triton attention kernel once and check it against float64.")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, help="default: --heads")
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--seqlen-k", type=int, help="default: --seqlen")
    parser.add_argument("--head-dim", type=int, default=128, choices=sorted(DEFAULT_KNOBS))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--tile-m", type=int, choices=(16, 32, 64, 128, 256))
    parser.add_argument("--tile-n", type=int, choices=(16, 32, 64, 128, 256))
    parser.add_argument("--stages", type=int, choices=range(1, 9))
    parser.add_argument("--warps", type=int, choices=(1, 2, 4, 8, 16))
    parser.add_argument("--tolerance", type=float, default=1e-2, help="largest relative error (default 1e-2, bf16)")
    options = parser.parse_args(arguments)
    kv_heads = options.kv_heads or options.heads
    if options.heads % kv_heads:
        parser.error(f"--kv-heads {kv_heads} does not divide --heads {options.heads}")
    if not torch.cuda.is_available():
        print("triton_attention.py: no NVIDIA GPU found", file=sys.stderr)
        return 2
    default = DEFAULT_KNOBS[options.head_dim]
    knobs = Knobs(**{name: getattr(options, name) or getattr(default, name) for name in vars(default)})
    torch.manual_seed(0)
    shapes = [(options.heads, options.seqlen)] + 2 * [(kv_heads, options.seqlen_k or options.seqlen)]
    q, k, v = (
        torch.randn(options.batch, heads, rows, options.head_dim, device="cuda", dtype=torch.bfloat16)
        for heads, rows in shapes
    )
    largest, relative = check(q, k, v, causal=options.causal, knobs=knobs)
    print(f"{knobs}: largest absolute error {largest:.3g}, relative error {relative:.3g}")
    return 0 if relative <= options.tolerance else 3


if __name__ == "__main__":
    sys.exit(main())
