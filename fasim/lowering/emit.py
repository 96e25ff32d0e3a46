"""Emission: the program of one role instance becomes integer instructions with their demand in ticks.

:mod:`fasim.lowering.lower` puts the role instances of a kernel together; ``docs/semantics.md`` says what the
instructions mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fasim.engine import image as im
from fasim.errors import ModelError
from fasim.lowering.cost import VectorDemand, chunk_count, mma_absorption, mma_demand, ticks, vector_demand
from fasim.program.language import Kernel, Role
from fasim.program.ops import (
    Arrive,
    BarrierUse,
    Copy,
    Delay,
    Loop,
    Mma,
    Only,
    Op,
    TileLoop,
    Vector,
    Wait,
    WaitCopies,
    WaitMma,
)
from fasim.program.tiles import Cursor
from fasim.results.reasons import REASONS

#: Vector work is cut into chunks of about this many cycles, so that roles interleave on the pipes.
CHUNK_CYCLES = 64.0

_REASON = {name: index for index, name in enumerate(REASONS)}
_SCOPES = {"cta": im.SCOPE_CTA, "cluster": im.SCOPE_CLUSTER, "leader": im.SCOPE_LEADER}
_COPY_KINDS = {"load": im.LOAD, "store": im.STORE, "reduce": im.REDUCE}


@dataclass
class Tables:
    """What grows while code is emitted."""

    code: list[list[int]] = field(default_factory=list)
    ops: list[Op | None] = field(default_factory=list)  # what each instruction was lowered from
    names: dict[tuple[str, str], int] = field(default_factory=dict)  # label and phase
    demand: list[VectorDemand] = field(default_factory=list)
    demand_index: dict[tuple[int, ...], int] = field(default_factory=dict)
    activity: dict[int, dict[int, float]] = field(default_factory=dict)  # pc of an MMA or copy -> unit -> ticks

    def name(self, label: str, phase: str) -> int:
        """Index of a name."""
        return self.names.setdefault((label, phase), len(self.names))

    def add_demand(self, demand: VectorDemand) -> int:
        """Index of a demand; equal ones share it."""
        key = tuple(np.concatenate([demand.alone, demand.beside, demand.counted]).tolist())
        key += (demand.mma_delay, demand.mma_stop, *demand.stall)
        if key not in self.demand_index:
            self.demand_index[key] = len(self.demand)
            self.demand.append(demand)
        return self.demand_index[key]


class _AgentEmitter:
    """Emits the code of one role instance."""

    def __init__(self, kernel: Kernel, role: Role, instance: int, tables: Tables, port_share: float, mma_sync: bool):
        self.kernel, self.role, self.instance, self.tables = kernel, role, instance, tables
        self.arch = kernel.arch
        self.port_share, self.mma_sync = port_share, mma_sync
        self.counters: dict[Cursor | None, int] = {}
        self.op: Op | None = None
        self.columns = {name: i for i, name in enumerate(kernel.tiles)}
        self.tensor_index = {tensor.name: i for i, tensor in enumerate(kernel.tensors)}
        self.barrier_base: dict[str, int] = {}
        base = 0
        for barrier in kernel.barriers:
            self.barrier_base[barrier.name] = base
            base += barrier.stages * max(1, barrier.per_instance)

    def emit(self, kind: int, name: str) -> int:
        row = [0] * im.CODE_WIDTH
        row[im.K_KIND], row[im.K_NAME] = kind, self.tables.name(name, self.op.phase if self.op else "")
        self.tables.code.append(row)
        self.tables.ops.append(self.op)
        return len(self.tables.code) - 1

    def set(self, pc: int, column: int, value: int) -> None:
        self.tables.code[pc][column] = value

    def primed(self, use: BarrierUse) -> int:
        """Phases that count as complete for this instance because the barrier is primed."""
        barrier = next(b for b in self.kernel.barriers if b.name == use.barrier.partition("@")[0])
        return int(barrier.primed and self.instance == 0)

    def barrier(self, pc: int, use: BarrierUse | None) -> None:
        """Fill in the barrier operands of instruction ``pc``."""
        if use is None:
            self.set(pc, im.M_BAR, -1)
            return
        name, _, which = use.barrier.partition("@")
        base = self.barrier_base[name]
        if which:
            instances = next(b.per_instance for b in self.kernel.barriers if b.name == name)
            base += (self.instance + (which == "next")) % instances * use.stages
        self.set(pc, im.M_BAR, base)
        self.set(pc, im.M_STAGES, use.stages)
        assert self.op is not None
        self.set(pc, im.M_COUNTER, self.counters.setdefault(self.op.cursor, len(self.counters)))

    def body(self, ops: tuple[Op, ...] | list[Op], depth: int = 0) -> None:
        for op in ops:
            self.one(op, depth)

    def one(self, op: Op, depth: int) -> None:
        sync = self.arch.sm.sync
        self.op = op
        if isinstance(op, Vector):
            self.vector(op)
        elif isinstance(op, Mma):
            self.mma(op)
        elif isinstance(op, WaitMma):
            self.set(self.emit(im.WAIT_MMA, op.label), 2, op.pending)
        elif isinstance(op, Copy):
            self.copy(op)
        elif isinstance(op, WaitCopies):
            self.set(self.emit(im.WAIT_COPY, op.label), 2, _COPY_KINDS[op.kind])
        elif isinstance(op, Arrive):
            pc = self.emit(im.ARRIVE, op.label)
            self.set(pc, im.B_SCOPE, _SCOPES[op.scope])
            self.barrier(pc, op.use)
        elif isinstance(op, Wait):
            pc = self.emit(im.WAIT, op.label)
            wake = sync.named_barrier_cycles if op.named else sync.mbarrier_wake_cycles
            cost = sync.mbarrier_try_cycles if op.polled and not op.named else 0.0
            for column, value in (
                (im.B_AHEAD, op.use.ahead + self.primed(op.use)),
                (im.B_REASON, _REASON[op.reason]),
                (im.B_TRY, ticks(cost)),
                (im.B_WAKE, ticks(wake)),
            ):
                self.set(pc, column, value)
            self.barrier(pc, op.use)
        elif isinstance(op, Delay):
            pc = self.emit(im.DELAY, op.label)
            self.set(pc, im.D_TICKS, ticks(op.cycles))
            self.set(pc, im.D_REASON, _REASON[op.reason])
        elif isinstance(op, Loop):
            self.loop(op, depth)
        elif isinstance(op, Only):
            chosen = op.instance % self.role.count == self.instance
            if chosen != op.others:
                self.body(op.body, depth)
        elif isinstance(op, TileLoop):
            self.tile_loop(op, depth)
        else:
            raise TypeError(f"cannot lower {type(op).__name__}")

    def vector(self, op: Vector) -> None:
        total = vector_demand(op, self.arch, self.role.warps, self.port_share, self.mma_sync)
        chunks = chunk_count(total.span, CHUNK_CYCLES)
        part = VectorDemand(
            np.rint(total.alone / chunks).astype(np.int64),
            np.rint(total.beside / chunks).astype(np.int64),
            np.rint(total.counted / chunks).astype(np.int64),
            round(total.mma_delay / chunks),
            round(total.mma_stop / chunks),
            (round(total.stall[0] / chunks), round(total.stall[1] / chunks)),
            (0, 0),
        )
        pc = self.emit(im.WORK, op.label)
        self.set(pc, im.W_DEMAND, self.tables.add_demand(part))
        self.set(pc, im.W_CHUNKS, chunks)
        self.set(pc, im.W_LATENCY, total.latency[0])
        self.set(pc, im.W_LATENCY_BESIDE, total.latency[1])
        self.set(pc, im.K_ACTIVITY, self.tables.code[pc][im.W_DEMAND])

    def mma(self, op: Mma) -> None:
        async_mma = self.arch.sm.tensor.async_mma
        assert async_mma is not None  # mma_demand raises first
        demand = mma_demand(op, self.arch)
        drain = async_mma.completion_cycles
        if op.two_cta and async_mma.two_cta_completion_cycles is not None:
            drain = async_mma.two_cta_completion_cycles
        if op.bar is not None:  # who waits there pays for its own waking up
            drain = max(0.0, drain - self.arch.sm.sync.mbarrier_wake_cycles)
        pc = self.emit(im.MMA, op.label)
        for column, value in (
            (im.M_TICKS, ticks(demand.tensor)),
            (im.M_COUNT, op.count),
            (im.M_INTERVAL, ticks(async_mma.issue_interval_cycles)),
            (im.M_DEPTH, async_mma.max_in_flight),
            (im.M_DRAIN, ticks(drain)),
            (im.M_PAIR, int(op.two_cta)),
            (im.M_ABSORB, round(mma_absorption(op, self.arch) * 2**im.FRACTION_SHIFT)),
        ):
            self.set(pc, column, value)
        slots = op.slots * self.role.warps / self.arch.sm.issue.ops_per_cycle
        self.tables.activity[pc] = {
            im.P_TENSOR: demand.tensor * im.TICKS,
            im.P_SMEM: demand.smem * im.TICKS,
            im.P_ISSUE: slots * im.TICKS,
        }
        self.barrier(pc, op.bar)

    def copy(self, op: Copy) -> None:
        tensor = self.kernel.find_tensor(op.tensor)
        sm = self.arch.sm
        if op.engine == "tma":
            if sm.tma is None:
                raise ModelError(f"{self.arch.name} has no TMA (operation '{op.label}')")
            issue = sm.tma.issue_interval_cycles * op.boxes
        else:  # 16 bytes per thread and instruction, one warp instruction per sub-core at a time
            instructions = op.bytes / (16.0 * 32 * self.role.warps)
            issue = sm.cp_async.issue_cycles * instructions * max(1.0, self.role.warps / sm.sub_cores)
        pc = self.emit(im.COPY, op.label)
        for column, value in (
            (im.C_TENSOR, self.tensor_index[op.tensor]),
            (im.C_BYTES, op.bytes),
            (im.C_KIND, _COPY_KINDS[op.kind]),
            (im.C_ISSUE, ticks(issue)),
            (im.C_MULTICAST, int(op.multicast)),
            (im.C_COLUMN, self.columns[tensor.start]),
            (im.C_STEP, tensor.step),
            (im.C_ENGINE, int(op.engine == "threads")),
        ):
            self.set(pc, column, value)
        l2 = self.arch.atomics.reduce_bytes_per_cycle if op.kind == "reduce" else self.arch.l2.bytes_per_cycle
        copies = self.kernel.cluster if op.multicast else 1
        units = {im.U_L2: op.bytes / l2 * im.TICKS}
        if op.engine == "tma" and sm.tma is not None:  # threads: the schedule has the port in its vector work
            units[im.P_SMEM] = copies * op.bytes / sm.smem.bytes_per_cycle * im.TICKS
            units[im.U_TMA] = copies * op.bytes / sm.tma.bytes_per_cycle * im.TICKS
        self.tables.activity[pc] = units
        self.barrier(pc, op.bar)

    def loop(self, op: Loop, depth: int) -> None:
        if depth >= 4:
            raise ModelError(f"role '{self.role.name}': loops nest deeper than 4")
        pc = self.emit(im.LOOP, op.label)
        named = isinstance(op.trips, str)
        self.set(pc, im.L_COLUMN, self.columns[str(op.trips)] if named else -1)
        self.set(pc, im.L_TRIPS, 0 if named else int(op.trips))
        self.set(pc, im.L_DEPTH, depth)
        self.body(op.body, depth + 1)
        self.op = op
        end = self.emit(im.END_LOOP, op.label)
        self.set(end, im.L_EXIT, pc + 1)
        self.set(end, im.L_DEPTH, depth)
        self.set(pc, im.L_EXIT, end + 1)

    def tile_loop(self, op: TileLoop, depth: int) -> None:
        pc = self.emit(im.TILE, "next tile")
        self.set(pc, im.T_DRAWS, int(op.draws))
        self.body(op.body, depth)
        self.op = op
        end = self.emit(im.END_TILE, "next tile")
        self.set(end, im.T_EXIT, pc)
        self.set(pc, im.T_EXIT, end + 1)


def emit_instance(
    kernel: Kernel, role: Role, instance: int, tables: Tables, port_share: float, mma_sync: bool
) -> tuple[int, int]:
    """Emit the code of instance number ``instance`` of ``role`` into ``tables``.

    ``port_share``: see :func:`~fasim.lowering.cost.mma_port_share`; ``mma_sync``: the kernel has synchronous tensor
    instructions. Returns its first instruction and the number of its counters.
    """
    entry = len(tables.code)
    emitter = _AgentEmitter(kernel, role, instance, tables, port_share, mma_sync)
    emitter.body(role.body)
    emitter.op = None
    emitter.emit(im.END, "end")
    return entry, len(emitter.counters)
