"""FlashAttention-1 forward: the outer loop runs over K/V blocks, O travels through global memory in FP32.

The reverse of every later version: a CTA holds one block of K and V in registers and lets 16 query rows at a time pass
by. Its four warps split the keys, so each has a part of every sum: row statistics and O partials meet in shared memory.

Source: Dao-AILab/flash-attention v1.0.8 (9610114c), csrc/flash_attn/src/fmha_fprop_kernel_1xN.h,
fmha_fwd_launch_template.h, fmha/kernel_traits.h. Instruction counts and the order of the step from the SASS of the
kernel as of v0.2 (Oneflow-Inc/flash-attention d80920c, without PyTorch; nvcc 13.0, sm_80): 548 instructions in a middle
step at d64, 654 at d128, three barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.library import schedule
from fasim.problem import Problem
from fasim.schedule import Kernel, Role, Tensor

ROWS = 16  # query rows of one step
WARPS = 4
CTAS_PER_SM = 2  # K and V alone take 128 registers a thread; with the accumulators two CTAs fill the register file


@dataclass(frozen=True)
class Config:
    """Padded head dim, keys of a block, and the tensors in global memory."""

    d: int
    keys: int
    k: Tensor
    v: Tensor
    q: Tensor
    out: Tensor
    partial: Tensor
    q_again: Tensor
    partial_again: Tensor

    @property
    def elements(self) -> float:
        """Scores per thread and step; a thread has them in two rows."""
        return ROWS * self.keys / (32 * WARPS)

    @property
    def outputs(self) -> float:
        """Elements of a warp's partial O per thread."""
        return ROWS * self.d / 32

    @property
    def flops(self) -> float:
        """FLOP of one of the two GEMMs of a step."""
        return 2.0 * ROWS * self.keys * self.d


@schedule(architectures=("ampere", "hopper"), dtypes=("bf16", "fp16"))
def fa1(
    problem: Problem,
    arch: Arch,
    *,
    num_splits: Annotated[
        int | None,
        "CTAs that share the query rows of a head; default: the heuristic of v1.0.8 (the paper's code had 1)",
    ] = None,
) -> Kernel:
    """FlashAttention-1 forward: K/V blocks outside, 16 query rows a step, warps split the keys."""
    d = problem.head_dim
    if d != problem.head_dim_v or d > 128 or d % 8:
        raise ConfigError(f"fa1: head_dim {d}, head_dim_v {problem.head_dim_v}: equal multiples of 8 up to 128 exist")
    if problem.group > 1:
        raise ConfigError(f"fa1: heads_kv {problem.heads_kv}: must equal heads_q {problem.heads_q}")
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise ConfigError("fa1: seqlen_k: a causal mask needs seqlen_q = seqlen_k")
    if num_splits is not None and num_splits < 1:
        raise ConfigError(f"fa1: num_splits {num_splits}: must be at least 1")
    padded = next(size for size in (32, 64, 128) if size >= d)
    keys = 128 if padded == 128 or problem.seqlen_k <= 128 else 256
    heads, blocks = problem.batch * problem.heads_q, problem.kv_tiles(keys)
    steps = problem.q_tiles(ROWS)
    splits = num_splits or split_heuristic(heads, arch.chip.sm_count * CTAS_PER_SM, problem.seqlen_q)

    k = Kernel("fa1", problem, arch, {"num_splits": splits}, max_ctas_per_sm=CTAS_PER_SM)
    q_bytes, o_bytes, kv_bytes = 2 * ROWS * padded, 4 * ROWS * padded, 2 * keys * padded
    k.smem("Q", q_bytes, 2)
    k.smem("KV", max(kv_bytes, WARPS * o_bytes + 512))  # K and V in turn, then O partials and row statistics
    cfg = Config(
        padded,
        keys,
        k=k.tensor("K", heads * blocks, kv_bytes, "kv", 1),
        v=k.tensor("V", heads * blocks, kv_bytes, "kv", 1),
        q=k.tensor("Q", heads * steps, q_bytes, "q", 1),
        out=k.tensor("O", heads * steps, q_bytes, "q", 1),
        partial=k.tensor("O partial", heads * steps, o_bytes, "q", 1),
        # From a CTA's second K/V block on, its strip of Q and O is taken to be in L2; one line stands for it.
        q_again=k.tensor("Q again", heads * splits, q_bytes, "cta"),
        partial_again=k.tensor("O partial again", heads * splits, o_bytes, "cta"),
    )
    _grid(k, splits, steps, blocks, keys)
    with k.role("warps", warps=WARPS, registers=255) as w, w.tiles():
        if problem.causal:
            for j in range(blocks):
                _block(w, cfg, arch, j == 0, {f"diagonal {j}": True, f"below {j}": False})
        elif blocks == 1:
            _block(w, cfg, arch, True, {"steps": True})
        else:
            _block(w, cfg, arch, True, {"steps": False})
            with w.loop(blocks - 2, "K/V blocks"):
                _block(w, cfg, arch, False, {"steps": False})
            _block(w, cfg, arch, False, {"steps": True})
    return k


def split_heuristic(heads: int, slots: int, seqlen_q: int) -> int:
    """The smallest number of CTAs per head within 5 % of the best wave efficiency (num_splits_heuristic_fwd)."""
    splits = np.arange(1, min(30, seqlen_q + ROWS) + 1)
    waves = heads * splits / slots
    efficiency = waves / np.ceil(waves)
    return int(splits[efficiency > 0.95 * efficiency.max()][0])


def _block(w: Role, cfg: Config, arch: Arch, first: bool, loops: dict[str, bool]) -> None:
    """K and V into registers through shared memory, then the steps: trip-count column -> these rows end here."""
    for tensor in (cfg.k, cfg.v):
        w.copy(f"load {tensor.name}", tensor, tensor.line_bytes, "load", "threads")
    w.wait_copies("load", "wait K and V")
    for name in ("K", "V"):
        words = 2 * cfg.keys * cfg.d / (32 * WARPS * 16)  # 16-byte accesses per thread
        w.vector(
            f"{name} to registers", {"sts": words, "lds": words}, smem_bytes=4 * cfg.keys * cfg.d, latency={"smem": 2}
        )
        _syncthreads(w, arch)
    for trips, final in loops.items():
        with w.loop(trips):
            _step(w, cfg, arch, first, final)


def _step(w: Role, cfg: Config, arch: Arch, first: bool, final: bool) -> None:
    """16 rows against the block, in program order; the only overlap is with the other CTA of the SM."""
    e, d = cfg.elements, cfg.d
    hmma = cfg.flops / (2 * 16 * 8 * 16 * WARPS)
    w.vector(
        "QK",
        {"lds": d / 16, "misc": hmma},
        smem_bytes=2.0 * ROWS * d * WARPS,  # every warp reads all of Q
        mma_sync_flops=cfg.flops,
        latency={"smem": 1, "mma_sync": 1},
    )
    if not first:
        w.copy("load O", cfg.partial_again, cfg.partial.line_bytes, "load", "threads")
    q = cfg.q if first else cfg.q_again
    w.copy("load Q", q, q.line_bytes, "load", "threads")
    # the mask (FSEL, ISETP) is applied in every step; the rest is addresses, predicates and branches
    w.vector("mask", {"alu": 44 + 1.25 * e, "imad": 15 + 0.36 * d, "misc": 17 + 0.2 * d})
    w.vector("row max", {"fmnmx": e + 4, "shfl": 4}, latency={"shfl": 2, "alu": 2})
    _syncthreads(w, arch)
    across = {"sts": 2, "lds": 2, "shfl": 4, "fmnmx": 4, "fmul": 4, "mufu": 3}
    # a quad reads four warps' maxima; the scale is converted to FP64 and back (F2F, DMUL)
    w.vector("row max of warps", across, latency={"smem": 1, "shfl": 2, "alu": 2, "ex2": 2, "fma": 4})
    _syncthreads(w, arch)
    exp = {"ffma": e, "ex2": e, "fadd": e, "f2fp": e / 2, "shfl": 4}
    w.vector("exp, sum, P", exp, latency={"smem": 1, "ex2": 1, "shfl": 2})
    w.vector("PV", {"misc": hmma}, mma_sync_flops=cfg.flops, latency={"mma_sync": 1})
    o_bytes = 4.0 * ROWS * d * WARPS
    w.vector("O to SMEM", {"sts": 4 + d / 4}, smem_bytes=o_bytes, latency={"smem": 1})
    _syncthreads(w, arch)
    # statistics of the four warps by shuffles in a quad, exp of the old LSE, 1 / sum; then the partials
    statistics = {"lds": d / 8, "shfl": d / 8, "fmnmx": d / 16, "fadd": 2 + d / 8, "ex2": d / 32, "mufu": d / 16}
    w.vector("statistics", statistics, latency={"smem": 1, "shfl": 4, "alu": 2, "fma": 4, "ex2": 3})
    combine = {"lds": d / 8, "fadd": 3 * d / 8, "ffma": d / 8 + d / 32, "fmul": d / 8 + d / 16, "alu": d / 2}
    w.vector("sum O", combine, smem_bytes=o_bytes, latency={"smem": 1, "fma": 4})
    w.wait_copies("load", "wait Q and O")
    w.vector("Q to SMEM", {"sts": 1, "f2fp": d / 16}, smem_bytes=2.0 * ROWS * d, latency={"smem": 1})
    o = cfg.out if final else cfg.partial if first else cfg.partial_again
    w.copy("store O", o, o.line_bytes, "store", "threads")


def _syncthreads(w: Role, arch: Arch) -> None:
    sync = arch.sm.sync
    w.delay("syncthreads", sync.syncthreads_base_cycles + sync.syncthreads_per_warp_cycles * WARPS, "barrier")


def _grid(k: Kernel, splits: int, steps: int, blocks: int, keys: int) -> None:
    """Grid (batch, head, split), batch fastest; CTA z takes the steps z, z + splits, ... of its head."""
    problem = k.problem
    split, head, batch = (a.ravel() for a in np.mgrid[0:splits, 0 : problem.heads_q, 0 : problem.batch])
    row = batch * problem.heads_q + head

    def up_to(step: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
        """Steps below ``step`` that each split has."""
        return np.maximum(0, -(-(step - np.arange(splits)) // splits))

    first = row * steps + np.concatenate([[0], np.cumsum(up_to(steps))])[split]
    k.tiles = {"q": first, "kv": row * blocks, "cta": row * splits + split}
    if not problem.causal:
        k.tiles["steps"] = up_to(steps)[split]
        return
    for j in range(blocks):
        begin, end = min(j * keys // ROWS, steps), min((j + 1) * keys // ROWS, steps)
        k.tiles[f"diagonal {j}"] = (up_to(end) - up_to(begin))[split]
        k.tiles[f"below {j}"] = (up_to(steps) - up_to(end))[split]
