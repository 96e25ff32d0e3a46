"""Programs whose scores, P and output are in tensor memory (Blackwell): products, softmax, rescaling of O."""

from __future__ import annotations

from fasim.kernels.programs import Program, q_tile
from fasim.program.effects import Effect, Mask, Move, Probabilities, Rescale, Round, RowMax, RowSum
from fasim.program.language import Barrier, Kernel, Role, Shape, Stages, Tile, Tmem, committed, waited
from fasim.program.ops import add_mixes
from fasim.program.role import TCGEN05_ROWS


def allocate(k: Kernel, p: Program, buffers: int) -> None:
    """Columns for ``buffers`` S of FP32, P and O, allocated as a power of two."""
    halves = max(1, p.m // TCGEN05_ROWS)
    s = k.region("S", 0, halves * p.n, buffers)
    operand = k.region("P", s.stages * s.columns, halves * p.n * p.problem.bits // 32)
    o = k.region("O", operand.first + operand.columns, halves * p.dv)
    k.tmem_columns = 1 << (o.first + o.columns - 1).bit_length()


def qk(c: Role, p: Program, keys: Stages, done: Barrier) -> None:
    """Issue S = Q K^T into the buffer of S whose completion it commits next."""
    into = Tile(Tmem("S", after=committed(done), back=-1), _accumulator(p, p.n))
    c.gemm("QK", q_tile(p), keys, into, transposed=True, done=done)


def pv(c: Role, p: Program, values: Stages, done: Barrier) -> None:
    """Issue O += P V."""
    a = Tile(Tmem("P"), Shape(p.m, p.n, p.format))
    c.gemm("PV", a, values, Tile(Tmem("O"), _accumulator(p, p.dv)), add=True, done=done)


def _accumulator(p: Program, columns: int) -> Shape:
    """An MMA has 128 rows; a tile of 64 takes as long, and half of the datapath idles."""
    return Shape(max(p.m, TCGEN05_ROWS), columns, "fp32")


def row_max(c: Role, p: Program, masked: bool, done: Barrier, *more: Effect) -> None:
    """S from tensor memory, mask and maximum, then ``more`` effects. ``done``: the barrier that QK completes at."""
    load = (Move(Tmem("S", after=waited(done)), "S"),)
    nbytes = 4 * p.m * p.n
    c.vector("load S", p.mix("tensor_memory"), tmem_load_bytes=nbytes, latency={"tmem": 1}, effects=load)
    if masked:
        c.vector("mask", p.mix("mask"), effects=(Mask("S"),))
    c.vector("row max", p.mix("row_max"), latency={"alu": 4, "fma": 1}, effects=(RowMax("S"), *more))


def probabilities(c: Role, p: Program) -> None:
    """Exponentials, their sum, and P as the format of the operand."""
    effects = Probabilities("S"), RowSum("S"), Round("S", "P", p.format)
    mix = add_mixes(p.mix("exponentials"), p.convert)
    c.vector("exp, sum, P", mix, latency={"ex2": 1, "fma": 1}, effects=effects)


def store_p(c: Role, p: Program) -> None:
    """P to tensor memory."""
    nbytes = p.problem.bits // 8 * p.m * p.n
    c.vector("store P", p.mix("tensor_memory"), tmem_store_bytes=nbytes, effects=(Move("P", Tmem("P")),))


def rescale(c: Role, p: Program) -> None:
    """O out of tensor memory, times exp2(old maximum - new), and back."""
    nbytes = 4 * p.m * p.dv
    c.vector("load O", p.mix("tensor_memory"), tmem_load_bytes=nbytes, latency={"tmem": 1})
    c.vector("rescale O", p.mix("rescale"), tmem_store_bytes=nbytes, effects=(Rescale(Tmem("O")),))


def load_output(c: Role, p: Program) -> None:
    """O out of tensor memory."""
    nbytes, effects = 4 * p.m * p.dv, (Move(Tmem("O"), "O"),)
    c.vector("load O", p.mix("tensor_memory"), tmem_load_bytes=nbytes, latency={"tmem": 1}, effects=effects)
