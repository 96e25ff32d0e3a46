"""The schedule language: Python that records a program of roles, buffers, barriers and work.

A schedule is a function ``(problem, arch, *, knobs...) -> Kernel`` marked with :func:`schedule`.
It builds a :class:`Kernel` by opening roles and recording operations in program order; loops are
recorded once. Nothing is timed here: the recorded kernel is verified, lowered and simulated later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.program.declarations import Barrier, Buffer, Ring, Stages, Tensor, TmemRegion, arrived, committed, waited
from fasim.program.effects import Layout
from fasim.program.ops import Loop, Only, Op, TileLoop
from fasim.program.role import Group, Role
from fasim.program.tiles import Register, Shape, Smem, Tile, Tmem, register_tile

__all__ = [
    "Barrier",
    "Buffer",
    "GridMode",
    "Group",
    "Kernel",
    "Register",
    "Ring",
    "Role",
    "Shape",
    "Smem",
    "Stages",
    "Tensor",
    "Tile",
    "Tmem",
    "TmemRegion",
    "arrived",
    "committed",
    "register_tile",
    "waited",
    "walk",
]

GridMode = Literal["single", "static", "dynamic"]


@dataclass
class Kernel:
    """A recorded program and its grid.

    ``tiles`` maps column names to integer arrays of equal length, one row per work tile in the
    order the scheduler hands them out. ``mode`` is ``single`` (one tile per CTA, CTAs dispatched in
    order), ``static`` (persistent, CTA i takes tiles i, i + grid, ...) or ``dynamic`` (persistent,
    tiles drawn from an atomic counter). With ``cluster`` > 1 consecutive tiles go to the CTAs of a
    cluster, so the number of tiles must be a multiple of it. ``regions`` name parts of the ``tmem_columns`` columns of
    tensor memory that the effects of operations refer to.
    """

    name: str
    problem: Problem
    arch: Arch
    knobs: dict[str, object]
    cluster: int = 1
    mode: GridMode = "single"
    max_ctas_per_sm: int | None = None
    launch_registers: int | None = None  # registers per thread at launch; None: the roles' maximum
    tiles: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    roles: list[Role] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    barriers: list[Barrier] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    tmem_columns: int = 0
    regions: list[TmemRegion] = field(default_factory=list)
    launch_us: float = 0.0  # host time to launch it, after which it starts at the earliest; 0: a captured graph
    load: Literal["tensor", "memory"] = "tensor"  # what draws the power: picks the chip's sustained clock
    score_format: str | None = None  # the scores pass through memory in this format, so a check rounds them too
    not_attention: str | None = None  # why the values are not attention's, where a knob leaves something out

    def smem(self, name: str, nbytes: int, stages: int = 1, aliases: str | None = None) -> Buffer:
        """Reserve ``stages`` x ``nbytes`` of shared memory."""
        buffer = Buffer(name, int(nbytes), stages, aliases)
        self.buffers.append(buffer)
        return buffer

    def barrier(self, name: str, arrivals: int, stages: int = 1, per_instance: int = 0, named: bool = False) -> Barrier:
        """Declare a barrier ring; ``named`` marks a hardware named barrier instead of an mbarrier."""
        barrier = Barrier(name, arrivals, stages, per_instance, named)
        self.barriers.append(barrier)
        return barrier

    def turns(self, name: str, instances: int) -> Barrier:
        """Named barriers that pass a turn around the instances of a role (ping-pong).

        The owner waits (its half of a bar.sync) for its predecessor's bar.arrive; the first instance
        begins.
        """
        barrier = Barrier(name, 1, 1, instances, named=True, primed=True)
        self.barriers.append(barrier)
        return barrier

    def region(self, name: str, first: int, columns: int, stages: int = 1) -> TmemRegion:
        """Name a part of tensor memory, see :class:`Region`."""
        region = TmemRegion(name, first, columns, stages)
        self.regions.append(region)
        return region

    def tensor(
        self, name: str, lines: int, line_bytes: int, start: str, step: int = 0, layout: Layout | None = None
    ) -> Tensor:
        """Declare a tensor in global memory, see :class:`Tensor`."""
        tensor = Tensor(name, lines, line_bytes, start, step, layout)
        self.tensors.append(tensor)
        return tensor

    def ring(
        self,
        tensor: Tensor,
        shape: Shape | int,
        stages: int,
        *,
        consumers: int,
        name: str | None = None,
        multicast: bool = False,
        boxes: int | None = None,
        copies: int = 1,
    ) -> Ring:
        """A buffer of ``stages`` tiles of ``shape`` with full and empty mbarriers per stage, named as the tensor.

        An integer ``shape`` is a stage of that many bytes which no product reads. ``consumers`` arrivals release a
        stage, ``copies`` copies fill it. With ``multicast`` every CTA of the cluster loads its share into all of them,
        so a stage is filled by ``cluster`` copies and released by the consumers of all CTAs. ``boxes``: TMA boxes of a
        copy, if not those of 128 bytes that the shape has.
        """
        name = name or tensor.name
        share = self.cluster if multicast else 1
        nbytes = shape.bytes if isinstance(shape, Shape) else int(shape)
        if boxes is None:
            boxes = shape.boxes if isinstance(shape, Shape) else 1
        return Ring(
            buffer=self.smem(name, nbytes, stages),
            full=self.barrier(f"{name}.full", share * copies, stages),
            empty=self.barrier(f"{name}.empty", consumers * share, stages),
            tensor=tensor,
            copy_bytes=nbytes // share // copies,
            multicast=multicast,
            boxes=boxes,
            shape=shape if isinstance(shape, Shape) else None,
            copies=copies,
        )

    def stages(
        self, tensor: Tensor, shape: Shape | int, stages: int, name: str | None = None, boxes: int | None = None
    ) -> Stages:
        """A staged buffer with full barriers only, see :class:`Stages`; ``shape``, ``name``, ``boxes`` as of a ring."""
        name = name or tensor.name
        nbytes = shape.bytes if isinstance(shape, Shape) else int(shape)
        buffer, full = self.smem(name, nbytes, stages), self.barrier(f"{name}.full", 1, stages)
        kept = shape if isinstance(shape, Shape) else None
        if boxes is None:
            boxes = kept.boxes if kept else 1
        return Stages(buffer, full, tensor, nbytes, False, boxes, kept)

    @contextmanager
    def role(self, name: str, *, warps: int = 0, warpgroups: int = 0, count: int = 1, registers: int) -> Iterator[Role]:
        """Open a role. ``warpgroups=n`` is n instances of four warps; ``count`` instances of ``warps``."""
        if (warps == 0) == (warpgroups == 0):
            raise ConfigError(f"role '{name}': give either warps or warpgroups")
        role = Role(name, warps or 4, warpgroups or count, registers)
        yield role
        self.roles.append(role)

    @property
    def tile_count(self) -> int:
        """Number of work tiles of the grid."""
        return len(next(iter(self.tiles.values()))) if self.tiles else 0

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return sum(32 * role.warps * role.count for role in self.roles)

    @property
    def smem_bytes(self) -> int:
        """Shared memory per CTA; aliased buffers count once, at the larger size."""
        own = {b.name: b.bytes * b.stages for b in self.buffers if b.aliases is None}
        for buffer in self.buffers:
            if buffer.aliases is not None:
                own[buffer.aliases] = max(own[buffer.aliases], buffer.bytes * buffer.stages)
        return sum(own.values())

    def find_tensor(self, name: str) -> Tensor:
        """The declared tensor ``name``."""
        return next(tensor for tensor in self.tensors if tensor.name == name)


def walk(ops: Sequence[Op], enter_tiles: bool = True) -> Iterator[Op]:
    """Every operation of a body, depth first, loops before their contents; optionally without tile loops' bodies."""
    for op in ops:
        yield op
        if isinstance(op, Loop | Only) or (isinstance(op, TileLoop) and enter_tiles):
            yield from walk(op.body, enter_tiles)
