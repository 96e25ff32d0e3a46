"""The tile-level operations a schedule records, and the vocabulary of instruction mixes.

An operation carries meaning (``label``, operands) and demand (instructions per thread, MMA shape,
bytes). Nothing here knows a chip: :mod:`fasim.lowering.cost` turns demand into time on an architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fasim.arch.instructions import InstructionClass
from fasim.errors import ConfigError
from fasim.program.effects import Effect
from fasim.program.tiles import Cursor

#: Instructions per thread by class, a key of ``arch.instructions.INSTRUCTIONS``.
Mix = Mapping[InstructionClass, float]

#: Result latencies that are exposed, by what has to finish; a key of ``lowering.cost.result_latency``.
LatencyKind = Literal["fma", "alu", "ex2", "shfl", "smem", "mma_sync", "tmem", "tmem_store"]
Latencies = Mapping[LatencyKind, float]

OperandSource = Literal["smem", "register", "tmem"]
CopyEngine = Literal["tma", "threads"]
CopyKind = Literal["load", "store", "reduce"]
Scope = Literal["cta", "cluster", "leader"]


def add_mixes(*mixes: Mix) -> dict[InstructionClass, float]:
    """Sum of instruction mixes (instructions per thread and class)."""
    total: dict[InstructionClass, float] = {}
    for mix in mixes:
        for name, count in mix.items():
            total[name] = total.get(name, 0.0) + count
    return total


def scale_mix(mix: Mix, factor: float) -> dict[InstructionClass, float]:
    """``mix`` with every count multiplied by ``factor``."""
    return {name: count * factor for name, count in mix.items()}


@dataclass(frozen=True)
class Op:
    """Base of all recorded operations; ``label`` is what reports and traces call it.

    ``effects``: what it does to values, in this order. They cost nothing; demand is said apart. Raises ConfigError
    where they are no tuple of effects. ``phase``: the mark of :meth:`Role.phase`, for who looks for it in a trace.
    """

    label: str
    effects: tuple[Effect, ...] = field(default=(), kw_only=True)
    phase: str = field(default="", kw_only=True)

    @property
    def cursor(self) -> Cursor | None:
        """What the role counts when it executes this: the use of a barrier, or a copy that arrives at none."""
        return None

    def __post_init__(self) -> None:
        if not isinstance(self.effects, tuple) or not all(isinstance(effect, Effect) for effect in self.effects):
            raise ConfigError(f"operation '{self.label}': effects: expected a tuple of effects, got {self.effects!r}")


@dataclass(frozen=True)
class Vector(Op):
    """Vector instructions of one warp (or one warp of each sub-core, for a warpgroup).

    ``mix`` counts instructions per thread; ``smem_bytes`` is what the whole role moves through the
    shared-memory port; ``tmem_bytes`` likewise for tensor memory. ``mma_sync_flops`` is work of
    synchronous tensor instructions in the same stream (whole role). ``latency`` names the result
    latencies that are exposed at the end, for example ``{"shfl": 2}`` for two dependent shuffles.
    ``chain`` is the longest run of ALU instructions that each need the one before.
    ``warps`` is how many warps execute it when that is not the role's full width.
    """

    mix: Mix
    smem_bytes: float = 0.0
    tmem_load_bytes: float = 0.0
    tmem_store_bytes: float = 0.0
    mma_sync_flops: float = 0.0
    latency: Latencies = field(default_factory=dict)
    chain: float = 0.0
    warps: int | None = None


@dataclass(frozen=True)
class Mma(Op):
    """An asynchronous MMA group (wgmma or tcgen05): ``count`` instructions of m x n x k.

    ``a`` says where operand A comes from: shared memory, registers or tensor memory. The group is
    committed at once. ``bar`` is arrived at when the group completes (tcgen05.commit); ``count`` 0 only
    commits.
    """

    m: int
    n: int
    k: int
    count: int
    a: OperandSource = "smem"
    dtype: str = "bf16"
    two_cta: bool = False
    slots: float = 1.0  # issue slots per instruction (descriptor arithmetic included)
    bar: BarrierUse | None = None

    @property
    def cursor(self) -> Cursor | None:
        """See :class:`Op`."""
        return Cursor("commit", self.bar.barrier, self.bar.part) if self.bar else None


@dataclass(frozen=True)
class WaitMma(Op):
    """Wait until at most ``pending`` of this role's committed MMA groups are incomplete."""

    pending: int = 0


@dataclass(frozen=True)
class BarrierUse:
    """Names one barrier of a ring. What the operation does there, the role counts: see :class:`~tiles.Cursor`.

    ``ahead`` phases count as already complete: 1 for a producer's wait on an empty barrier, whose first round must
    pass. ``part`` tells copies apart that fill one stage together.
    """

    barrier: str
    stages: int
    ahead: int = 0
    part: int = 0


@dataclass(frozen=True)
class Arrive(Op):
    """Arrive at a barrier: of the own CTA, or of every CTA of the cluster."""

    use: BarrierUse
    scope: Scope = "cta"

    @property
    def cursor(self) -> Cursor | None:
        """See :class:`Op`."""
        return Cursor("arrive", self.use.barrier, self.use.part)


@dataclass(frozen=True)
class Wait(Op):
    """Wait for the phase of a barrier; ``reason`` is the stall reason charged.

    ``polled`` False: another barrier already guarantees the phase, so no try_wait is executed.
    """

    use: BarrierUse
    reason: str
    named: bool = False  # a hardware named barrier (bar.sync) rather than an mbarrier
    polled: bool = True

    @property
    def cursor(self) -> Cursor | None:
        """See :class:`Op`."""
        return Cursor("wait", self.use.barrier, self.use.part)


@dataclass(frozen=True)
class Copy(Op):
    """A bulk asynchronous copy between global memory and shared memory.

    ``tensor`` and the per-tile start column select the L2 line; each execution within a work tile
    moves on by the tensor's step. Loads complete at ``bar``; without one the role itself can wait
    (:class:`WaitCopies`). ``multicast`` delivers to every CTA of the cluster.
    """

    tensor: str
    bytes: int
    kind: CopyKind
    engine: CopyEngine = "tma"
    bar: BarrierUse | None = None
    multicast: bool = False
    boxes: int = 1

    @property
    def cursor(self) -> Cursor | None:
        """See :class:`Op`."""
        return Cursor("copy", self.bar.barrier, self.bar.part) if self.bar else Cursor("copy", self.label)


@dataclass(frozen=True)
class WaitCopies(Op):
    """Wait for this role's own copies (cp.async.wait_group, cp.async.bulk.wait_group.read)."""

    kind: Literal["load", "store"]


@dataclass(frozen=True)
class Delay(Op):
    """A fixed latency in cycles, charged to ``reason``."""

    cycles: float
    reason: str


@dataclass(frozen=True)
class Loop(Op):
    """``body`` repeated: a constant number of times, or as a column of the work-tile table says."""

    trips: int | str
    body: tuple[Op, ...]


@dataclass(frozen=True)
class Only(Op):
    """``body`` for one instance of the role (-1: the last), or for all but it."""

    instance: int
    body: tuple[Op, ...]
    others: bool = False


@dataclass(frozen=True)
class TileLoop(Op):
    """``body`` once per work tile of the CTA. ``draws`` marks the role that asks the scheduler."""

    body: tuple[Op, ...]
    draws: bool = False
