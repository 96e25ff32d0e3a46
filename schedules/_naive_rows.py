"""The kernels of standard attention beside its GEMMs, as PyTorch has them: softmax and element-wise passes.

Instruction counts are per element, by pipe, from hardware counters of PyTorch 2.11 on an H200
(sm__inst_executed_pipe_* x 32 / elements; ``misc``: the rest of smsp__inst_executed).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.problem import Problem
from fasim.program.effects import Effect, Layout, Load, Normalise, Probabilities, Region, Round, RowMax, RowSum, Store
from fasim.program.language import Kernel
from fasim.program.ops import Mix, scale_mix
from fasim.program.tiles import Register

from ._naive_gemm import STEP, TILE_M, keys_of, matrix

#: What L2 hands out at least.
SECTOR_BYTES = 32

#: Bytes of the score matrix in a line, in 16 bit.
LINE_BYTES = 2 * TILE_M * STEP


@dataclass(frozen=True)
class Pass:
    """An element-wise kernel: ``reads`` and ``writes`` are (tensor, bytes of an element, accesses to each line).

    More than one access: neighbouring threads touch different 32-byte sectors, so a line goes through L2 that often.
    """

    name: str
    mix: Mix
    reads: tuple[tuple[str, int, int], ...]
    writes: tuple[tuple[str, int, int], ...]
    registers: int = 32
    threads: int = 128
    effects: tuple[Effect, ...] | None = ()  # on what was read, called x; None: not followed


def slots(active: float, **mix: float) -> Mix:
    """The counted ``mix``, and idle issue slots so that it fills a share ``active`` of them, as counted too.

    These kernels leave 12 to 45 % of the slots empty at full occupancy, the one that transposes 74 %, waiting for
    their own results; what a slot waits for is not modelled.
    """
    return {**mix, "misc": mix["misc"] + sum(mix.values()) * (1 / active - 1)}


#: A copy into another order, and the mask, N x N, added to the scores with batch and heads broadcast: most of it is
#: index arithmetic. FP32: SDPA's mask, and the choice between P and zero for rows without a key.
STRIDED = slots(0.77, alu=22.6, imad=16.8, ldg=1.1, stg=1.1, misc=25.0)
#: The copy that transposes K: a thread reads two bytes of a sector, its neighbour of another.
TRANSPOSE = slots(0.265, alu=18.75, imad=12.75, ldg=1.1, stg=1.1, misc=20.8)
ADD_MASK = slots(0.71, alu=19.25, imad=13.0, ldg=2.2, stg=1.05, misc=21.25)
FP32_MASK = slots(0.60, alu=19.5, imad=11.0, ldg=2.4, stg=1.1, misc=21.5)
WHERE = slots(0.62, alu=22.5, imad=12.0, ldg=3.0, stg=1.5, misc=22.0)
CAST_STRIDED = slots(0.58, alu=15.0, imad=11.0, ldg=1.4, stg=1.4, misc=23.0)
ALL = slots(0.58, alu=7.88, imad=1.25, ldg=0.53, misc=3.0)
#: Vectorised passes wait for memory only.
SCALE: Mix = {"alu": 0.4, "fmul": 1.5, "ldg": 0.3, "stg": 0.3, "misc": 1.1}
IS_INFINITE: Mix = {"alu": 3.12, "imad": 0.62, "ldg": 0.31, "stg": 0.31, "misc": 1.02}
CAST: Mix = {"alu": 0.75, "imad": 0.62, "ldg": 0.25, "stg": 0.25, "misc": 1.01}
#: The mask kernel of three-kernel attention: a vectorised element-wise kernel. Inferred, not counted.
MASK: Mix = {"alu": 3.0, "imad": 1.0, "ldg": 0.25, "stg": 0.25, "misc": 1.0}


@dataclass(frozen=True)
class Softmax:
    """PyTorch's softmax kernels: up to a number of keys a warp takes a row, above a block of 1024 threads."""

    warp: dict[int, Mix]  # longest row -> instructions per element
    block: Mix

    def by_warp(self, keys: int) -> bool:
        """Whether a row of ``keys`` is a warp's."""
        return keys <= max(self.warp)

    def mix(self, keys: int) -> Mix:
        """Instructions per element of the kernel for rows of ``keys``."""
        return next((mix for longest, mix in self.warp.items() if keys <= longest), self.block)


def score_pass(problem: Problem, arch: Arch, spec: Pass, knobs: dict[str, object]) -> Kernel:
    """``spec`` over the whole score matrix; a tensor named ``mask`` is one matrix for all heads."""
    k = Kernel(spec.name, problem, arch, knobs)
    per_head = problem.q_tiles(TILE_M) * problem.kv_tiles(STEP)
    lines: npt.NDArray[np.int64] = np.arange(problem.batch * problem.heads_q * per_head, dtype=np.int64)
    k.tiles = {"line": lines, "mask line": lines % per_head}
    elements = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k / len(lines)
    tensors = {
        name: k.tensor(name, per_head, size * TILE_M * STEP, "mask line")
        if name == "mask"
        else matrix(k, name, "line", size)
        for name, size, _ in spec.reads + spec.writes
    }
    _body(
        k, spec, elements, {name: (tensors[name].name, size * elements) for name, size, _ in spec.reads + spec.writes}
    )
    return k


def operand_pass(
    problem: Problem, arch: Arch, spec: Pass, lines: int, elements: float, layout: Layout, knobs: dict[str, object]
) -> Kernel:
    """``spec`` over Q, K, V or O, in ``lines`` of ``elements``."""
    k = Kernel(spec.name, problem, arch, knobs)
    k.tiles = {"line": np.arange(lines, dtype=np.int64)}
    for name, size, _ in spec.reads + spec.writes:
        k.tensor(name, lines, round(size * elements), "line", layout=replace(layout, share=None))
    _body(k, spec, elements, {name: (name, size * elements) for name, size, _ in spec.reads + spec.writes})
    return k


def _body(k: Kernel, spec: Pass, elements: float, tensors: dict[str, tuple[str, float]]) -> None:
    """A CTA a line: load, compute, store."""
    with k.role("warps", warps=spec.threads // 32, registers=spec.registers) as w, w.tiles():
        for number, (name, _, accesses) in enumerate(spec.reads):
            for access in range(accesses):
                into = (Load("x"),) if number == access == 0 and spec.effects is not None else ()
                w.copy(f"load {name}", k.find_tensor(name), round(tensors[name][1]), "load", "threads", effects=into)
        w.wait_copies("load", "wait loads")
        w.vector(spec.name, scale_mix(spec.mix, elements / spec.threads), effects=spec.effects or ())
        out: tuple[Effect, ...] = (Store("x"),) if spec.effects is not None else ()
        for name, _, accesses in spec.writes:
            for access in range(accesses):
                effects = out if access == 0 else ()
                w.copy(
                    f"store {name}", k.find_tensor(name), round(tensors[name][1]), "store", "threads", effects=effects
                )


def softmax(
    problem: Problem, arch: Arch, source: str, element: int, kind: Softmax, scale: float, knobs: dict[str, object]
) -> Kernel:
    """Rows of ``source`` into P; ``scale`` times the instructions that ``kind`` counts."""
    keys = problem.seqlen_k
    by_warp = kind.by_warp(keys)
    rows = min(max(4 if by_warp else 1, LINE_BYTES // (2 * keys)), 32)  # at most 1024 threads
    k = Kernel("softmax", problem, arch, knobs)
    lines = problem.batch * problem.heads_q * problem.q_tiles(TILE_M) * problem.kv_tiles(STEP)
    ctas = -(-problem.batch * problem.heads_q * problem.seqlen_q // rows)
    first: npt.NDArray[np.int64] = np.arange(ctas, dtype=np.int64) * lines // ctas
    k.tiles = {"line": first}
    copies = max(1, lines // ctas)
    nbytes = element * rows * keys // copies
    layout = _row_layout(problem, rows, copies)
    scores, out = (matrix(k, name, "line", element, layout) for name in (source, "P"))
    parts = [(copy / copies, (copy + 1) / copies) for copy in range(copies)]
    warps = rows if by_warp else 32
    held = keys / 32 if by_warp else keys / 1024  # elements of a row per thread
    registers = round(22 + held + (0 if by_warp else held))  # 30 and 37 of the block kernel at 4 and 8: counters
    sync = arch.sm.sync.syncthreads_base_cycles + 32 * arch.sm.sync.syncthreads_per_warp_cycles
    mix = scale_mix(kind.mix(keys), held * scale)
    levels = 5 if by_warp else 10  # butterfly of a warp, twice for a block
    with k.role("warps", warps=warps, registers=registers) as w, w.tiles():
        for part in parts:
            into = (Load(Register("S", share=part)),)
            w.copy(f"load {source}", scores, nbytes, "load", "threads", effects=into)
        w.wait_copies("load", f"wait {source}")
        last = 1 if by_warp else rows
        for row in range(1, last + 1):  # values: all rows with the last
            steps: tuple[tuple[Effect, ...], ...] = (RowMax("S"),), (Probabilities("S"), RowSum("S")), (Normalise("S"),)
            if element == 2:
                steps = *steps[:2], (*steps[2], Round("S", "S", problem.dtype))
            largest, exps, divided = steps if row == last else ((), (), ())
            for label, share, effects in (("row max", 0.2, largest), ("exp and sum", 0.4, exps)):
                latency = {"shfl": levels, "alu": levels}
                w.vector(label, scale_mix(mix, share), latency=latency, effects=effects)
                if not by_warp:
                    w.delay("syncthreads", 2 * sync, "barrier")
            w.vector("normalise", scale_mix(mix, 0.4), effects=divided)
        for part in parts:
            w.copy("store P", out, nbytes, "store", "threads", effects=(Store(Register("S", share=part)),))
        w.wait_copies("store", "drain")  # a warp exits when its stores have left
    return k


def _row_layout(problem: Problem, rows: int, copies: int) -> Layout:
    """A CTA takes ``rows`` whole rows in ``copies`` parts; the L2 knows lines of other rows, as many."""
    total = problem.batch * problem.heads_q * problem.seqlen_q

    def region(part: int, tile: int) -> Region:
        row = tile * rows + np.arange(rows, dtype=np.int64)
        columns = slice(*(round((part + end) / copies * problem.seqlen_k) for end in (0, 1)))
        return Region(
            np.where(row < total, row, -1), columns, keys_of(problem, int(row[0]) // problem.seqlen_q, columns)
        )

    return Layout(total, problem.seqlen_k, region, order=lambda tile, kind, number: number)
