"""Standard attention: GEMM, softmax and GEMM as separate launches with the score matrix in memory between them.

S = Q K^T, P = softmax(S) and O = P V: 8 N^2 bytes of matrix traffic per head (12 N^2 causal) for 4 N^2 d FLOP, so d/2
FLOP per byte. What else is launched depends on who writes it, ``framework``:

* ``kernels``: these three, and a lean mask kernel where causal.
* ``pytorch``: what the benchmarks of the FlashAttention papers call PyTorch. Q, K and V are slices of a packed tensor
  and copied into the order that the GEMMs want; a causal mask is added by a broadcasting kernel.
* ``sdpa``: the fallback of PyTorch's scaled_dot_product_attention. Everything in FP32, GEMMs by FFMA; after the
  softmax, rows without a key are looked for and P is copied twice.

Sources: kernels and instruction counts of PyTorch 2.11 from hardware counters and profiles on an H200
(validation/data/h200_counters.csv, rows ``naive``, and h200_eager_counters.csv); the GEMMs are cuBLAS's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.program.effects import Effect, Mask, Round
from fasim.program.language import Kernel
from fasim.program.library import schedule
from fasim.program.ops import Mix, add_mixes, scale_mix

from ._naive_gemm import STEP, TILE_M, Gemm, gemm, operand_layout, operand_shape, row_tiles_beside
from ._naive_rows import (
    ADD_MASK,
    ALL,
    CAST,
    CAST_STRIDED,
    FP32_MASK,
    IS_INFINITE,
    MASK,
    SCALE,
    SECTOR_BYTES,
    STRIDED,
    TRANSPOSE,
    WHERE,
    Pass,
    Softmax,
    operand_pass,
    score_pass,
    slots,
    softmax,
)

#: Softmax of 16-bit rows. Block kernel: cunn_SoftMaxForwardReg, expf and division are IEEE.
WARP = slots(0.82, ffma=14.7, alu=9.0, mufu=3.0, lds=3.3, misc=9.4)
#: With 64 scores a thread and 80 registers.
LONG_WARP = slots(0.55, ffma=14.4, alu=9.0, mufu=3.0, lds=3.2, misc=9.1)
#: A block waits for its barriers and for its row, which is modelled, so no idle slots are added.
BLOCK: dict[str, Mix] = {
    "fp16": {"ffma": 31.8, "alu": 18.1, "mufu": 4.0, "lds": 6.8, "misc": 18.8},
    "bf16": {"ffma": 34.0, "alu": 22.7, "mufu": 4.2, "lds": 6.8, "misc": 21.0},
}
#: What scores far below the maximum, those under a mask, cost on top: expf takes another path.
UNDER_MASK: Mix = {"alu": 11.0, "misc": 6.0}
#: PyTorch -> longest row that is a warp's, and what the block kernel executes of BLOCK. That of 2.3 is another, not
#: counted: its share was fitted to the row of 4096 tokens without a mask of the FlashAttention-3 paper.
VERSIONS = {"2.11": ({1024: WARP, 2048: LONG_WARP}, 1.0), "2.8": ({1024: WARP}, 1.0), "2.3": ({1024: WARP}, 0.65)}
#: Launches that a kernel here stands for, where it is not one: the mask of N x N is made first, by small kernels.
LAUNCHES = {("pytorch", "mask"): 4, ("sdpa", "mask"): 6, ("sdpa", "all"): 2}

Access = tuple[str, int]  # tensor, bytes of an element


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    framework: Annotated[
        Literal["kernels", "pytorch", "sdpa"], "what is launched: three kernels, PyTorch operations, SDPA's fallback"
    ] = "kernels"
    stages: Annotated[int, "buffers of each GEMM operand (FP32: always 2)"] = 4
    tf32: Annotated[bool, "sdpa: GEMMs in TF32, as in NVIDIA's containers; PyTorch's own default is FP32"] = False
    pytorch: Annotated[Literal["2.3", "2.8", "2.11"], "whose softmax kernels, in 16 bit"] = "2.11"
    softmax_instructions: Annotated[
        float | None, "issue slots per score element of the softmax kernel; default: as counted"
    ] = None
    launch_us: Annotated[float, "host time per kernel in us; 0: a captured graph. PyTorch eager: about 30"] = 0.0


@schedule(architectures=("ampere", "hopper", "blackwell"), dtypes=("bf16", "fp16"))
def naive(problem: Problem, arch: Arch, knobs: Knobs) -> list[Kernel]:
    """Standard attention in three kernels or more, bound by the traffic of the score matrix."""
    framework = knobs.framework
    stages = knobs.stages
    tf32 = knobs.tf32
    pytorch = knobs.pytorch
    softmax_instructions = knobs.softmax_instructions
    launch_us = knobs.launch_us
    if stages < 2:
        raise ConfigError(f"naive: stages {stages}: a GEMM that loads ahead needs at least 2")
    d, dv = problem.head_dim, problem.head_dim_v
    if d % 16 or dv % 16 or dv > 256:
        raise ConfigError(f"naive: head_dim {d}, head_dim_v {dv}: multiples of 16, head_dim_v up to 256")
    if softmax_instructions is not None and softmax_instructions <= 0:
        raise ConfigError(f"naive: softmax_instructions {softmax_instructions}: must be positive")
    if launch_us < 0:
        raise ConfigError(f"naive: launch_us {launch_us}: must not be negative")
    if tf32 and (framework != "sdpa" or arch.sm.tma is None):
        raise ConfigError("naive: tf32 is modelled for framework=sdpa on Hopper and Blackwell")
    sdpa = framework == "sdpa"
    kind = _softmax_kind(problem, pytorch, sdpa)
    counted = sum(kind.mix(problem.seqlen_k).values())
    per_element = softmax_instructions or counted
    chosen: dict[str, object] = dict(framework=framework, stages=stages, tf32=tf32, pytorch=pytorch)
    chosen |= dict(softmax_instructions=per_element, launch_us=launch_us)

    element = 4 if sdpa else 2
    wide = 128 if arch.architecture == "ampere" or sdpa else 256
    deep = next(step for step in (64, 32, 16) if d % step == 0 and (step <= STEP or not sdpa))
    masked = "S masked" if problem.causal else "S"
    p = "P of rows" if sdpa else "P"
    first = Gemm("QK", "Q", "K", "S", problem.seqlen_k, d, wide, deep, True, element, tf32)
    second = Gemm("PV", p, "V", "O", dv, problem.seqlen_k, min(wide, dv), STEP, False, element, tf32)
    if arch.architecture == "hopper" and not sdpa:
        tall = TILE_M * row_tiles_beside(problem) if dv <= 128 else TILE_M
        first, second = (
            replace(g, tile_m=rows, cluster=2 - problem.q_tiles(rows) % 2)
            for g, rows in ((first, TILE_M), (second, tall))
        )
    depths = (2, 2) if sdpa and not tf32 else (stages, stages) if sdpa else (stages, 2 * stages)

    def operand(name: str, mix: Mix, tensor: str, read: Access, write: Access, accesses: int = 1) -> Kernel:
        lines, elements = operand_shape(problem, first, second, tensor)
        rounded = (Round("x", "x", problem.dtype),) if tensor == "O" else ()
        registers = 18 if mix in (STRIDED, TRANSPOSE) else 32
        spec = Pass(name, mix, ((*read, accesses),), ((*write, 1),), registers, effects=rounded)
        of, operand = {"Q": (first, "a"), "K": (first, "b"), "V": (second, "b"), "O": (second, "c")}[tensor]
        layout = operand_layout(problem, of, operand)
        return operand_pass(problem, arch, spec, lines, elements, layout, chosen)

    def scores(
        name: str, mix: Mix, reads: tuple[Access, ...], *writes: Access, effects: tuple[Effect, ...] | None = ()
    ) -> Kernel:
        accesses = (tuple((*access, 1) for access in both) for both in (reads, writes))
        spec = Pass(name, mix, *accesses, effects=effects)
        return score_pass(problem, arch, spec, chosen)

    kernels: list[Kernel] = []
    if framework == "pytorch":
        kernels.append(operand("copy Q", STRIDED, "Q", ("QKV.Q", 2), ("Q", 2)))
        kernels.append(operand("transpose K", TRANSPOSE, "K", ("QKV.K", 2), ("K", 2), SECTOR_BYTES // 2))
    if sdpa:  # Q and K are scaled by the root of the softmax scale each
        for name, target in (("Q", "Q32"), ("K", "K32"), ("V", "V")):
            kernels.append(operand(f"cast {name}", CAST_STRIDED, name, (f"{name}16", 2), (target, 4)))
        kernels += [operand(f"scale {name}", SCALE, name, (f"{name}32", 4), (name, 4)) for name in "QK"]
    kernels.append(gemm(problem, arch, first, depths[0], chosen))
    if problem.causal:
        mix = {"kernels": MASK, "pytorch": ADD_MASK, "sdpa": FP32_MASK}[framework]
        mask = () if framework == "kernels" else (("mask", element),)
        kernels.append(scores("mask", mix, (("S", element), *mask), (masked, element), effects=(Mask("x"),)))
    kernels.append(softmax(problem, arch, masked, element, kind, per_element / counted, chosen))
    if framework == "pytorch":
        kernels.append(operand("copy V", STRIDED, "V", ("QKV.V", 2), ("V", 2)))
    if sdpa:
        kernels.append(scores("is infinite", IS_INFINITE, ((masked, 4),), ("infinite", 1), effects=None))
        kernels.append(scores("all", ALL, (("infinite", 1),), effects=None))
        kernels.append(scores("where", WHERE, (("P", 4),), (p, 4)))
        kernels.append(scores("cast P", CAST, ((p, 4),), ("P16", 2), effects=None))
    kernels.append(gemm(problem, arch, second, depths[1], chosen))
    if sdpa:
        kernels.append(operand("cast O", CAST, "O", ("O", 4), ("O16", 2)))
    for kernel in kernels:
        kernel.load = "memory"
        kernel.score_format = None if sdpa else problem.dtype
        kernel.launch_us = launch_us * LAUNCHES.get((framework, kernel.name), 1)
    return kernels


def _softmax_kind(problem: Problem, pytorch: str, sdpa: bool) -> Softmax:
    """The softmax kernels of a version of PyTorch. In FP32 a warp's longest row is 1024, and the block kernel alike."""
    warp, share = VERSIONS["2.8" if sdpa else pytorch]
    block = scale_mix(BLOCK["fp16" if sdpa else problem.dtype], share)
    if not problem.causal:
        return Softmax(warp, block)
    return Softmax({keys: add_mixes(mix, UNDER_MASK) for keys, mix in warp.items()}, add_mixes(block, UNDER_MASK))
