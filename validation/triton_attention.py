"""A forward attention kernel in Triton with plain pointers: the companion of the ``triton`` schedule.

    python validation/triton_attention.py --seqlen 1024 --head-dim 128 --causal --tile-m 128 --tile-n 64

runs it once and compares the result with float64 attention. Needs PyTorch, Triton and an NVIDIA GPU. Exit code 0: it
agrees; 2: bad usage, or something is missing; 3: the error is above the tolerance.

The kernel is the online softmax of FlashAttention-2 (Dao 2023, algorithm 1): one program per block of ``tile_m`` query
rows and head, a loop over blocks of ``tile_n`` keys, first those without a mask, exponentials in base 2. Causal masks
are aligned bottom right. On Hopper Triton turns the two dots into wgmma and the loads of the loop into cp.async.
``--dtype fp8`` is E5M2, P too, as in Triton's tutorial; V then has its keys contiguous, which FP8 wgmma needs.
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


FP8 = torch.float8_e5m2
DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
#: Largest relative error: P and O are rounded to BF16; P to E5M2.
TOLERANCES = {"bf16": 1e-2, "fp8": 8e-2}

#: Fastest of the grid that ``time_kernels.py --sweep`` tries, by head dim (H200, 4096 tokens).
DEFAULT_KNOBS = {64: Knobs(128, 64, 3, 8), 128: Knobs(128, 64, 3, 8), 256: Knobs(128, 64, 2, 8)}


#: Cycle stamps per block of keys: QK is about to be issued, QK is complete.
STAMPS = 2


@triton.jit
def _stamp(stamps, place, wanted, PLACES: tl.constexpr, WARPS: tl.constexpr):
    """Write the SM's cycle counter to ``stamps``[warpgroup, place], from the first thread of each warpgroup.

    One piece of assembly reads and stores: with a store of Triton's the kernel takes up to 15 % longer.
    """
    thread = tl.arange(0, 32 * WARPS)
    address = (stamps + thread // 128 * PLACES + place).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(
        """{
        .reg .pred %stamping;
        .reg .u64 %cycles;
        setp.ne.s32 %stamping, $2, 0;
        mov.u64 %cycles, %clock64;
        @%stamping st.global.u64 [$1], %cycles;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, (wanted & (thread % 128 == 0)).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _visit_blocks(
    acc, total, peak, q, k_ptrs, v_ptrs, step_k, step_v, rows, first, last, keys_end, shift, scale, stamps, wanted,
    TILE_N: tl.constexpr, MASKED: tl.constexpr, PLACES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Fold keys [first, last) into the running output, row sum and row maximum (of scaled scores, base 2).

    With ``PLACES`` above 0, STAMPS cycle stamps per block go to ``stamps``.
    """
    columns = tl.arange(0, TILE_N)
    for start in range(first, last, TILE_N):
        if MASKED:
            k = tl.load(k_ptrs + start * step_k, mask=(start + columns)[None, :] < keys_end, other=0.0)
        else:
            k = tl.load(k_ptrs + start * step_k)
        place = start // TILE_N * 2
        if PLACES > 0:
            _stamp(stamps, place, wanted, PLACES, WARPS)
        scores = tl.dot(q, k)
        if PLACES > 0:
            _stamp(stamps, place + 1, wanted, PLACES, WARPS)
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
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, v_column, o_batch, o_head, o_row,
    heads, group, queries, keys, scale, stamps_ptr,
    HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CAUSAL: tl.constexpr,
    PLACES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One block of query rows of one head. ``scale`` is the softmax scale times log2(e).

    With ``PLACES`` = 0 nothing is recorded and the code is that without stamps; otherwise ``stamps_ptr`` is int64
    (programs, warpgroups, PLACES), in the order of program ids, and programs on SM 0 write STAMPS of them per block.
    """
    block = tl.program_id(0)
    stamps = stamps_ptr
    wanted = False
    if PLACES > 0:
        sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        wanted = sm == 0
        program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + block
        stamps = stamps_ptr + program * (WARPS // 4 * PLACES)
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
    v_ptrs = v_ptr + batch * v_batch + (head // group) * v_head + columns[:, None] * v_row + dims[None, :] * v_column

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
        acc, total, peak, q, k_ptrs, v_ptrs, k_row, v_row, rows, 0, full, keys, shift, scale,
        stamps, wanted, TILE_N, False, PLACES, WARPS,
    )  # fmt: skip
    acc, total, peak = _visit_blocks(
        acc, total, peak, q, k_ptrs, v_ptrs, k_row, v_row, rows, full, end, keys, shift, scale,
        stamps, wanted, TILE_N, True, PLACES, WARPS,
    )  # fmt: skip
    seen = rows + shift >= 0
    out = tl.where(seen[:, None], acc / total[:, None], 0.0)
    o_ptrs = o_ptr + batch * o_batch + head * o_head + rows[:, None] * o_row + dims[None, :]
    tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=in_range)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, knobs: Knobs) -> torch.Tensor:
    """Attention of ``q`` (batch, heads, queries, dim) over ``k``, ``v`` (batch, kv_heads, keys, dim), of one dtype.

    ``heads`` is a multiple of ``kv_heads``; the last dimension is contiguous, but of a V in FP8 the keys are (see
    :func:`inputs`); the softmax scale is 1/sqrt(dim). The output has ``q``'s dtype, bfloat16 for FP8.
    """
    out = torch.empty_like(q, dtype=torch.bfloat16 if q.dtype == FP8 else q.dtype)
    launch(q, k, v, out, causal=causal, knobs=knobs)
    return out


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, causal: bool, knobs: Knobs,
    stamps: torch.Tensor | None = None, **options: int,
):  # fmt: skip
    """Launch the kernel and return it compiled, with Triton's launch ``options``.

    With ``stamps``, int64 (programs, warpgroups, blocks of keys, STAMPS), a variant with 4 warps or more that records
    the cycle counter of the programs on SM 0.
    """
    batch, heads, queries, dim = q.shape
    grid = (triton.cdiv(queries, knobs.tile_m), batch * heads)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride(), *out.stride()[:3]]
    return attention_kernel[grid](
        q, k, v, out, *strides, heads, heads // k.shape[1], queries, k.shape[2], math.log2(math.e) / math.sqrt(dim),
        stamps, HEAD_DIM=dim, TILE_M=knobs.tile_m, TILE_N=knobs.tile_n, CAUSAL=causal,
        PLACES=0 if stamps is None else stamps.shape[2] * STAMPS, WARPS=knobs.warps,
        num_stages=knobs.stages, num_warps=knobs.warps, **options,
    )  # fmt: skip


def inputs(batch: int, shapes: Sequence[tuple[int, int]], dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random normal Q, K and V for (heads, rows) each."""
    q, k, v = (torch.randn(batch, heads, rows, dim, device="cuda").to(torch.bfloat16) for heads, rows in shapes)
    if dtype == FP8:
        v = v.transpose(2, 3).contiguous().to(dtype).transpose(2, 3)
    return [q.to(dtype), k.to(dtype), v.to(dtype)]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """The same in float64, one head at a time; rows that see no key are zero."""
    group = q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
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
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--tolerance", type=float, help="largest relative error (default 1e-2 for bf16, 8e-2 for fp8)")
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
    q, k, v = inputs(options.batch, shapes, options.head_dim, DTYPES[options.dtype])
    tolerance = TOLERANCES[options.dtype] if options.tolerance is None else options.tolerance
    largest, relative = check(q, k, v, causal=options.causal, knobs=knobs)
    print(f"{knobs}: largest absolute error {largest:.3g}, relative error {relative:.3g}")
    return 0 if relative <= tolerance else 3


if __name__ == "__main__":
    sys.exit(main())
