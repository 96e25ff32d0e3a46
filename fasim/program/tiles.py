"""Operands: tiles with a shape, a number format and a place.

A place is a register tile of the role instance, a stage of a shared-memory buffer, or a stage of a region of tensor
memory. Which stage is derived: it is the one that the role itself selected last, by waiting for a barrier, arriving at
it, or starting a copy (:class:`Cursor`). Nothing here takes time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

#: Bits of an element by number format. TF32 is stored as FP32; ``byte`` is for buffers whose content has no meaning.
FORMAT_BITS = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "e4m3": 8, "byte": 8, "nvfp4": 4}

#: Number format of an operand -> the data type whose tensor rate it has.
TENSOR_DTYPE = {"e4m3": "fp8", "nvfp4": "fp4"}

#: A TMA box is 128 bytes wide: with the 128-byte swizzle, wider rows take several boxes.
BOX_BYTES = 128

Share = tuple[float, float]
WHOLE: Share = (0.0, 1.0)


def operand_format(dtype: str) -> str:
    """The number format of operands of a problem's ``dtype`` ("fp8" is E4M3, "fp4" is NVFP4)."""
    return {"fp8": "e4m3", "fp4": "nvfp4"}.get(dtype, dtype)


class Cursor(NamedTuple):
    """What a role counts, once per execution: its waits or arrivals at a barrier, copies and commits that arrive there.

    ``of`` names the barrier ("turn@own" for one of a per-instance barrier), or the label of copies without a barrier;
    ``part`` tells copies apart that fill one stage together. The count selects the barrier's stage and phase.
    """

    action: Literal["wait", "arrive", "copy", "commit"]
    of: str
    part: int = 0


@dataclass(frozen=True)
class Place:
    """A named place.

    Its stage is ``stage`` if given, else the one that ``after`` selected last; ``back=1`` is the stage selected before
    that one, ``back=-1`` the next. Without ``after`` it is the stage that the role's last wait for the buffer's full
    barrier selected. ``share`` is a part (from, to) of its rows, in registers and tensor memory of its columns; None is
    the instance's own rows where an effect works on rows, else all. ``columns``: of shared memory, only a part
    (from, to) of its columns is read.
    """

    name: str
    back: int = 0
    stage: int | None = None
    after: Cursor | None = None
    share: Share | None = None
    columns: Share | None = None

    @property
    def cursor(self) -> Cursor:
        """What selects the stage."""
        return self.after or Cursor("wait", f"{self.name}.full")


class Register(Place):
    """A register tile of the role instance. A plain string is one too."""


class Smem(Place):
    """A stage of a shared-memory buffer."""


class Tmem(Place):
    """A stage of a region of tensor memory."""


Operand = str | Place


class Shape(NamedTuple):
    """Rows and columns of a tile, and its number format (a key of ``FORMAT_BITS``)."""

    rows: int
    columns: int
    format: str

    @property
    def bytes(self) -> int:
        """Bytes of the tile."""
        return self.rows * self.columns * FORMAT_BITS[self.format] // 8

    @property
    def boxes(self) -> int:
        """TMA boxes of one copy of it."""
        return -(-self.columns * FORMAT_BITS[self.format] // (8 * BOX_BYTES))


@dataclass(frozen=True)
class Tile:
    """An operand of a product: a place and the shape of what it holds there."""

    place: Place
    shape: Shape

    def columns(self, first: float, last: float) -> Tile:
        """The part (first, last) of its columns; in registers and tensor memory a smaller tile, elsewhere as read."""
        shape = self.shape._replace(columns=round(self.shape.columns * (last - first)))
        if isinstance(self.place, Smem):
            return Tile(replace(self.place, columns=(first, last)), shape)
        return Tile(replace(self.place, share=(first, last)), shape)

    def before(self, stages: int = 1) -> Tile:
        """The stage selected ``stages`` selections earlier."""
        return Tile(replace(self.place, back=self.place.back + stages), self.shape)


def register_tile(name: str, rows: int, columns: int, format: str = "fp32") -> Tile:
    """A register tile of a role instance."""
    return Tile(Register(name), Shape(rows, columns, format))
