"""Standard attention: GEMM, softmax and GEMM as separate launches with the score matrix in memory between them.

S = Q K^T, P = softmax(S) and O = P V: 8 N^2 bytes of matrix traffic per head (12 N^2 causal) for 4 N^2 d FLOP, so d/2
FLOP per byte. What else is launched depends on who writes it, ``framework``:

* ``kernels``: these three, and a lean mask kernel where causal.
* ``pytorch``: what the benchmarks of the FlashAttention papers call PyTorch. Q, K and V are slices of a packed tensor
  and copied into the order that the GEMMs want; a causal mask is added by a broadcasting kernel.
* ``sdpa``: the fallback of PyTorch's scaled_dot_product_attention. Everything in FP32, GEMMs by FFMA; after the
  softmax, rows without a key are looked for and P is copied twice.

Sources: kernels and instruction counts of PyTorch 2.11 from hardware counters and profiles on an H200
(validation/data/h200_counters.csv, rows ``naive``, and h200_eager_counters.csv); the GEMMs are cuBLAS's. Numbers:
builds/naive.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.batched_gemm import Gemm, Tiling, batched_gemm, output_product, score_product
from fasim.kernels.rows import Access, RowKernels, softmax_code
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.effects import Mask, Round
from fasim.program.language import Kernel
from fasim.program.library import schedule


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    framework: Annotated[
        Literal["kernels", "pytorch", "sdpa"], "what is launched: three kernels, PyTorch operations, SDPA's fallback"
    ] = "kernels"
    stages: Annotated[int, "buffers of each GEMM operand (FP32: always 2)"] = 4
    tf32: Annotated[bool, "sdpa: GEMMs in TF32, as in NVIDIA's containers; PyTorch's own default is FP32"] = False
    softmax_instructions: Annotated[
        float | None, "issue slots per score element of the softmax kernel; default: as counted"
    ] = None
    launch_us: Annotated[float, "host time per kernel in us; 0: a captured graph. PyTorch eager: about 30"] = 0.0


@schedule(architectures=("ampere", "hopper", "blackwell"), dtypes=("bf16", "fp16"))
def naive(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> list[Kernel]:
    """Standard attention in three kernels or more, bound by the traffic of the score matrix."""
    check(problem, arch, knobs)
    framework, causal, sdpa = knobs.framework, problem.causal, knobs.framework == "sdpa"
    code = softmax_code(problem, build, fp32=sdpa)
    counted = sum(code.mix.values())
    slots = knobs.softmax_instructions or counted
    chosen = {**asdict(knobs), "softmax_instructions": slots, "build": build.name}

    first, second = products(problem, arch, knobs)
    depth = 2 if sdpa and not knobs.tf32 else knobs.stages
    qk = batched_gemm(problem, arch, build, first, depth, chosen)
    pv = batched_gemm(problem, arch, build, second, depth if sdpa else 2 * depth, chosen)
    rows = RowKernels(problem, arch, build, chosen)
    q, k, v, o, s = first.a, first.b, second.b, second.c, first.c
    each = rows.element_wise
    element = first.element
    masked = Access("S masked" if causal else "S", element)
    softmax = rows.softmax(masked.tensor, element, code, slots / counted)

    def mask(code: str, *more: Access) -> list[Kernel]:
        reads = (Access("S", element), *more)
        return [each("mask", code, s, reads, masked, (Mask("x"),))] if causal else []

    if framework == "kernels":
        kernels = [qk, *mask("mask"), softmax, pv]
    elif framework == "pytorch":
        kernels = [
            each("copy Q", "strided copy", q, [Access("QKV.Q", 2)], Access("Q", 2)),
            each("transpose K", "transposing copy", k, [Access("QKV.K", 2, times=16)], Access("K", 2)),
            qk,
            *mask("add mask", Access("mask", 2)),
            softmax,
            each("copy V", "strided copy", v, [Access("QKV.V", 2)], Access("V", 2)),
            pv,
        ]
    else:  # Q and K are scaled by the root of the softmax scale each
        kernels = [
            each("cast Q", "strided cast", q, [Access("Q16", 2)], Access("Q32", 4)),
            each("cast K", "strided cast", k, [Access("K16", 2)], Access("K32", 4)),
            each("cast V", "strided cast", v, [Access("V16", 2)], Access("V", 4)),
            each("scale Q", "scale", q, [Access("Q32", 4)], Access("Q", 4)),
            each("scale K", "scale", k, [Access("K32", 4)], Access("K", 4)),
            qk,
            *mask("add FP32 mask", Access("mask", 4)),
            softmax,
            each("is infinite", "is infinite", s, [masked], Access("infinite", 1), effects=None),
            each("all", "all", s, [Access("infinite", 1)], None, effects=None),
            each("where", "where", s, [Access("P", 4)], Access("P of rows", 4)),
            each("cast P", "cast", s, [Access("P of rows", 4)], Access("P16", 2), effects=None),
            pv,
            each("cast O", "cast", o, [Access("O", 4)], Access("O16", 2), (Round("x", "x", problem.dtype),)),
        ]
    for kernel in kernels:
        kernel.load = "memory"
        kernel.score_format = None if sdpa else problem.dtype
        launches = build.row("launches", framework=framework, kernel=kernel.name)["number"]  # that it stands for
        kernel.launch_us = knobs.launch_us * launches
    return kernels


def products(problem: Problem, arch: Arch, knobs: Knobs) -> tuple[Gemm, Gemm]:
    """S = Q K^T and O = P V, as cuBLAS cuts them.

    On Hopper in 16 bit the names of its kernels tell (h200_counters.csv): ``nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_
    TNT`` is QK, ``.._128x256_64x4_1x2_..`` PV. cuBLAS computes the transpose, so 256 x 128 are 256 keys by 128 queries,
    128 x 256 a head dimension of 128 by 256 queries; the 2 CTAs of a cluster take neighbouring queries and share K or V
    by multicast: what L2 sends and SMs receive differ by half of K.
    """
    d, dv, sdpa = problem.head_dim, problem.head_dim_v, knobs.framework == "sdpa"
    wide = 128 if arch.architecture == "ampere" or sdpa else 256
    depth = next(step for step in (64, 32, 16) if d % step == 0 and (step <= 32 or not sdpa))
    format = problem.dtype if not sdpa else "tf32" if knobs.tf32 else "fp32"
    tall, pairs, pairs_of_tall = 128, 1, 1
    if arch.architecture == "hopper" and not sdpa:
        pairs = 2 - problem.q_tiles(128) % 2
        tall = 128 * pairs if dv <= 128 else 128
        pairs_of_tall = 2 - problem.q_tiles(tall) % 2
    return (
        score_product(problem, Tiling(128, wide, depth, pairs), format),
        output_product(problem, Tiling(tall, min(wide, dv), 32, pairs_of_tall), format, "P of rows" if sdpa else "P"),
    )


def check(problem: Problem, arch: Arch, knobs: Knobs) -> None:
    """Raises ConfigError for shapes and knobs that are not modelled."""
    d, dv, slots = problem.head_dim, problem.head_dim_v, knobs.softmax_instructions
    if knobs.stages < 2:
        raise ConfigError(f"naive: stages {knobs.stages}: a GEMM that loads ahead needs at least 2")
    if d % 16 or dv % 16 or dv > 256:
        raise ConfigError(f"naive: head_dim {d}, head_dim_v {dv}: multiples of 16, head_dim_v up to 256")
    if slots is not None and slots <= 0:
        raise ConfigError(f"naive: softmax_instructions {slots}: must be positive")
    if knobs.launch_us < 0:
        raise ConfigError(f"naive: launch_us {knobs.launch_us}: must not be negative")
    if knobs.tf32 and (knobs.framework != "sdpa" or arch.sm.tma is None):
        raise ConfigError("naive: tf32 is modelled for framework=sdpa on Hopper and Blackwell")
