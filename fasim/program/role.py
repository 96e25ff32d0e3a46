"""A role: the verbs of the schedule language."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from fasim.program.declarations import Barrier, Instance, Ring, Stages, Tensor, selected
from fasim.program.effects import Effect, Load, Matmul
from fasim.program.ops import (
    Arrive,
    BarrierUse,
    Copy,
    CopyEngine,
    CopyKind,
    Delay,
    Latencies,
    Loop,
    Mix,
    Mma,
    Only,
    Op,
    OperandSource,
    Scope,
    TileLoop,
    Vector,
    Wait,
    WaitCopies,
    WaitMma,
)
from fasim.program.tiles import FORMAT_BITS, TENSOR_DTYPE, Smem, Tile, Tmem

#: Rows of a wgmma, rows that one CTA gives to a tcgen05.mma, and bits of operand along the depth of either.
WGMMA_ROWS, TCGEN05_ROWS, MMA_DEPTH_BITS = 64, 128, 256


class Group(NamedTuple):
    """An MMA group of a role: the number of groups that it had committed, this one included."""

    number: int


@dataclass
class Role:
    """A concurrent program on the SM: ``count`` identical instances of ``warps`` warps each.

    What the recorded operations do to values is said by ``effects``, see :mod:`fasim.program.effects`.
    """

    name: str
    warps: int
    count: int
    registers: int
    body: list[Op] = field(default_factory=list)
    _stack: list[list[Op]] = field(default_factory=list, repr=False)
    _groups: int = field(default=0, repr=False)
    _phase: str = field(default="", repr=False)

    def record(self, op: Op) -> None:
        """Append ``op`` to the innermost open body, in the phase that is open."""
        if self._phase:
            op = replace(op, phase=self._phase)
        (self._stack[-1] if self._stack else self.body).append(op)

    # --- structure -------------------------------------------------------------------------
    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the operations recorded inside with ``name``; the trace has it beside their labels. No other effect."""
        outer, self._phase = self._phase, name
        yield
        self._phase = outer

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
    def load(self, ring: Ring, tensor: Tensor | None = None, boxes: int | None = None) -> None:
        """Wait until the ring's next stage is empty, then start the copies that fill it, from ``tensor`` if given."""
        empty = BarrierUse(ring.empty.name, ring.empty.stages, ahead=1)
        self.record(Wait(f"wait {ring.buffer.name} empty", empty, "empty"))
        for part in range(ring.copies):
            self.fill(
                ring, tensor=tensor, boxes=boxes if boxes is not None else ring.boxes if part == 0 else 1, part=part
            )

    def fill(
        self,
        ring: Stages,
        engine: CopyEngine = "tma",
        tensor: Tensor | None = None,
        boxes: int | None = None,
        part: int = 0,
    ) -> None:
        """Start a copy into the next stage, which something else than an empty barrier says to be free."""
        source = tensor or ring.tensor
        self.record(
            Copy(
                f"load {tensor.name if tensor else ring.buffer.name}",
                source.name,
                ring.copy_bytes if tensor is None else tensor.line_bytes,
                "load",
                engine,
                BarrierUse(ring.full.name, ring.full.stages, part=part),
                ring.multicast,
                ring.boxes if boxes is None else boxes,
                effects=(Load(Smem(ring.buffer.name)),) if source.layout else (),
            )
        )

    def wait(self, ring: Stages, polled: bool = True) -> None:
        """Consumer: wait until the next stage of ``ring`` is full. ``polled``: see ``ops.Wait``."""
        use = BarrierUse(ring.full.name, ring.full.stages)
        self.record(Wait(f"wait {ring.buffer.name}", use, "full", polled=polled))

    def wait_filled(self, ring: Stages, reason: str = "memory") -> None:
        """Wait for the oldest :meth:`fill` by the role's own threads (cp.async.wait_group), which costs no polling."""
        use = BarrierUse(ring.full.name, ring.full.stages)
        self.record(Wait(f"wait {ring.buffer.name}", use, reason, named=True))

    def release(self, ring: Ring) -> None:
        """Consumer: give the oldest acquired stage back (to every CTA that fills it)."""
        use = BarrierUse(ring.empty.name, ring.empty.stages)
        self.record(Arrive(f"release {ring.buffer.name}", use, "cluster" if ring.multicast else "cta"))

    def copy(
        self,
        label: str,
        tensor: Tensor,
        nbytes: int,
        kind: CopyKind,
        engine: CopyEngine = "tma",
        boxes: int = 1,
        effects: tuple[Effect, ...] = (),
    ) -> None:
        """A copy the role itself waits for with :meth:`wait_copies`."""
        self.record(Copy(label, tensor.name, nbytes, kind, engine, boxes=boxes, effects=effects))

    def wait_copies(self, kind: Literal["load", "store"], label: str | None = None) -> None:
        """Wait for this role's outstanding loads or stores."""
        self.record(WaitCopies(label or f"wait {kind}s", kind))

    # --- products --------------------------------------------------------------------------
    def mma(
        self,
        label: str,
        *,
        m: int,
        n: int,
        k: int,
        count: int,
        a: OperandSource = "smem",
        dtype: str = "bf16",
        two_cta: bool = False,
        slots: float = 1.0,
        done: Barrier | None = None,
        effects: tuple[Effect, ...] = (),
    ) -> Group:
        """Issue and commit ``count`` asynchronous MMAs of m x n x k; ``done`` is arrived at when they are complete.

        See ``ops.Mma``. :meth:`gemm` derives all of this from its operands.
        """
        bar = BarrierUse(done.name, done.stages) if done else None
        self.record(Mma(label, m, n, k, count, a, dtype, two_cta, slots, bar, effects=effects))
        self._groups += 1
        return Group(self._groups)

    def gemm(
        self,
        label: str,
        a: Tile | Stages,
        b: Tile | Stages,
        into: Tile,
        *,
        add: bool = False,
        transposed: bool = False,
        steps: tuple[int, int | None] = (0, None),
        takes_effect: bool = True,
        pair: bool = False,
        slots: float = 1.0,
        done: Barrier | None = None,
    ) -> Group:
        """Issue one MMA group, ``into`` = ``a`` x ``b``, and commit it.

        ``a`` is rows x depth; ``b`` is depth x columns, or columns x depth with ``transposed``. With ``add`` the
        product is added to ``into``. A staged buffer stands for the stage that the role waited for last. The operands
        determine the shape of the instructions (64 rows where ``into`` is in registers, up to 128 a CTA where it is in
        tensor memory, 256 bits of depth), their number and type, where ``a`` comes from, and the effect on values.

        ``steps`` (from, to) issues only these instructions along the depth, where other work stands between them; only
        the last part ``takes_effect``. With ``pair`` two CTAs compute together and ``into`` counts the rows of both.
        ``done`` is the barrier that the complete group arrives at; ``slots`` are issue slots per instruction.
        """
        a, b = (x.tile if isinstance(x, Stages) else x for x in (a, b))
        k = MMA_DEPTH_BITS // FORMAT_BITS[a.shape.format]
        most = TCGEN05_ROWS * (2 if pair else 1)
        rows = min(into.shape.rows, most) if isinstance(into.place, Tmem) else WGMMA_ROWS
        first, last = steps
        count = ((-(-a.shape.columns // k) if last is None else last) - first) * -(-into.shape.rows // rows)
        source: OperandSource = "register"
        if isinstance(a.place, Smem | Tmem):
            source = "smem" if isinstance(a.place, Smem) else "tmem"
        product = Matmul(into.place, a.place, b.place, transposed=transposed, add=add)
        return self.mma(
            label,
            m=rows,
            n=into.shape.columns,
            k=k,
            count=count,
            a=source,
            dtype=TENSOR_DTYPE.get(a.shape.format, a.shape.format),
            two_cta=pair,
            slots=slots,
            done=done,
            effects=(product,) if takes_effect else (),
        )

    def finish(self, group: Group, label: str = "wait MMA", effects: tuple[Effect, ...] = ()) -> None:
        """Wait until ``group`` is complete; groups that were committed after it may stay in flight."""
        self.wait_mma(self._groups - group.number, label, effects)

    def wait_mma(self, pending: int = 0, label: str = "wait MMA", effects: tuple[Effect, ...] = ()) -> None:
        """Wait until at most ``pending`` committed MMA groups of this role are incomplete."""
        self.record(WaitMma(label, pending, effects=effects))

    # --- vector work -----------------------------------------------------------------------
    def vector(
        self,
        label: str,
        mix: Mix,
        *,
        smem_bytes: float = 0.0,
        tmem_load_bytes: float = 0.0,
        tmem_store_bytes: float = 0.0,
        mma_sync_flops: float = 0.0,
        latency: Latencies | None = None,
        chain: float = 0.0,
        warps: int | None = None,
        effects: tuple[Effect, ...] = (),
    ) -> None:
        """Vector instructions per thread, see ``ops.Vector``."""
        self.record(
            Vector(
                label,
                dict(mix),
                smem_bytes,
                tmem_load_bytes,
                tmem_store_bytes,
                mma_sync_flops,
                latency or {},
                chain,
                warps,
                effects=effects,
            )
        )

    def delay(self, label: str, cycles: float, reason: str = "dependency", effects: tuple[Effect, ...] = ()) -> None:
        """A fixed latency."""
        self.record(Delay(label, cycles, reason, effects=effects))

    # --- synchronisation -------------------------------------------------------------------
    def arrive(
        self,
        barrier: Barrier,
        instance: Instance = "shared",
        scope: Scope = "cta",
        label: str | None = None,
    ) -> None:
        """Arrive at ``barrier``; ``instance`` selects one of a per-instance barrier."""
        use = BarrierUse(selected(barrier, instance), barrier.stages)
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
        use = BarrierUse(selected(barrier, instance), barrier.stages, ahead)
        self.record(Wait(label or f"wait {barrier.name}", use, reason, barrier.named, effects=effects))

    def sync(self, barrier: Barrier, instance: Instance = "shared", label: str | None = None) -> None:
        """Arrive and wait (bar.sync)."""
        self.arrive(barrier, instance, label=label)
        self.wait_barrier(barrier, instance, label=label)
