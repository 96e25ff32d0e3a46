"""Matrices in global memory, cut into lines as the GEMMs of standard attention take them.

A line is what one copy moves. All kernels of standard attention see the score matrix in the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasim.problem import Problem
from fasim.problem.masks import IntArray
from fasim.program.effects import ArrayRegion, Layout

#: Rows and columns of the score matrix in a line.
SCORE_ROWS, SCORE_COLUMNS = 128, 32


@dataclass(frozen=True)
class Matrix:
    """``heads`` matrices of ``rows`` x ``columns`` elements, in lines of ``line_rows`` x ``line_columns``.

    Lines are numbered by head, group of ``beside`` row blocks, column block, and row block of the group: with 1 row by
    row, with all of them column by column. The last line of a column is filled up with zeros, or short if not
    ``padded``. ``scores``: the columns are keys of this problem. ``array``: what of the problem it is.
    """

    heads: int
    rows: int
    columns: int
    line_rows: int
    line_columns: int
    beside: int = 1
    padded: bool = True
    array: str | None = None
    scores: Problem | None = None

    @property
    def row_blocks(self) -> int:
        """Lines of a head below each other."""
        return -(-self.rows // (self.line_rows * self.beside)) * self.beside

    @property
    def column_blocks(self) -> int:
        """Lines of a head side by side."""
        return -(-self.columns // self.line_columns)

    @property
    def lines(self) -> int:
        """Lines of all heads."""
        return self.heads * self.row_blocks * self.column_blocks

    @property
    def line_elements(self) -> float:
        """Elements of a line, on average where the last ones are short."""
        return self.heads * self.rows * self.columns / self.lines

    def line(self, head: IntArray, row: IntArray, column: IntArray | int = 0) -> IntArray:
        """Number of the line with row block ``row`` and column block ``column`` of a head."""
        block = head * self.row_blocks + row
        return (block // self.beside * self.column_blocks + column) * self.beside + block % self.beside

    def layout(self, stage: tuple[int, int] | None = None) -> Layout:
        """What lines hold. ``stage``: rows and columns that several lines fill together, if they do."""

        def blocks(line: int) -> tuple[int, int, int]:
            line, number = divmod(line, self.beside)
            group, column = divmod(line, self.column_blocks)
            return *divmod(group * self.beside + number, self.row_blocks), column

        def region(line: int, tile: int) -> ArrayRegion:
            head, row, column = blocks(line)
            token = row * self.line_rows + np.arange(self.line_rows, dtype=np.int64)
            inside = token < self.rows
            rows = np.where(inside, head * self.rows + token, -1)
            wide = slice(column * self.line_columns, min((column + 1) * self.line_columns, self.columns))
            keys = key_rows(self.scores, head, wide) if self.scores else None
            return ArrayRegion(rows if self.padded else rows[inside], wide, keys)

        def share(line: int) -> tuple[float, float]:
            _, row, column = blocks(line)
            below, side = (stage[0] // self.line_rows, stage[1] // self.line_columns) if stage else (1, 1)
            number, of = (row % below, below) if below > 1 else (column % side, side) if side > 1 else (0, 1)
            return number / of, (number + 1) / of

        return Layout(self.heads * self.rows, self.columns, region, self.array, share if stage else None)


def score_matrix(problem: Problem) -> Matrix:
    """S and P: two row blocks beside each other where there is an even number, since tiles of 256 rows take both."""
    beside = 2 - problem.q_tiles(SCORE_ROWS) % 2
    heads = problem.batch * problem.heads_q
    return Matrix(heads, problem.seqlen_q, problem.seqlen_k, SCORE_ROWS, SCORE_COLUMNS, beside=beside, scores=problem)


def key_rows(problem: Problem, head: int, columns: slice) -> IntArray:
    """The rows of K that columns of the score matrix of a query head stand for."""
    return head // problem.group * problem.seqlen_k + np.arange(columns.start, columns.stop, dtype=np.int64)
