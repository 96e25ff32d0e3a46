"""The online softmax of a wgmma warpgroup, in the order in which the compiler put it.

A warp issues in order, so what stands together contends together. A build's loop says which shares of each instruction
class stand in which run of the stream, and where among them the wait for PV stands (``fasim.program.builds.Loop``).
Per thread a block has E = tile_n / 2 scores in two rows: E FFMA, EX2 and FADD, E/2 F2FP, and E FMNMX for the maxima.
"""

from __future__ import annotations

from collections.abc import Callable

from fasim.kernels.forward import Forward
from fasim.program.builds import CompiledLoop
from fasim.program.effects import Add, Effect, Move, Probabilities, Rescale, Round, RowMax, RowSum
from fasim.program.language import Role, Smem
from fasim.program.ops import Mix

#: The mark in a build's loops at which the compiler waits for PV.
WAIT_PV = "wait PV"

#: Bytes that a warp moves through shared memory in one instruction.
ACCESS_BYTES = 512


def row_max(c: Role, f: Forward, order: CompiledLoop) -> None:
    """The maxima that come first, with those of the neighbours in a quad. That of one row is a chain of FMNMX."""
    rows = order.rows_first
    chain = f.scores / 2 if rows == 1 else 0.0
    mix: Mix = {"fmnmx": f.scores / 2 * rows + 4, "shfl": 4}
    c.vector("row max", mix, latency={"shfl": 2, "alu": 2, "fma": 2}, chain=chain, effects=(RowMax("S"),))


def probabilities(
    c: Role, f: Forward, order: CompiledLoop, rescale: bool, at_wait_pv: Callable[[], None] | None = None
) -> None:
    """Exponentials, sums and P in the runs of ``order``; ``at_wait_pv`` records what stands at that mark.

    ``rescale``: O is rescaled in here, behind the mark. P goes through shared memory among the last exponentials, then
    a proxy fence. On values, all exponentials are taken in the last run.
    """
    e = f.scores
    exps = e if f.exp else 0.0
    total: Mix = {"fmnmx": e / 2 * (2 - order.rows_first), "ffma": e, "ex2": exps, "f2fp": e / 2}
    total = {**total, "fadd": e + f.dv / 2 * f.two_level, "fmul": f.dv / 2 * rescale}
    on_o: tuple[Effect, ...] = (Add("O", "PV"),) if f.two_level and rescale else ()
    on_o += (Rescale("O"),) if rescale else ()
    scale = f.build.mix("scale")  # what the new maxima ask for
    left, more = dict(total), scale if f.exp else {**scale, "ex2": 0.0}
    before, after = order.split(WAIT_PV)
    for runs, behind in ((before, False), (after, True)):
        if behind and at_wait_pv is not None:
            at_wait_pv()
        for run in runs:
            part = {name: run.shares.get(name, 0.0) * count for name, count in total.items()}
            left = {name: left[name] - part[name] for name in left}
            c.vector(run.label, _sum(part, more), effects=on_o if behind else ())
            more, on_o = {}, () if behind else on_o
    effects = (*on_o, Probabilities("S"), RowSum("S"), Round("S", "P", f.format))
    if f.p_in_registers:
        c.vector("exp, sum, P", _sum(left, more), effects=effects)
        return
    nbytes = 2 * 64 * f.n
    mix: Mix = {**_sum(left, more), "sts": nbytes / ACCESS_BYTES / 4}
    c.vector("exp, sum, P", mix, smem_bytes=nbytes, effects=(*effects, Move("P", Smem("P"))))
    c.delay("fence P", f.build.cost("fence_p"))


def _sum(one: Mix, other: Mix) -> Mix:
    """Both mixes in one, without what rounding leaves of zero."""
    both = {name: one.get(name, 0.0) + other.get(name, 0.0) for name in (*one, *(x for x in other if x not in one))}
    return {name: count for name, count in both.items() if count > 1e-9}
