"""What operations do to values: a short vocabulary in attention's words, executed by :mod:`fasim.checker`.

An operation may carry effects; a schedule whose operations do computes attention on NumPy arrays while it is timed
(``fasim check``, docs/values.md). Effects say *what* is read and written *where*; they take no time.

Where data is: a plain name is a register tile of the role instance; other places are in
:mod:`fasim.program.tiles`. Arrays are matrices: S and P ``(rows, keys)``, O ``(rows, dv)``, row maximum, sum and
correction ``(rows, 1)``. An instance of a role holds its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from fasim.numerics.exp2 import MUFU, Exp2
from fasim.program.tiles import Operand

IntArray = npt.NDArray[np.int64]


# --- global memory ------------------------------------------------------------------------------------------------
class ArrayRegion(NamedTuple):
    """Rows (-1: outside the tensor, read as zero) and columns of a global array.

    ``keys``: in a matrix of scores, the rows of K that these columns stand for.
    """

    rows: IntArray
    columns: slice = slice(None)
    keys: IntArray | None = None


@dataclass(frozen=True)
class Layout:
    """What the memory lines of a tensor hold.

    ``region(line, tile)`` is the part of the array ``array`` (None: called like the tensor) with ``rows`` x ``columns``
    elements in line ``line``, when work tile ``tile`` asks. Rows of Q and O are numbered (batch, head, token), those of
    K and V likewise. ``share(line)``: the part (from, to) of a buffer's stage that a copy of the line fills, or where
    in a wider source the columns begin that it stores. Where one line of the model's L2 stands for many, ``order(tile,
    kind, number)`` is the line that copy ``number`` of a work tile means; loads and stores (``kind``) count apart.
    """

    rows: int
    columns: int
    region: Callable[[int, int], ArrayRegion]
    array: str | None = None
    share: Callable[[int], tuple[float, float]] | None = None
    order: Callable[[int, str, int], int] | None = None


def row_blocks(heads: int, length: int, rows: int, columns: int) -> Layout:
    """Layout of ``heads`` x blocks of ``rows`` rows, a line each; the last block of a head may be short."""
    blocks = -(-length // rows)

    def region(line: int, tile: int) -> ArrayRegion:
        head, block = divmod(line, blocks)
        row = block * rows + np.arange(rows, dtype=np.int64)
        return ArrayRegion(np.where(row < length, head * length + row, -1))

    return Layout(heads * length, columns, region)


# --- effects ------------------------------------------------------------------------------------------------------
class Effect:
    """Base. ``reads`` and ``writes`` name the fields that are operands, ``whole`` those that are not cut by rows."""

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Load(Effect):
    """A copy's line lands in ``into``. ``array``: the same rows of another array (the log-sum-exp beside O)."""

    into: Operand
    array: str | None = None
    writes = ("into",)
    whole = ("into",)


@dataclass(frozen=True)
class Store(Effect):
    """``source`` goes to global memory.

    To the line of the copy that carries the effect; or, named ``tensor``, to line number ``line`` of those that the
    work tile has of it. ``array``: another array with the same rows (the log-sum-exp beside O).
    """

    source: Operand
    tensor: str | None = None
    array: str | None = None
    line: int = 0
    reads = ("source",)


@dataclass(frozen=True)
class Fetch(Effect):
    """``into`` = columns from ``lines`` lines of ``tensor``, of the array ``array`` with the same rows."""

    into: Operand
    tensor: str
    lines: int = 1
    array: str | None = None
    writes = ("into",)


@dataclass(frozen=True)
class Move(Effect):
    """``into`` = ``source``."""

    source: Operand
    into: Operand
    reads = ("source",)
    writes = ("into",)


@dataclass(frozen=True)
class Round(Effect):
    """``into`` = ``source`` rounded to ``format`` (``numerics.OPERAND_FORMATS``).

    Probabilities that are not divided by their sum yet get the format's fixed scale (``round_probabilities``).
    """

    source: Operand
    into: Operand
    format: str
    reads = ("source",)
    writes = ("into",)


@dataclass(frozen=True)
class Matmul(Effect):
    """``into`` = ``a`` x ``b``, or ``a`` x ``b`` transposed; added with ``add``.

    What accumulates starts anew with every work tile: the first product overwrites. A ``share`` of ``a`` in tensor
    memory takes the same share of the rows of ``b``.
    """

    into: Operand
    a: Operand
    b: Operand
    transposed: bool = False
    add: bool = False
    reads = ("a", "b")
    writes = ("into",)
    whole = ("b",)


@dataclass(frozen=True)
class Add(Effect):
    """``into`` += ``source``; the first of a work tile overwrites."""

    into: Operand
    source: Operand
    reads = ("source",)
    writes = ("into",)


@dataclass(frozen=True)
class Mask(Effect):
    """Scores of keys that do not exist, or that a causal mask hides, become -inf."""

    scores: Operand = "S"
    reads = ("scores",)
    writes = ("scores",)


@dataclass(frozen=True)
class RowMax(Effect):
    """``into`` becomes the running maximum over ``scores``, ``scale`` the factor that corrects what refers to the old.

    ``threshold`` in powers of two: see ``numerics.update_max``. Starts anew with every work tile.
    """

    scores: Operand = "S"
    into: Operand = "m"
    scale: Operand = "alpha"
    threshold: float = 0.0
    reads = ("scores",)
    writes = ("into", "scale")


@dataclass(frozen=True)
class Probabilities(Effect):
    """``into`` = 2^(scale log2(e) (``scores`` - ``row_max``)), by ``method``."""

    scores: Operand = "S"
    into: Operand = "S"
    row_max: Operand = "m"
    method: Exp2 = MUFU
    reads = ("scores", "row_max")
    writes = ("into",)


@dataclass(frozen=True)
class RowSum(Effect):
    """``into`` = ``into`` x ``scale`` + sum over ``p``. Starts anew with every work tile."""

    p: Operand = "S"
    into: Operand = "l"
    scale: Operand = "alpha"
    reads = ("p", "scale")
    writes = ("into",)


@dataclass(frozen=True)
class Rescale(Effect):
    """``target`` x= ``scale``; nothing where ``target`` has not begun in this work tile."""

    target: Operand = "O"
    scale: Operand = "alpha"
    reads = ("scale",)
    writes = ("target",)


@dataclass(frozen=True)
class Normalise(Effect):
    """``target`` /= ``row_sum``, and ``lse`` = log-sum-exp (natural). Rows that saw no key: 0 and -inf."""

    target: Operand = "O"
    row_sum: Operand = "l"
    row_max: Operand = "m"
    lse: Operand = "lse"
    reads = ("target", "row_sum", "row_max")
    writes = ("target", "lse")


@dataclass(frozen=True)
class Clear(Effect):
    """``place`` holds nothing: what accumulates there starts anew, inside a work tile as well."""

    place: Operand
    writes = ("place",)


@dataclass(frozen=True)
class Resume(Effect):
    """An online softmax goes on after keys of which only ``lse`` is known: they count as one of that score."""

    lse: Operand = "lse"
    row_max: Operand = "m"
    row_sum: Operand = "l"
    reads = ("lse",)
    writes = ("row_max", "row_sum")


@dataclass(frozen=True)
class ResumeOutput(Effect):
    """``target``, the divided output of keys whose log-sum-exp is ``lse``, counts as a sum again (:class:`Resume`)."""

    target: Operand = "O"
    lse: Operand = "lse"
    reads = ("target", "lse")
    writes = ("target",)


@dataclass(frozen=True)
class Syncthreads(Effect):
    """A barrier of the warps of the role (``__syncthreads``).

    A role that has one is looked at warp by warp: what a warp knows of its own work, the copies of its own threads and
    the MMAs that it waited for, the other warps know only from here on. A place in shared memory that is cut by rows is
    the warp's own; a whole one (``b`` of a product, copies, ``share=(0, 1)``) is everybody's.
    """


@dataclass(frozen=True)
class SplitWeights(Effect):
    """``into`` = exp(``lses`` - ``lse``), ``lse`` their log-sum-exp: shares ``(rows, splits)`` of the output."""

    lses: Operand = "lses"
    into: Operand = "weights"
    lse: Operand = "lse"
    reads = ("lses",)
    writes = ("into", "lse")


@dataclass(frozen=True)
class AddSplit(Effect):
    """``into`` += ``source`` x the next column of ``weights``; a split of weight 0 is skipped, whatever it holds."""

    source: Operand
    into: Operand = "O"
    weights: Operand = "weights"
    reads = ("source", "weights")
    writes = ("into",)
