"""What a kernel declares: barriers, buffers, tensors, regions of tensor memory, rings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasim.errors import ConfigError
from fasim.program.effects import Layout
from fasim.program.tiles import Cursor, Shape, Smem, Tile

#: Which of a per-instance barrier: the role instance's own, or the next instance's; "shared" for one barrier of all.
Instance = Literal["shared", "own", "next"]


@dataclass(frozen=True)
class Barrier:
    """An mbarrier ring or a named barrier: ``stages`` barriers of ``arrivals`` arrivals a phase.

    A barrier declared ``per_instance`` exists once per instance of a role (a turn each); with
    ``primed`` the first phase of the first instance's counts as complete, so that it begins.
    """

    name: str
    arrivals: int
    stages: int = 1
    per_instance: int = 0  # number of instances, 0 = one barrier for all
    named: bool = False
    primed: bool = False


@dataclass(frozen=True)
class Buffer:
    """``stages`` x ``bytes`` of shared memory. ``aliases`` names a buffer whose space it reuses."""

    name: str
    bytes: int
    stages: int = 1
    aliases: str | None = None


@dataclass(frozen=True)
class Tensor:
    """A tensor in global memory as the L2 sees it: lines of one copy each.

    ``start`` is the tile-table column with the first line a work tile touches, ``step`` the lines
    to move on with every further copy in that tile; ``lines`` the number of distinct lines.
    ``layout`` says which rows of which array a line holds, for execution on values.
    """

    name: str
    lines: int
    line_bytes: int
    start: str
    step: int = 0
    layout: Layout | None = None


@dataclass(frozen=True)
class TmemRegion:
    """``stages`` x ``columns`` columns of tensor memory from column ``first`` on; regions may share columns."""

    name: str
    first: int
    columns: int
    stages: int = 1


@dataclass(frozen=True)
class Stages:
    """A staged buffer with a full barrier per stage, filled by ``copies`` copies of ``tensor`` a stage.

    That a stage is free again is said by the program's order (software pipelining). As an operand it is the stage that
    the role waited for last.
    """

    buffer: Buffer
    full: Barrier
    tensor: Tensor
    copy_bytes: int
    multicast: bool
    boxes: int
    shape: Shape | None = None
    copies: int = 1

    @property
    def tile(self) -> Tile:
        """The stage that the role waited for last. Raises ConfigError for a buffer of plain bytes."""
        if self.shape is None:
            raise ConfigError(f"buffer '{self.buffer.name}' holds plain bytes: give it a Shape to use it in a product")
        return Tile(Smem(self.buffer.name, after=waited(self.full)), self.shape)


@dataclass(frozen=True, kw_only=True)
class Ring(Stages):
    """Stages with an empty barrier each as well, by which consumers give them back to who fills them."""

    empty: Barrier


def waited(barrier: Barrier, instance: Instance = "shared") -> Cursor:
    """What the role's waits for ``barrier`` select: the stage of the last one."""
    return Cursor("wait", selected(barrier, instance))


def arrived(barrier: Barrier, instance: Instance = "shared") -> Cursor:
    """What the role's arrivals at ``barrier`` select."""
    return Cursor("arrive", selected(barrier, instance))


def committed(barrier: Barrier) -> Cursor:
    """What the role's MMA groups that complete at ``barrier`` select."""
    return Cursor("commit", barrier.name)


def selected(barrier: Barrier, instance: Instance) -> str:
    """The name of one barrier of ``barrier``. Raises ConfigError where its declaration has no such instance."""
    if (instance == "shared") != (barrier.per_instance == 0):
        raise ConfigError(f"barrier '{barrier.name}': instance '{instance}' does not fit its declaration")
    return barrier.name if instance == "shared" else f"{barrier.name}@{instance}"
