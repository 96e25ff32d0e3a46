"""The kernels of standard attention beside its GEMMs, as PyTorch has them: softmax of rows and element-wise passes.

The build says what they execute per element, see ``builds/naive``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fasim.arch import Arch
from fasim.kernels.matrices import SCORE_COLUMNS, SCORE_ROWS, Matrix, key_rows, score_matrix
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.effects import (
    ArrayRegion,
    Effect,
    Layout,
    Load,
    Normalise,
    Probabilities,
    Round,
    RowMax,
    RowSum,
    Store,
)
from fasim.program.language import Kernel, Register, Tensor
from fasim.program.ops import Mix, add_mixes, scale_mix


class Access(NamedTuple):
    """A tensor, bytes of an element, and how often a line goes through L2.

    More than once where neighbouring threads touch different 32-byte sectors.
    """

    tensor: str
    element: int
    times: int = 1


@dataclass(frozen=True)
class SoftmaxCode:
    """Instructions per score, and whether a warp takes a row; else a block of 1024 threads does."""

    mix: Mix
    by_warp: bool


def per_element(build: Build, code: str) -> Mix:
    """Instructions per element of ``code``, and idle issue slots so that it fills the share that was counted.

    What these kernels wait for at full occupancy, mostly their own results, is not modelled.
    """
    mix, active = build.mix("per_element", code), build.row("active", code=code)["share"]
    return {**mix, "misc": mix["misc"] + sum(mix.values()) * (1 / active - 1)}


def softmax_code(problem: Problem, build: Build, fp32: bool) -> SoftmaxCode:
    """The softmax kernel that PyTorch takes for rows of the problem's length; masked scores cost on top."""
    keys, kind = problem.seqlen_k, "fp32" if fp32 else "16 bit"
    by_warp = keys <= build.cost("longest_warp_row", kind)
    if by_warp:
        mix = per_element(build, "softmax, warp" if keys <= 1024 else "softmax, long warp")
    else:
        counted = per_element(build, f"softmax, block {'fp16' if fp32 else problem.dtype}")
        mix = scale_mix(counted, build.cost("softmax_block_share", kind))
    return SoftmaxCode(add_mixes(mix, build.mix("under_mask")) if problem.causal else mix, by_warp)


@dataclass(frozen=True)
class RowKernels:
    """Records them for a problem."""

    problem: Problem
    arch: Arch
    build: Build
    knobs: Mapping[str, object]

    def element_wise(
        self,
        name: str,
        code: str,
        matrix: Matrix,
        reads: Sequence[Access],
        write: Access | None,
        effects: tuple[Effect, ...] | None = (),
    ) -> Kernel:
        """``matrix`` line by line, one CTA each, by the instructions that the build calls ``code``.

        A tensor named ``mask`` is one matrix for all heads. ``effects``: on what was read first, called x; None: values
        are not followed.
        """
        k, writes = Kernel(name, self.problem, self.arch, dict(self.knobs)), (write,) if write else ()
        k.tiles = {"line": np.arange(matrix.lines, dtype=np.int64)}
        per_head, full = matrix.row_blocks * matrix.column_blocks, matrix.line_rows * matrix.line_columns
        step = 1 if matrix.scores else 0
        if matrix.scores:
            k.tiles["mask line"] = k.tiles["line"] % per_head
        tensors: dict[str, Tensor] = {}
        for tensor, size, _ in (*reads, *writes):
            lines, start, by = (per_head, "mask line", 0) if tensor == "mask" else (matrix.lines, "line", step)
            nbytes = size * full if matrix.scores else round(size * matrix.line_elements)
            tensors[tensor] = k.tensor(tensor, lines, nbytes, start, by, matrix.layout())
        registers = int(self.build.row("registers", code=code)["registers"])
        mix = scale_mix(per_element(self.build, code), matrix.line_elements / 128)
        followed = effects is not None
        with k.role("warps", warps=4, registers=registers) as w, w.tiles():
            for number, (tensor, size, times) in enumerate(reads):
                nbytes = round(size * matrix.line_elements)
                for time in range(times):
                    into = (Load("x"),) if followed and number == time == 0 else ()
                    w.copy(f"load {tensor}", tensors[tensor], nbytes, "load", "threads", effects=into)
            w.wait_copies("load", "wait loads")
            w.vector(name, mix, effects=effects or ())
            for tensor, size, _ in writes:
                nbytes, out = round(size * matrix.line_elements), (Store("x"),) if followed else ()
                w.copy(f"store {tensor}", tensors[tensor], nbytes, "store", "threads", effects=out)
        return k

    def softmax(self, source: str, element: int, code: SoftmaxCode, scale: float = 1.0) -> Kernel:
        """Rows of ``source`` into P, ``element`` bytes each; ``scale`` times the instructions of ``code``."""
        problem, sync = self.problem, self.arch.sm.sync
        keys, by_warp = problem.seqlen_k, code.by_warp
        matrix = score_matrix(problem)
        in_line = SCORE_ROWS * SCORE_COLUMNS // keys
        rows = min(max(4 if by_warp else 1, in_line), 32)  # at most 1024 threads
        ctas = -(-problem.batch * problem.heads_q * problem.seqlen_q // rows)
        copies = max(1, matrix.lines // ctas)
        k = Kernel("softmax", problem, self.arch, dict(self.knobs))
        k.tiles = {"line": np.arange(ctas, dtype=np.int64) * matrix.lines // ctas}
        line_bytes, layout = element * SCORE_ROWS * SCORE_COLUMNS, _row_layout(problem, rows, copies)
        scores, out = (k.tensor(name, matrix.lines, line_bytes, "line", 1, layout) for name in (source, "P"))
        nbytes = element * rows * keys // copies
        parts = [Register("S", share=(copy / copies, (copy + 1) / copies)) for copy in range(copies)]
        held = keys / 32 if by_warp else keys / 1024  # elements of a row per thread
        registers = round(self.build.cost("softmax_registers") + held + (0 if by_warp else held))
        mix = scale_mix(code.mix, held * scale)
        levels = 5 if by_warp else 10  # butterfly of a warp, twice for a block
        syncthreads = 2 * (sync.syncthreads_base_cycles + 32 * sync.syncthreads_per_warp_cycles)
        steps: tuple[tuple[str, tuple[Effect, ...]], ...] = (
            ("row max", (RowMax("S"),)),
            ("exp and sum", (Probabilities("S"), RowSum("S"))),
            ("normalise", (Normalise("S"), Round("S", "S", problem.dtype)) if element == 2 else (Normalise("S"),)),
        )
        with k.role("warps", warps=rows if by_warp else 32, registers=registers) as w, w.tiles():
            for part in parts:
                w.copy(f"load {source}", scores, nbytes, "load", "threads", effects=(Load(part),))
            w.wait_copies("load", f"wait {source}")
            passes = 1 if by_warp else rows
            for row in range(passes):
                for label, effects in steps:
                    reduces = label != "normalise"
                    w.vector(
                        label,
                        scale_mix(mix, self.build.cost("softmax_shares", label)),
                        latency={"shfl": levels, "alu": levels} if reduces else None,
                        effects=effects if row == passes - 1 else (),  # values: all rows with the last
                    )
                    if reduces and not by_warp:
                        w.delay("syncthreads", syncthreads, "barrier")
            for part in parts:
                w.copy("store P", out, nbytes, "store", "threads", effects=(Store(part),))
            w.wait_copies("store", "drain")  # a warp exits when its stores have left
        return k


def _row_layout(problem: Problem, rows: int, copies: int) -> Layout:
    """A CTA takes ``rows`` whole rows in ``copies`` parts; the L2 knows lines of other rows, as many."""
    total = problem.batch * problem.heads_q * problem.seqlen_q

    def region(part: int, tile: int) -> ArrayRegion:
        row = tile * rows + np.arange(rows, dtype=np.int64)
        columns = slice(*(round((part + end) / copies * problem.seqlen_k) for end in (0, 1)))
        keys = key_rows(problem, int(row[0]) // problem.seqlen_q, columns)
        return ArrayRegion(np.where(row < total, row, -1), columns, keys)

    return Layout(total, problem.seqlen_k, region, order=lambda tile, kind, number: number)
