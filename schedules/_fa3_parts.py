"""What a consumer warpgroup of FlashAttention-3 does: the two GEMMs, the softmax in the compiler's order, the epilogue.

Sources: as in fa3.py; order and counts from the disassembly of that build, costs from its stall samples and counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasim.effects import (
    Add,
    Effect,
    Mask,
    Matmul,
    Move,
    Normalise,
    Probabilities,
    Rescale,
    Round,
    RowMax,
    RowSum,
    Smem,
    Store,
)
from fasim.ops import Mix
from fasim.schedule import Barrier, Role, Tensor

#: What the compiler places between the maximum of a thread's first row and its wait for PV, by head dim: shares of EX2
#: and of FFMA. Counted in the SASS of the main loops (nvcc 13.0), but for d192 and FP8 d96. Where P goes through shared
#: memory, the wait comes after the maxima of both rows and before all exponentials.
EARLY = {64: (0.20, 0.5), 96: (0.0, 0.0), 128: (0.255, 0.5), 192: (0.32, 0.5), 256: (0.35, 0.85)}
FP8_EARLY = {64: (0.0, 0.0), 96: (0.0, 0.0), 128: (0.28, 0.83), 192: (0.20, 0.5), 256: (0.12, 0.34)}

#: Exposed part of an ALU latency per FMNMX of the first row's maximum, which is one chain of dependent instructions:
#: 6.2 cycles each at d128 (stall sampling, H200), of which port and issue explain 4.7 + 0.4.
CHAIN_EXPOSED = 0.27

#: Cycles until P has reached shared memory: FENCE and the wait after it, stall sampling at d64 on an H200 (O: 216 at
#: d128). The stores themselves go out among the exponentials.
FENCE_CYCLES = 209.0

#: Issue slots per wgmma: descriptors and uniform registers. (594 - 472) / 19 in the d128 loop.
SLOTS_PER_WGMMA = 6.5

#: Cycles per tile in which a consumer warp has no instruction: code outside the loop runs once per tile
#: and is fetched anew. Nsight Compute, no_instruction stalls on an H200: 742 (d128), 853 (d64); before the first wgmma
#: and after the last, as cycle stamps divide them.
FETCH_CYCLES = (165.0, 585.0)

#: Cycles per tile to find its block and set up pointers and descriptors (FP8: and to look up scales), less the waits
#: for Q and K that are simulated. From the end of a tile to its first wgmma cycle stamps in seven kernels have 567
#: cycles and 735 in FP8, instruction fetch and waits included; where tiles are drawn from a counter 800 and 1050,
#: which is not modelled (validation/DEVIATIONS.md).
SETUP_CYCLES = {"16 bit": 320.0, "fp8": 490.0}

#: Cycles per iteration in branches, wgmma fences and waits: branch_resolving stalls are 37 per iteration, two
#: wgmma waits that find their group complete take 24 to 30 each (cycle stamps inside the kernel).
LOOP_CYCLES = 90.0


@dataclass(frozen=True)
class Config:
    """Resolved knobs and the counts that follow from them."""

    m: int
    n: int
    d: int
    dv: int
    stages: int
    pingpong: bool
    overlap: bool
    in_registers: bool
    exp: bool
    early: float
    early_ffma: float
    warpgroups: int
    rescale_early: bool
    first_release: bool
    fp8: bool
    two_level: bool
    output: Literal["tma", "threads", "partial"]  # how O leaves; partial: one split's share in FP32
    formats: tuple[str, str]  # of P and O
    causal: bool

    @property
    def element(self) -> int:
        """Bytes per element of Q, K, V and P."""
        return 1 if self.fp8 else 2

    @property
    def depth(self) -> int:
        """Depth k of one wgmma: 32 bytes."""
        return 32 // self.element

    @property
    def mma_dtype(self) -> str:
        """Operand type of the MMAs; both 16-bit types run at one rate."""
        return "fp8" if self.fp8 else "bf16"

    @property
    def elements(self) -> float:
        """Score elements per thread and iteration."""
        return self.n / 2

    @property
    def exps(self) -> float:
        """Exponentials per thread and iteration."""
        return self.elements if self.exp else 0.0


def qk(c: Role, cfg: Config) -> None:
    """S = Q K of a block, issued and committed."""
    count = -(-cfg.d // cfg.depth)
    options = dict(a="smem", dtype=cfg.mma_dtype, slots=SLOTS_PER_WGMMA)
    effect = Matmul("S", Smem("Q"), Smem("K"), transposed=True)
    c.mma("QK", m=64, n=cfg.n, k=cfg.depth, count=count, effects=(effect,), **options)


def pv(c: Role, cfg: Config) -> None:
    """O += P V of a block, issued and committed."""
    a, count = "register" if cfg.in_registers else "smem", cfg.n // cfg.depth
    options = dict(a=a, dtype=cfg.mma_dtype, slots=SLOTS_PER_WGMMA)
    p, v = "P" if cfg.in_registers else Smem("P"), Smem("Vt" if cfg.fp8 else "V")
    effect = Matmul("PV", p, v) if cfg.two_level else Matmul("O", p, v, add=True)
    c.mma("PV", m=64, n=cfg.dv, k=cfg.depth, count=count, effects=(effect,), **options)


def row_max(c: Role, cfg: Config, masked: bool) -> None:
    """Maximum of the first of a thread's two rows (of both, where P goes through shared memory), and what it scales.

    The second row's maximum is taken beside the first exponentials.
    """
    if masked:
        # ISETP per FSEL: 0.50 to 0.66 at the end of the keys, 1.1 to 1.5 in what causal kernels execute more (SASS)
        compare = 1.2 if cfg.causal else 0.55
        c.vector("mask", {"fsel": cfg.elements, "alu": compare * cfg.elements}, effects=(Mask("S"),))
    rows, chain = (1, CHAIN_EXPOSED * cfg.elements / 2) if cfg.in_registers else (2, 0.0)
    mix = {"fmnmx": cfg.elements / 2 * rows + 4, "shfl": 4}
    c.vector("row max", mix, latency={"shfl": 2, "alu": 2 + chain})
    scale = {"ffma": 2, "ex2": 2 if cfg.exp else 0, "fmul": 2}
    c.vector("scale", scale, latency={"fma": 1, "ex2": 1}, effects=(RowMax("S"),))


def exponentials(
    c: Role,
    cfg: Config,
    label: str,
    exps: float,
    ffmas: float,
    more: Mix,
    nbytes: int = 0,
    effects: tuple[Effect, ...] = (),
) -> None:
    """Shares of the exponentials and of the FFMAs before them, with other instructions."""
    mix = {"ffma": ffmas * cfg.elements, "ex2": exps * cfg.exps, **more}
    c.vector(label, mix, smem_bytes=nbytes, effects=effects)


def exp_to_p(c: Role, cfg: Config, exps: float, ffmas: float, more: Mix, rescale: bool) -> None:
    """The last part of a softmax, to P and beyond: stmatrix goes out among the exponentials, then a proxy fence.

    All exponentials count as taken here.
    """
    effects: list[Effect] = [Add("O", "PV")] if cfg.two_level and rescale else []
    if rescale:
        effects.append(Rescale("O"))
    effects += [Probabilities("S"), RowSum("S"), Round("S", "P", cfg.formats[0])]
    if cfg.in_registers:
        exponentials(c, cfg, "exp, sum, P", exps, ffmas, more, 0, tuple(effects))
        return
    nbytes = 2 * 64 * cfg.n  # 512 per warp instruction
    stores = {"sts": nbytes / 512 / 4}
    exponentials(c, cfg, "exp, sum, P", exps, ffmas, {**more, **stores}, nbytes, (*effects, Move("P", Smem("P"))))
    c.delay("fence P", FENCE_CYCLES)


def softmax_whole(c: Role, cfg: Config, masked: bool, first: bool) -> None:
    """The whole softmax of a block with no MMA of this warpgroup in flight."""
    row_max(c, cfg, masked)
    rest = {"fmnmx": cfg.elements / 2 * cfg.in_registers, "fadd": cfg.elements, "f2fp": cfg.elements / 2}
    rest["fmul"] = 0.0 if first else 4.0 + cfg.dv / 2
    exp_to_p(c, cfg, 1.0, 1.0, rest, rescale=not first)


def store_output(c: Role, cfg: Config, epilogue: Barrier, staged: Barrier, o: Tensor, o_free: Barrier) -> None:
    """Row sums, 1/l, O to 16 bit, through shared memory and out; the last warpgroup sends it (TMA) or all do.

    Only who sends waits until all have staged their rows. A split's share goes out in FP32 straight from registers.
    """
    c.delay("instruction fetch", FETCH_CYCLES[1], "issue")
    c.vector("row sum", {"shfl": 4, "fadd": 4, "mufu": 4, "fmul": 4}, latency={"shfl": 2, "fma": 2, "ex2": 2})
    converted = 0.0 if cfg.output == "partial" else cfg.dv / 4
    c.vector("scale O", {"fmul": cfg.dv / 2, "f2fp": converted}, latency={"fma": 1}, effects=_output_effects(cfg))
    if cfg.fp8:  # columns back in order: dv/4 SHFL and dv/2 SEL in the SASS of all three
        c.vector("reorder O", {"shfl": cfg.dv / 4, "alu": cfg.dv / 2}, latency={"shfl": 1})
    if cfg.output != "partial":
        c.sync(epilogue, label="epilogue barrier")  # O lands where V was: everyone must be done with V
        mix, effect = {"sts": 2 * 64 * cfg.dv / 512 / 4}, Move("O", Smem("O"))
        c.vector("store O", mix, smem_bytes=2 * 64 * cfg.dv, effects=(effect,))
        c.delay("fence O", FENCE_CYCLES)
        if cfg.output == "tma":
            with c.only(-1, others=True):
                c.arrive(staged, label="O staged")
            with c.only(-1):
                c.sync(staged, label="O complete")
        else:
            c.sync(staged, label="O complete")
    with c.only(-1):
        engine: Literal["tma", "threads"] = "tma" if cfg.output == "tma" else "threads"
        effects = () if cfg.output == "partial" else (Store(Smem("O")),)
        c.copy("store O", o, o.line_bytes, "store", engine, boxes=-(-cfg.dv // 64), effects=effects)
        if cfg.output == "tma":
            c.wait_copies("store", "wait O store")
        c.arrive(o_free, scope="cluster", label="O stored")


def _output_effects(cfg: Config) -> tuple[Effect, ...]:
    """O / l and the log-sum-exp. Each warpgroup stores its own rows of a split's share."""
    effects: tuple[Effect, ...] = (Add("O", "PV"),) if cfg.two_level else ()
    effects += (Normalise("O"),)
    if cfg.output == "partial":
        return (*effects, Store("O", "O.partial"), Store("lse", "O.partial", array="LSE.partial"))
    return (*effects, Round("O", "O", cfg.formats[1]), Store("lse", "O", array="LSE"))
