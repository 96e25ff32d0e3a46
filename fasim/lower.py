"""Lowering: a verified kernel becomes an :class:`~fasim.image.Image`.

Names become indices, operations become integer instructions with their demand in ticks, roles are
instantiated, loops get trip counts from the tile table. See ``docs/semantics.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fasim import image as im
from fasim.arch import Arch
from fasim.cost import VectorDemand, chunk_count, mma_absorption, mma_demand, mma_port_share, ticks, vector_demand
from fasim.errors import ModelError
from fasim.ops import (
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
from fasim.run import REASONS
from fasim.schedule import Kernel, Role, walk
from fasim.verify import ctas_per_sm, verify

#: Vector work is cut into chunks of about this many cycles, so that roles interleave on the pipes.
CHUNK_CYCLES = 64.0

_REASON = {name: index for index, name in enumerate(REASONS)}
_MODES = {"single": im.SINGLE, "static": im.STATIC, "dynamic": im.DYNAMIC}
_SCOPES = {"cta": im.SCOPE_CTA, "cluster": im.SCOPE_CLUSTER, "leader": im.SCOPE_LEADER}
_COPY_KINDS = {"load": im.LOAD, "store": im.STORE, "reduce": im.REDUCE}


@dataclass
class _Tables:
    """What grows while code is emitted."""

    code: list[list[int]] = field(default_factory=list)
    ops: list[Op | None] = field(default_factory=list)  # what each instruction was lowered from
    names: dict[str, int] = field(default_factory=dict)
    demand: list[VectorDemand] = field(default_factory=list)
    demand_index: dict[tuple[int, ...], int] = field(default_factory=dict)
    activity: dict[int, dict[int, float]] = field(default_factory=dict)  # pc of an MMA or copy -> unit -> ticks

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def add_demand(self, demand: VectorDemand) -> int:
        key = tuple(np.concatenate([demand.alone, demand.beside, demand.counted]).tolist())
        key += (demand.mma_delay, demand.mma_stop, *demand.stall)
        if key not in self.demand_index:
            self.demand_index[key] = len(self.demand)
            self.demand.append(demand)
        return self.demand_index[key]


class _AgentEmitter:
    """Emits the code of one role instance."""

    def __init__(self, kernel: Kernel, role: Role, instance: int, tables: _Tables, port_share: float, mma_sync: bool):
        self.kernel, self.role, self.instance, self.tables = kernel, role, instance, tables
        self.arch = kernel.arch
        self.port_share, self.mma_sync = port_share, mma_sync
        self.counters: dict[str, int] = {}
        self.op: Op | None = None
        self.columns = {name: i for i, name in enumerate(kernel.tiles)}
        self.tensor_index = {tensor.name: i for i, tensor in enumerate(kernel.tensors)}
        self.barrier_base: dict[str, int] = {}
        base = 0
        for barrier in kernel.barriers:
            self.barrier_base[barrier.name] = base
            base += barrier.stages * max(1, barrier.per_instance)

    def emit(self, kind: int, name: str, **operands: int) -> int:
        row = [0] * im.CODE_WIDTH
        row[im.K_KIND], row[im.K_NAME] = kind, self.tables.name(name)
        for key, value in operands.items():
            row[int(key[1:])] = value
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
        self.set(pc, im.M_COUNTER, self.counters.setdefault(use.counter, len(self.counters)))

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
            im.P_TENSOR: (demand.tensor - demand.held) * im.TICKS,
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


def lower_all(kernels: Sequence[Kernel], clock_mhz: float) -> list[im.Image]:
    """Lower kernels launched one after the other; tensors of the same name share their L2 lines."""
    lines = all_lines(kernels)
    return [lower(kernel, clock_mhz, lines) for kernel in kernels]


def all_lines(kernels: Sequence[Kernel]) -> dict[str, int]:
    """Tensors of kernels launched one after the other and their L2 lines. Raises ModelError where two disagree."""
    lines: dict[str, int] = {}
    for kernel in kernels:
        for tensor in kernel.tensors:
            if lines.setdefault(tensor.name, tensor.lines) != tensor.lines:
                raise ModelError(
                    f"{kernel.name}: tensor '{tensor.name}' has {tensor.lines} lines, before {lines[tensor.name]}"
                )
    return lines


def lower(kernel: Kernel, clock_mhz: float, lines: Mapping[str, int] | None = None) -> im.Image:
    """The image of ``kernel``, see :func:`lower_program`."""
    return lower_program(kernel, clock_mhz, lines)[0]


def lower_program(
    kernel: Kernel, clock_mhz: float, lines: Mapping[str, int] | None = None
) -> tuple[im.Image, tuple[Op | None, ...]]:
    """Verify ``kernel`` and lower it onto its architecture at ``clock_mhz``.

    Returns the image, and for each of its instructions the operation it was lowered from.

    The clock matters because memory and launch have rates and times of their own. ``lines``: all
    tensors of a sequence of kernels and their L2 lines; None: the kernel's own. Raises
    :class:`BudgetError` or :class:`ModelError` from verification.
    """
    verify(kernel)
    slots = ctas_per_sm(kernel)
    ops = [op for role in kernel.roles for op in walk(role.body)]
    mmas = [op for op in ops if isinstance(op, Mma)]
    mma_sync = any(isinstance(op, Vector) and op.mma_sync_flops > 0 for op in ops)
    share = mma_port_share(mmas, kernel.arch)
    tables = _Tables()
    entry: list[int] = []
    agents: list[str] = []
    roles: list[str] = []
    counters = 1
    for role in kernel.roles:
        for instance in range(role.count):
            entry.append(len(tables.code))
            emitter = _AgentEmitter(kernel, role, instance, tables, share, mma_sync)
            emitter.body(role.body)
            emitter.op = None
            emitter.emit(im.END, "end")
            counters = max(counters, len(emitter.counters))
            agents.append(role.name if role.count == 1 else f"{role.name}{instance}")
            roles.append(role.name)
    need: list[int] = []
    barrier_names: list[str] = []
    for barrier in kernel.barriers:
        for instance in range(max(1, barrier.per_instance)):
            for stage in range(barrier.stages):
                need.append(barrier.arrivals)
                suffix = f"@{instance}" if barrier.per_instance else ""
                barrier_names.append(f"{barrier.name}{suffix}" + (f"[{stage}]" if barrier.stages > 1 else ""))
    lines = lines or {tensor.name: tensor.lines for tensor in kernel.tensors}
    first = dict(zip(lines, np.cumsum([0, *lines.values()]).tolist(), strict=False))
    activity = np.zeros((len(tables.demand) + len(tables.activity), im.UNIT_COUNT), dtype=np.int64)
    for i, demand in enumerate(tables.demand):
        activity[i, : len(im.PIPES)] = demand.counted
    for i, (pc, units) in enumerate(tables.activity.items(), start=len(tables.demand)):
        tables.code[pc][im.K_ACTIVITY] = i
        for unit, amount in units.items():
            activity[i, unit] = round(amount)
    columns = tuple(kernel.tiles)
    machine = _machine(kernel, kernel.arch, clock_mhz, slots, len(agents), len(need), counters)
    image = im.Image(
        machine=machine,
        code=np.array(tables.code, dtype=np.int64),
        demand=np.array([[d.alone, d.beside] for d in tables.demand], dtype=np.int64).reshape(-1, 2, len(im.PIPES)),
        mma_delay=np.array([d.mma_delay for d in tables.demand], dtype=np.int64),
        mma_stop=np.array([d.mma_stop for d in tables.demand], dtype=np.int64),
        stall=np.array([d.stall for d in tables.demand], dtype=np.int64).reshape(-1, 2),
        activity=activity,
        entry=np.array(entry, dtype=np.int64),
        need=np.array(need, dtype=np.int64),
        tiles=np.ascontiguousarray(np.stack([kernel.tiles[c] for c in columns], axis=1), dtype=np.int64),
        line_base=np.array([first[tensor.name] for tensor in kernel.tensors], dtype=np.int64),
        line_end=np.array([first[t.name] + t.lines for t in kernel.tensors], dtype=np.int64),
        slowest_line=np.array([ticks(extra) for extra in kernel.arch.hbm.slowest_line_cycles], dtype=np.int64),
        lines=sum(lines.values()),
        names=tuple(tables.names),
        agents=tuple(agents),
        agent_role=tuple(roles),
        barriers=tuple(barrier_names),
        columns=columns,
    )
    return image, tuple(tables.ops)


def _machine(
    kernel: Kernel, arch: Arch, clock_mhz: float, slots: int, agents: int, barriers: int, counters: int
) -> im.Machine:
    sm = arch.sm
    groups = arch.chip.sm_count // kernel.cluster
    cluster_tiles = kernel.tile_count // kernel.cluster
    persistent = kernel.mode != "single"

    def rate(bytes_per_cycle: float) -> int:
        return round(float(im.TICKS * 2**im.RATE_SHIFT / bytes_per_cycle))

    cycles_per_ns = clock_mhz / 1000.0
    tma = sm.tma
    threads = arch.l2.latency_cycles + sm.cp_async.latency_extra_cycles
    load_latency = tma.latency_cycles if tma else threads
    return im.Machine(
        groups=groups,
        cluster=kernel.cluster,
        slots=slots,
        agents=agents,
        barriers=max(1, barriers),
        counters=counters,
        tensors=max(1, len(kernel.tensors)),
        mode=_MODES[kernel.mode],
        grid=min(groups * slots, cluster_tiles) if persistent else cluster_tiles,
        cluster_tiles=cluster_tiles,
        ramp=ticks((arch.launch.ramp_ns + arch.launch.first_load_ns) * cycles_per_ns),
        dispatch=ticks(arch.launch.cta_dispatch_ns * cycles_per_ns),
        turnover=ticks(arch.launch.cta_turnover_cycles),
        remote_latency=ticks(sm.sync.remote_arrive_cycles),
        named_wake=ticks(sm.sync.named_barrier_cycles),
        tma_latency=ticks(load_latency),
        thread_latency=ticks(threads),
        store_latency=ticks(tma.store_latency_cycles if tma else threads),
        multicast_latency=ticks(tma.multicast_extra_cycles if tma else 0.0),
        miss_latency=ticks(max(0.0, arch.hbm.latency_cycles - arch.l2.latency_cycles)),
        ingress_rate=rate(tma.bytes_per_cycle if tma else arch.sm.smem.bytes_per_cycle / 2),
        egress_rate=rate(tma.store_bytes_per_cycle if tma else arch.sm.smem.bytes_per_cycle / 2),
        l2_rate=rate(arch.l2.bytes_per_cycle),
        reduce_rate=rate(arch.atomics.reduce_bytes_per_cycle),
        hbm_rate=rate(arch.hbm.achieved_bytes_per_second / (clock_mhz * 1e6)),
        l2_bytes=arch.l2.capacity_bytes,
        l2_partitions=arch.l2.partitions,
        l2_coalescers=arch.l2.coalescers,
        mma_ahead=ticks(sm.interference.absorbed_ahead_cycles) if sm.interference else 0,
    )
