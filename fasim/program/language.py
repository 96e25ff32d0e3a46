"""The schedule language: Python that records a program of roles, buffers, barriers and work.

A schedule is a function ``(problem, arch, *, knobs...) -> Kernel`` marked with :func:`schedule`.
It builds a :class:`Kernel` by opening roles and recording operations in program order; loops are
recorded once. Nothing is timed here: the recorded kernel is verified, lowered and simulated later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.program.effects import Effect, Layout, Load, Smem
from fasim.program.ops import (
    Arrive,
    BarrierUse,
    Copy,
    Delay,
    Loop,
    Mix,
    Mma,
    Only,
    Op,
    TileLoop,
    Vector,
    Wait,
    WaitCopies,
    WaitMma,
)

Instance = Literal["shared", "own", "next"]
GridMode = Literal["single", "static", "dynamic"]


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
class Region:
    """``stages`` x ``columns`` columns of tensor memory from column ``first`` on; regions may share columns."""

    name: str
    first: int
    columns: int
    stages: int = 1


@dataclass(frozen=True)
class Ring:
    """A staged buffer with full and empty barriers, filled by copies of ``tensor``."""

    buffer: Buffer
    full: Barrier
    empty: Barrier
    tensor: Tensor
    copy_bytes: int
    multicast: bool
    boxes: int


@dataclass
class Role:
    """A concurrent program on the SM: ``count`` identical instances of ``warps`` warps each."""

    name: str
    warps: int
    count: int
    registers: int
    body: list[Op] = field(default_factory=list)
    _stack: list[list[Op]] = field(default_factory=list, repr=False)

    def record(self, op: Op) -> None:
        """Append ``op`` to the innermost open body."""
        (self._stack[-1] if self._stack else self.body).append(op)

    # --- structure -------------------------------------------------------------------------
    @contextmanager
    def tiles(self, draws: bool = False) -> Iterator[None]:
        """The loop over work tiles. ``draws``: this role asks a dynamic scheduler for them."""
        self._stack.append([])
        yield
        self.record(TileLoop("tiles", tuple(self._stack.pop()), draws))

    @contextmanager
    def loop(self, trips: int | str, label: str | None = None) -> Iterator[None]:
        """A loop of ``trips`` iterations: a number, or the name of a tile-table column."""
        self._stack.append([])
        yield
        self.record(Loop(label or str(trips), trips, tuple(self._stack.pop())))

    @contextmanager
    def only(self, instance: int, others: bool = False) -> Iterator[None]:
        """Operations of one instance (-1: the last); with ``others``, of all the rest."""
        self._stack.append([])
        yield
        self.record(Only("only", instance, tuple(self._stack.pop()), others))

    # --- memory ----------------------------------------------------------------------------
    def load(self, ring: Ring) -> None:
        """Wait until the ring's next stage is empty, then start the copy that fills it."""
        name = ring.buffer.name
        self.record(
            Wait(f"wait {name} empty", BarrierUse(ring.empty.name, ring.empty.stages, f"{name}.put", 1), "empty")
        )
        use = BarrierUse(ring.full.name, ring.full.stages, f"{name}.load")
        line, effects = ring.tensor, (Load(Smem(name)),)
        self.record(
            Copy(
                f"load {name}",
                line.name,
                ring.copy_bytes,
                "load",
                "tma",
                use,
                ring.multicast,
                ring.boxes,
                effects=effects if line.layout else (),
            )
        )

    def wait(self, ring: Ring, polled: bool = True) -> None:
        """Consumer: wait until the next stage of ``ring`` is full. ``polled``: see ``ops.Wait``."""
        name = ring.buffer.name
        use = BarrierUse(ring.full.name, ring.full.stages, f"{name}.get")
        self.record(Wait(f"wait {name}", use, "full", polled=polled))

    def release(self, ring: Ring) -> None:
        """Consumer: give the oldest acquired stage back (to every CTA that fills it)."""
        name = ring.buffer.name
        use = BarrierUse(ring.empty.name, ring.empty.stages, f"{name}.release")
        self.record(Arrive(f"release {name}", use, "cluster" if ring.multicast else "cta"))

    def copy(
        self,
        label: str,
        tensor: Tensor,
        nbytes: int,
        kind: Literal["load", "store", "reduce"],
        engine: Literal["tma", "threads"] = "tma",
        boxes: int = 1,
        effects: tuple[Effect, ...] = (),
    ) -> None:
        """A copy the role itself waits for with :meth:`wait_copies`."""
        self.record(Copy(label, tensor.name, nbytes, kind, engine, boxes=boxes, effects=effects))

    def wait_copies(self, kind: Literal["load", "store"], label: str | None = None) -> None:
        """Wait for this role's outstanding loads or stores."""
        self.record(WaitCopies(label or f"wait {kind}s", kind))

    # --- work ------------------------------------------------------------------------------
    def mma(self, label: str, *, m: int, n: int, k: int, count: int, **options: Any) -> None:
        """Issue and commit ``count`` asynchronous MMAs of m x n x k. Options: see ``ops.Mma``."""
        self.record(Mma(label, m, n, k, count, **options))

    def wait_mma(self, pending: int = 0, label: str = "wait MMA", effects: tuple[Effect, ...] = ()) -> None:
        """Wait until at most ``pending`` committed MMA groups of this role are incomplete."""
        self.record(WaitMma(label, pending, effects=effects))

    def vector(self, label: str, mix: Mix, **options: Any) -> None:
        """Vector instructions per thread. Options: see ``ops.Vector``."""
        self.record(Vector(label, dict(mix), **options))

    def delay(self, label: str, cycles: float, reason: str = "dependency", effects: tuple[Effect, ...] = ()) -> None:
        """A fixed latency."""
        self.record(Delay(label, cycles, reason, effects=effects))

    # --- synchronisation -------------------------------------------------------------------
    def arrive(
        self,
        barrier: Barrier,
        instance: Instance = "shared",
        scope: Literal["cta", "cluster", "leader"] = "cta",
        label: str | None = None,
    ) -> None:
        """Arrive at ``barrier``; ``instance`` selects one of a per-instance barrier."""
        use = BarrierUse(_select(barrier, instance), barrier.stages, f"{barrier.name}.{instance}.arrive")
        self.record(Arrive(label or f"arrive {barrier.name}", use, scope))

    def wait_barrier(
        self,
        barrier: Barrier,
        instance: Instance = "shared",
        reason: str = "barrier",
        ahead: int = 0,
        label: str | None = None,
        effects: tuple[Effect, ...] = (),
    ) -> None:
        """Wait for the next phase of ``barrier``."""
        use = BarrierUse(_select(barrier, instance), barrier.stages, f"{barrier.name}.{instance}.wait", ahead)
        self.record(Wait(label or f"wait {barrier.name}", use, reason, barrier.named, effects=effects))

    def sync(self, barrier: Barrier, instance: Instance = "shared", label: str | None = None) -> None:
        """Arrive and wait (bar.sync)."""
        self.arrive(barrier, instance, label=label)
        self.wait_barrier(barrier, instance, label=label)


def _select(barrier: Barrier, instance: Instance) -> str:
    if (instance == "shared") != (barrier.per_instance == 0):
        raise ConfigError(f"barrier '{barrier.name}': instance '{instance}' does not fit its declaration")
    return barrier.name if instance == "shared" else f"{barrier.name}@{instance}"


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
    regions: list[Region] = field(default_factory=list)
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

    def region(self, name: str, first: int, columns: int, stages: int = 1) -> Region:
        """Name a part of tensor memory, see :class:`Region`."""
        region = Region(name, first, columns, stages)
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
        nbytes: int,
        stages: int,
        *,
        consumers: int,
        multicast: bool = False,
        boxes: int = 1,
        aliases: str | None = None,
    ) -> Ring:
        """A buffer of ``stages`` x ``nbytes`` with full and empty mbarriers per stage.

        ``consumers`` arrivals release a stage. With ``multicast`` every CTA of the cluster loads its
        share into all of them, so a stage is filled by ``cluster`` copies and released by the
        consumers of all CTAs.
        """
        share = self.cluster if multicast else 1
        buffer = self.smem(tensor.name, nbytes, stages, aliases)
        full = self.barrier(f"{tensor.name}.full", share, stages)
        empty = self.barrier(f"{tensor.name}.empty", consumers * share, stages)
        return Ring(buffer, full, empty, tensor, int(nbytes) // share, multicast, boxes)

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
