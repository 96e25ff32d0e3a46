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

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.blocks import BlockInfo
from fasim.kernels.layouts import kv_layout
from fasim.problem import Problem
from fasim.program.effects import (
    Add,
    Clear,
    Effect,
    Load,
    Mask,
    Matmul,
    Move,
    Normalise,
    Probabilities,
    Rescale,
    Resume,
    ResumeOutput,
    Round,
    RowMax,
    RowSum,
    Store,
    Syncthreads,
)
from fasim.program.language import Kernel, Role, Tensor
from fasim.program.library import schedule
from fasim.program.tiles import Cursor, Register, Smem

from ._fa1_grid import ROWS, grid, row_layouts, split_heuristic

WARPS = 4
STATISTICS_BYTES = 4 * ROWS * WARPS  # a maximum, or a sum, for each row and warp
CTAS_PER_SM = 2  # K and V alone take 128 registers a thread; with the accumulators two CTAs fill the register file


@dataclass(frozen=True)
class Config:
    """Padded head dim, keys of a block, type of P and O, and the tensors in global memory."""

    d: int
    keys: int
    dtype: str
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
    def part_bytes(self) -> int:
        """A warp's part of O, in FP32."""
        return 4 * ROWS * self.d

    @property
    def shared_bytes(self) -> int:
        """What the warps exchange: parts of O, row maxima and row sums."""
        return WARPS * self.part_bytes + 2 * STATISTICS_BYTES

    @property
    def statistics(self) -> tuple[Smem, Smem]:
        """Where row maxima and row sums are exchanged, behind the parts of O."""
        maxima = WARPS * self.part_bytes / self.shared_bytes
        sums = maxima + STATISTICS_BYTES / self.shared_bytes
        return Smem("parts", share=(maxima, sums)), Smem("parts", share=(sums, 1.0))

    def part(self, warp: int) -> Smem:
        """Where a warp puts its part of O."""
        share = self.part_bytes / self.shared_bytes
        return Smem("parts", share=(warp * share, (warp + 1) * share))

    @property
    def flops(self) -> float:
        """FLOP of one of the two GEMMs of a step."""
        return 2.0 * ROWS * self.keys * self.d


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    num_splits: Annotated[
        int | None,
        "CTAs that share the query rows of a head; default: the heuristic of v1.0.8 (the paper's code had 1)",
    ] = None


@schedule(architectures=("ampere", "hopper"), dtypes=("bf16", "fp16"))
def fa1(problem: Problem, arch: Arch, knobs: Knobs) -> Kernel:
    """FlashAttention-1 forward: K/V blocks outside, 16 query rows a step, warps split the keys."""
    num_splits = knobs.num_splits
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
    grid(k, splits, steps, blocks, keys)
    kv, rows = kv_layout(BlockInfo(problem, ROWS, keys), d), row_layouts(k, splits, steps, blocks)
    cfg = Config(
        padded,
        keys,
        problem.dtype,
        k=k.tensor("K", heads * blocks, kv_bytes, "kv", 1, kv),
        v=k.tensor("V", heads * blocks, kv_bytes, "kv", 1, kv),
        q=k.tensor("Q", heads * steps, q_bytes, "q", 1, rows["Q"]),
        out=k.tensor("O", heads * steps, q_bytes, "q", 1, rows["O"]),
        partial=k.tensor("O partial", heads * steps, o_bytes, "q", 1, rows["O partial"]),
        # From a CTA's second K/V block on, its strip of Q and O is taken to be in L2; one line stands for it.
        q_again=k.tensor("Q again", heads * splits, q_bytes, "cta", layout=rows["Q again"]),
        partial_again=k.tensor("O partial again", heads * splits, o_bytes, "cta", layout=rows["O partial again"]),
    )
    k.smem("KV", max(kv_bytes, cfg.shared_bytes))  # K and V in turn, then parts of O and row statistics
    k.smem("parts", cfg.shared_bytes, aliases="KV")
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


def _block(w: Role, cfg: Config, arch: Arch, first: bool, loops: dict[str, bool]) -> None:
    """K and V into registers through shared memory, then the steps: trip-count column -> these rows end here."""
    for tensor in (cfg.k, cfg.v):
        effects = (Load(f"{tensor.name} in flight"),)
        w.copy(f"load {tensor.name}", tensor, tensor.line_bytes, "load", "threads", effects=effects)
    _load_q(w, cfg.q_again, first)
    w.wait_copies("load", "wait Q, K and V")
    if not first:
        _syncthreads(w, arch)  # the last step's parts of O have been read
    _q_to_smem(w, cfg, first)
    words = 2 * cfg.keys * cfg.d / (32 * WARPS * 16)  # 16-byte accesses per thread
    for name in ("V", "K"):
        through, latency = Smem("KV", share=(0, 1)), {"smem": 1}
        for label, pipe, effect in (
            (f"{name} to SMEM", "sts", Move(f"{name} in flight", through)),
            (f"{name} to registers", "lds", Move(through, name)),
        ):
            w.vector(label, {pipe: words}, smem_bytes=2 * cfg.keys * cfg.d, latency=latency, effects=(effect,))
            _syncthreads(w, arch)
    for trips, final in loops.items():
        for label, more in ((trips, True), (f"{trips} end", False)):
            with w.loop(label):
                _step(w, cfg, arch, first, final, more)


def _load_q(w: Role, q: Tensor, first: bool) -> None:
    """The next rows of Q, and what earlier blocks left of their softmax."""
    effects = (Load("next Q"),) if first else (Load("next Q"), Load("next lse", array="LSE"))
    w.copy("load Q", q, q.line_bytes, "load", "threads", effects=effects)


def _q_to_smem(w: Role, cfg: Config, first: bool) -> None:
    """Into the other of two buffers."""
    effects: tuple[Effect, ...] = (Move("next Q", Smem("Q", after=Cursor("copy", "load Q"), share=(0, 1))),)
    effects += () if first else (Move("next lse", "its lse"),)
    mix = {"sts": 1, "f2fp": cfg.d / 16}
    w.vector("Q to SMEM", mix, smem_bytes=2.0 * ROWS * cfg.d, latency={"smem": 1}, effects=effects)


def _step(w: Role, cfg: Config, arch: Arch, first: bool, final: bool, more: bool) -> None:
    """16 rows against the block, in program order; the only overlap is with the other CTA of the SM.

    ``more``: the block has another step, whose rows of Q are fetched.
    """
    e, d = cfg.elements, cfg.d
    hmma = cfg.flops / (2 * 16 * 8 * 16 * WARPS)
    begin = (Clear("m"), Clear("l"), Clear("O")) if first else (Move("its lse", "old lse"), Resume("old lse"))
    w.vector(
        "QK",
        {"ldsm": d / 16, "misc": hmma},
        smem_bytes=2.0 * ROWS * d * WARPS,  # every warp reads all of Q
        mma_sync_flops=cfg.flops,
        latency={"smem": 1, "mma_sync": 1},
        effects=(*begin, Matmul("S", Smem("Q", after=Cursor("copy", "load Q"), share=(0, 1)), "K", transposed=True)),
    )
    if not first:
        w.copy("load O", cfg.partial_again, cfg.partial.line_bytes, "load", "threads", effects=(Load("O"),))
    if more:
        _load_q(w, cfg.q if first else cfg.q_again, first)
    # the mask (FSEL, ISETP) is applied in every step; the rest is addresses, predicates and branches
    w.vector("mask", {"alu": 44 + 1.25 * e, "imad": 15 + 0.36 * d, "misc": 17 + 0.2 * d}, effects=(Mask("S"),))
    maxima, sums = cfg.statistics
    row_max = RowMax("S"), Move("m", maxima)
    w.vector("row max", {"fmnmx": e + 4, "shfl": 4}, latency={"shfl": 2, "alu": 2}, effects=row_max)
    _syncthreads(w, arch)
    across = {"sts": 2, "lds": 2, "shfl": 4, "fmnmx": 4, "fmul": 4, "mufu": 3}
    # a quad reads four warps' maxima; the scale is converted to FP64 and back (F2F, DMUL)
    latency: dict[str, float] = {"smem": 1, "shfl": 2, "alu": 2, "ex2": 2, "fma": 4}
    w.vector("row max of warps", across, latency=latency, effects=(Move(maxima, "m"),))
    _syncthreads(w, arch)
    exp = {"ffma": e, "ex2": e, "fadd": e, "f2fp": e / 2, "shfl": 4}
    p = Probabilities("S"), RowSum("S"), Move("l", sums), Round("S", "P", cfg.dtype)
    w.vector("exp, sum, P", exp, latency={"smem": 1, "ex2": 1, "shfl": 2}, effects=p)
    if more:
        w.wait_copies("load", "wait Q and O")
        _q_to_smem(w, cfg, first)
    shares = [(warp / WARPS, (warp + 1) / WARPS) for warp in range(WARPS)]
    products = tuple(Matmul(f"O{warp}", Register("P", share=share), "V") for warp, share in enumerate(shares))
    w.vector("PV", {"misc": hmma}, mma_sync_flops=cfg.flops, latency={"mma_sync": 1}, effects=products)
    o_bytes = 4.0 * ROWS * d * WARPS
    parts = tuple(Move(f"O{warp}", cfg.part(warp)) for warp in range(WARPS))
    w.vector("O to SMEM", {"sts": 4 + d / 4}, smem_bytes=o_bytes, latency={"smem": 1}, effects=parts)
    _syncthreads(w, arch)
    # statistics of the four warps by shuffles in a quad, exp of the old LSE, 1 / sum; then the partials
    statistics = {"lds": d / 8, "shfl": d / 8, "fmnmx": d / 16, "fadd": 2 + d / 8, "ex2": d / 32, "mufu": d / 16}
    latency = {"smem": 1, "shfl": 4, "alu": 2, "fma": 4, "ex2": 3}
    w.vector("statistics", statistics, latency=latency, effects=(Move(sums, "l"),))
    if not more and not first:
        w.wait_copies("load", "wait O")
    combine = {"lds": d / 8, "fadd": 3 * d / 8, "ffma": d / 8 + d / 32, "fmul": d / 8 + d / 16, "alu": d / 2}
    merge: tuple[Effect, ...] = () if first else (ResumeOutput("O", "old lse"), Rescale("O"))
    merge += (*(Add("O", cfg.part(warp)) for warp in range(WARPS)), Normalise("O"))
    if final:
        merge += (Round("O", "O", cfg.dtype),)
    w.vector("sum O", combine, smem_bytes=o_bytes, latency={"smem": 1, "fma": 4}, effects=merge)
    o = cfg.out if final else cfg.partial if first else cfg.partial_again
    w.copy("store O", o, o.line_bytes, "store", "threads", effects=(Store("O"), Store("lse", array="LSE")))


def _syncthreads(w: Role, arch: Arch) -> None:
    sync = arch.sm.sync
    cycles = sync.syncthreads_base_cycles + sync.syncthreads_per_warp_cycles * WARPS
    w.delay("syncthreads", cycles, "barrier", effects=(Syncthreads(),))
