"""What a consumer warpgroup of FlashAttention-3 does: the two GEMMs, the softmax in the compiler's order, the epilogue.

Sources: as in fa3.py; order and counts from the disassembly of that build, costs from its stall samples and counters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fasim.program.effects import (
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
    Store,
)
from fasim.program.language import Barrier, Role, Tensor
from fasim.program.ops import Mix
from fasim.program.tiles import Smem

from ._fa3_order import FP8, OVERLAPPED, P_IN_SMEM, SERIAL, Order

#: FMUL between the first two wgmma of QK where O is rescaled before PV: 74 to 90 in the SASS of FA3 and FA4, d192 and
#: d256.
FMUL_BEHIND_FIRST = 80.0

#: Cycles until P has reached shared memory, by FENCE and the wait after it: a build without takes 101 less an iteration
#: (h200_fa3_parts.csv, three warpgroups at d64). Stall samples have 209: warps also wait for their stores there, which
#: go out among the exponentials here.
FENCE_P_CYCLES = 100.0

#: The same for O, whose stores come right before it: stall samples on an H200, 209 (d64) and 216 (d128).
FENCE_O_CYCLES = 209.0

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

#: What tiles drawn from a counter (causal kernels) take more: the same stamps.
DRAW_CYCLES = {"16 bit": 233.0, "fp8": 315.0}

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


def qk(c: Role, cfg: Config, *, rescale: bool = False) -> None:
    """S = Q K of a block, issued and committed; ``rescale``: O is rescaled for the PV that follows.

    The compiler puts those FMUL between the first wgmma: 74 to 90 behind the first, the others behind the second.
    """
    count = -(-cfg.d // cfg.depth)
    early = min(FMUL_BEHIND_FIRST, cfg.dv / 2) if rescale else 0.0
    options = dict(m=64, n=cfg.n, k=cfg.depth, a="smem", dtype=cfg.mma_dtype, slots=SLOTS_PER_WGMMA)
    if rescale:
        c.mma("QK", count=1, **options)
        c.vector("rescale O", {"fmul": early}, effects=(Rescale("O"),))
        count -= 1
    if rescale and early < cfg.dv / 2:
        c.mma("QK", count=1, **options)
        c.vector("rescale O", {"fmul": cfg.dv / 2 - early})
        count -= 1
    c.mma("QK", count=count, effects=(Matmul("S", Smem("Q"), Smem("K"), transposed=True),), **options)


def pv(c: Role, cfg: Config) -> None:
    """O += P V of a block, issued and committed."""
    a, count = "register" if cfg.in_registers else "smem", cfg.n // cfg.depth
    options = dict(a=a, dtype=cfg.mma_dtype, slots=SLOTS_PER_WGMMA)
    p, v = "P" if cfg.in_registers else Smem("P"), Smem("Vt" if cfg.fp8 else "V")
    effect = Matmul("PV", p, v) if cfg.two_level else Matmul("O", p, v, add=True)
    c.mma("PV", m=64, n=cfg.dv, k=cfg.depth, count=count, effects=(effect,), **options)


def order(cfg: Config, overlap: bool = True) -> Order:
    """The compiler's order of a kernel's softmax; the next larger head dimension stands for those not counted."""
    if not overlap:
        table = SERIAL
    elif cfg.fp8:
        table = FP8
    else:
        table = OVERLAPPED if cfg.in_registers else P_IN_SMEM
    width = max(cfg.d, cfg.dv)
    return table[min((head for head in table if head >= width), default=max(table))]


def softmax(
    c: Role, cfg: Config, order: Order, masked: bool, *, first: bool = False, between: Callable[[], None] | None = None
) -> None:
    """From S to P, in the compiler's order; ``between`` is what stands at the wait for PV, if there is one."""
    e = cfg.elements
    if masked:
        # ISETP per FSEL: 0.50 to 0.66 at the end of the keys, 1.1 to 1.5 in what causal kernels execute more (SASS)
        compare = 1.2 if cfg.causal else 0.55
        c.vector("mask", {"fsel": e, "alu": compare * e}, effects=(Mask("S"),))
    row_max(c, cfg, order)
    scale = {"ffma": 2, "ex2": 2 if cfg.exp else 0, "fmul": 4}
    exp_to_p(c, cfg, order, scale, rescale=not (first or cfg.rescale_early), between=between)


def row_max(c: Role, cfg: Config, order: Order) -> None:
    """The maxima that come first, with those of the neighbours in a quad. That of one row is a chain of FMNMX."""
    chain = cfg.elements / 2 if order.rows == 1 else 0.0
    mix = {"fmnmx": cfg.elements / 2 * order.rows + 4, "shfl": 4}
    c.vector("row max", mix, latency={"shfl": 2, "alu": 2, "fma": 2}, chain=chain, effects=(RowMax("S"),))


def exp_to_p(
    c: Role, cfg: Config, order: Order, scale: Mix, rescale: bool, between: Callable[[], None] | None = None
) -> None:
    """Exponentials, sums and P in the stretches of ``order``; ``scale`` is what the new maxima ask for, in the first.

    P goes through shared memory among the last exponentials, then a proxy fence. All exponentials count as taken there.
    """
    e = cfg.elements
    total = {"fmnmx": e / 2 * (2 - order.rows), "ffma": e, "ex2": cfg.exps, "f2fp": e / 2}
    total |= {"fadd": e + cfg.dv / 2 * cfg.two_level, "fmul": cfg.dv / 2 * rescale}
    on_o: tuple[Effect, ...] = (Add("O", "PV"),) if cfg.two_level and rescale else ()
    on_o += (Rescale("O"),) if rescale else ()
    left, more = dict(total), scale
    for stretches, late in ((order.early, False), (order.late, True)):
        if late and between is not None:
            between()
        for stretch in stretches:
            part = {name: getattr(stretch, name) * count for name, count in total.items()}
            left = {name: left[name] - part[name] for name in left}
            c.vector(stretch.label, _sum(part, more), effects=on_o if late else ())
            more, on_o = {}, () if late else on_o
    effects = (*on_o, Probabilities("S"), RowSum("S"), Round("S", "P", cfg.formats[0]))
    if cfg.in_registers:
        c.vector("exp, sum, P", _sum(left, more), effects=effects)
        return
    nbytes = 2 * 64 * cfg.n  # 512 per warp instruction
    mix = {**_sum(left, more), "sts": nbytes / 512 / 4}
    c.vector("exp, sum, P", mix, smem_bytes=nbytes, effects=(*effects, Move("P", Smem("P"))))
    c.delay("fence P", FENCE_P_CYCLES)


def _sum(one: Mix, other: Mix) -> Mix:
    """Both mixes in one, without what rounding leaves of zero."""
    both = {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}
    return {name: count for name, count in both.items() if count > 1e-9}


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
        c.delay("fence O", FENCE_O_CYCLES)
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
