"""Programs whose scores and output are in registers (Ampere, Hopper): products, softmax, registers per thread."""

from __future__ import annotations

from fasim.kernels.mma_sync import LDSM_BYTES, product
from fasim.kernels.programs import Program, q_tile
from fasim.kernels.softmax import ACCESS_BYTES
from fasim.program.effects import Mask, Matmul, Probabilities, Rescale, Round, RowMax, RowSum
from fasim.program.language import Register, Role, Shape, Smem, Stages, Tile
from fasim.program.ops import add_mixes
from fasim.program.role import MMA_DEPTH_BITS, WGMMA_ROWS
from fasim.program.tiles import FORMAT_BITS

#: Registers per thread that an instruction can name.
MOST_REGISTERS = 255


def live_registers(p: Program) -> float:
    """Registers per thread of scores, P and O."""
    return (1 + FORMAT_BITS[p.format] / 32) * p.scores + p.outputs


def wanted_registers(p: Program) -> float:
    """Registers per thread the code would like: scores, P, O, what is live beside them, copy addresses, fragments."""
    copies = (p.n * (p.d + p.dv) * FORMAT_BITS[p.format] // 8) / (ACCESS_BYTES * p.warps)
    per_live, per_copy = (p.build.cost(name, p.engine) for name in ("per_live_register", "per_copy"))
    return per_live * live_registers(p) + per_copy * copies + p.build.cost("fragments")


def count(p: Program) -> int:
    """Registers per thread that it gets."""
    return min(MOST_REGISTERS, int(wanted_registers(p)))


def spill(c: Role, p: Program) -> None:
    """Registers to local memory, which is the L1's part of shared memory, and back."""
    spilled = max(0.0, wanted_registers(p) - p.build.cost("spill"))
    if spilled:
        nbytes = 2 * 128 * c.warps * spilled
        c.vector("spill", {"sts": spilled, "lds": spilled}, smem_bytes=nbytes, latency={"smem": 1})


def qk(c: Role, p: Program, keys: Stages) -> None:
    """S = Q K^T, complete when the role goes on."""
    into = _accumulator(c, p, "S", p.n)
    if not p.wgmma:
        _mma_sync(c, "QK", q_tile(p), keys.tile, into, transposed=True)
        return
    # Each of the warpgroups that share rows computes all columns, in as many passes.
    into = Tile(into.place, into.shape._replace(rows=into.shape.rows * _sharing(p)))
    with c.phase("QK"):
        _wgmma(c, p, "QK", q_tile(p), keys.tile, into, transposed=True)
    with c.phase("wait QK"):
        c.wait_mma(0, "wait QK")


def pv(c: Role, p: Program, values: Stages) -> None:
    """O += P V; wgmma is left running. Warpgroups that share rows compute a part of the columns each."""
    a = Tile(Register("P"), Shape(p.m, p.n, p.format))
    into = _accumulator(c, p, "O", p.dv)
    if p.wgmma:
        _wgmma(c, p, "PV", a, values.tile, into, transposed=False)
    else:
        _mma_sync(c, "PV", a, values.tile, into, transposed=False)


def _sharing(p: Program) -> int:
    """Warpgroups that share 64 rows."""
    return max(1, p.warps // 4 * WGMMA_ROWS // p.m) if p.wgmma else 1


def _accumulator(c: Role, p: Program, name: str, columns: int) -> Tile:
    """What the MMAs of a role write: as many columns an instruction as are left when warpgroups share rows."""
    rows = p.rows * c.warps // 4 if p.wgmma else p.m
    return Tile(Register(name), Shape(rows, columns // _sharing(p), "fp32"))


def _wgmma(c: Role, p: Program, label: str, a: Tile, b: Tile, into: Tile, transposed: bool) -> None:
    """One product of the role's warpgroups: QK (``transposed``), or PV, which is added."""
    groups = c.warps // 4
    slots = p.build.cost("slots_per_wgmma") / groups
    if live_registers(p) <= MOST_REGISTERS:
        c.gemm(label, a, b, into, transposed=transposed, add=not transposed, slots=slots)
        return
    # Where registers do not suffice, the compiler waits for each instruction before it issues the next.
    one = Tile(into.place, into.shape._replace(rows=WGMMA_ROWS * groups))
    steps = a.shape.columns * FORMAT_BITS[p.format] // MMA_DEPTH_BITS
    for number in range(last := into.shape.rows // one.shape.rows * steps):
        step = number % steps
        c.gemm(
            label, a, b, one, transposed=transposed, add=not transposed, steps=(step, step + 1),
            takes_effect=number == last - 1, slots=slots,
        )  # fmt: skip
        c.wait_mma(0, f"wait {label}")


def _mma_sync(c: Role, label: str, a: Tile, b: Tile, into: Tile, transposed: bool) -> None:
    """HMMA fed by ldmatrix: every warp reads the whole tile of K or V and its own rows of Q."""
    nbytes = c.warps * b.shape.bytes + (a.shape.bytes if isinstance(a.place, Smem) else 0)
    flops = 2.0 * into.shape.rows * into.shape.columns * a.shape.columns
    effects = (Matmul(into.place, a.place, b.place, transposed=transposed, add=not transposed),)
    ldsm = nbytes / LDSM_BYTES / c.warps
    product(c, label, flops, effects, ldsm=ldsm, smem_bytes=nbytes, latency={"smem": 1, "mma_sync": 1})


def online_softmax(c: Role, p: Program, masked: bool) -> None:
    """Mask, maximum, exponentials, sum, P to operands of PV and the rescaling of O, in the compiler's order.

    Half of the maxima come before the first exponential, the rest beside it, so that the two contend.
    """
    if masked:
        c.vector("mask", p.mix("mask"), effects=(Mask("S"),))
    c.vector("row max", p.mix("row_max"), latency={"shfl": 2, "alu": 2, "fma": 1}, effects=(RowMax("S"),))
    c.vector("row max, exp", p.mix("first_exponentials"), latency={"fma": 1})
    rest = add_mixes(p.mix("other_exponentials"), p.convert)
    effects = Rescale("O"), Probabilities("S"), Round("S", "P", p.format)
    c.vector("exp, sum, P, rescale O", rest, latency={"ex2": 1, "fma": 1}, effects=effects)


def row_sum(c: Role, p: Program) -> None:
    """The sum of a row over its four threads, added to the corrected one; beside PV."""
    c.vector("row sum", p.mix("row_sum"), effects=(RowSum("S"),))
