"""Lowering: a verified kernel becomes an :class:`~fasim.engine.image.Image`.

Names become indices, roles are instantiated and emitted (:mod:`fasim.lowering.emit`), loops get trip counts from the
tile table, the chip becomes scalars. See ``docs/semantics.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fasim.arch import Arch
from fasim.engine import image as im
from fasim.errors import ModelError
from fasim.lowering.cost import mma_port_share, ticks
from fasim.lowering.emit import Tables, emit_instance
from fasim.program.language import Kernel, walk
from fasim.program.ops import Mma, Op, Vector
from fasim.program.rules import ctas_per_sm, verify

_MODES = {"single": im.SINGLE, "static": im.STATIC, "dynamic": im.DYNAMIC}


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
    tables = Tables()
    entry: list[int] = []
    agents: list[str] = []
    roles: list[str] = []
    counters = 1
    for role in kernel.roles:
        for instance in range(role.count):
            first_op, used = emit_instance(kernel, role, instance, tables, share, mma_sync)
            entry.append(first_op)
            counters = max(counters, used)
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
        names=tuple(label for label, _ in tables.names),
        phases=tuple(phase for _, phase in tables.names),
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
