"""Structural rules a kernel must satisfy before anything runs: budgets, barriers, rings."""

from __future__ import annotations

from dataclasses import dataclass

from fasim.errors import BudgetError, ModelError
from fasim.program.language import Kernel, Role, walk
from fasim.program.ops import Arrive, BarrierUse, Copy, Loop, Mma, Op, TileLoop, Wait, WaitMma

#: Registers are allocated to a warp in units of 8 per thread.
_REGISTER_UNIT = 8

#: Committed MMA groups of a role that the engines remember.
MAX_PENDING = 8


def cta_registers(kernel: Kernel) -> int:
    """Registers one CTA occupies: what it launches with, or what its roles hold after reallocation."""
    roles = sum(32 * role.warps * role.count * _round_up(role.registers, _REGISTER_UNIT) for role in kernel.roles)
    if kernel.launch_registers is None:
        return roles
    return max(roles, kernel.threads * _round_up(kernel.launch_registers, _REGISTER_UNIT))


def ctas_per_sm(kernel: Kernel) -> int:
    """How many CTAs of ``kernel`` an SM holds, from registers, shared memory, threads and TMEM."""
    sm = kernel.arch.sm
    limits = [
        sm.max_ctas,
        sm.registers // cta_registers(kernel),
        sm.smem.capacity_bytes // (kernel.smem_bytes + sm.smem.reserved_cta_bytes),
        sm.max_threads // kernel.threads,
    ]
    if kernel.tmem_columns and sm.tmem is not None:
        limits.append(sm.tmem.columns // kernel.tmem_columns)
    if kernel.max_ctas_per_sm is not None:
        limits.append(kernel.max_ctas_per_sm)
    return max(1, min(limits))


@dataclass(frozen=True)
class Budget:
    """How much of a resource a CTA uses; ``used`` may exceed ``limit``."""

    resource: str
    used: int
    limit: int


def budgets(kernel: Kernel) -> list[Budget]:
    """Resources of one CTA against what the SM has for it."""
    sm = kernel.arch.sm
    found = [
        Budget("shared memory bytes", kernel.smem_bytes, sm.smem.max_cta_bytes),
        Budget("registers", cta_registers(kernel), sm.registers),
        *(Budget(f"registers per thread, {r.name}", r.registers, sm.max_registers_per_thread) for r in kernel.roles),
        Budget("threads", kernel.threads, sm.max_threads),
        Budget("named barriers", named_barriers(kernel), sm.named_barriers),
    ]
    if kernel.tmem_columns:
        found.append(Budget("TMEM columns", kernel.tmem_columns, sm.tmem.columns if sm.tmem else 0))
    return found


def named_barriers(kernel: Kernel) -> int:
    """Hardware named barriers of one CTA."""
    return sum(b.stages * max(1, b.per_instance) for b in kernel.barriers if b.named)


def verify(kernel: Kernel) -> None:
    """Check every structural rule; the first violation is raised.

    Raises :class:`BudgetError` for SMEM, TMEM and its regions, registers, threads and named barriers,
    :class:`ModelError` for a barrier without arrivals or waits, an unknown name, or a tile table that does not fit
    the grid.
    """
    _budgets(kernel)
    _tiles(kernel)
    arrivals: set[str] = set()
    waits: dict[str, tuple[Role, Op]] = {}
    for role in kernel.roles:
        _outside_tiles(kernel, role)
        for op in walk(role.body):
            _known_names(kernel, role, op)
            _limits(kernel, role, op)
            for use, arrives in _uses(op):
                name = use.barrier.partition("@")[0]
                if arrives:
                    arrivals.add(name)
                else:
                    waits.setdefault(name, (role, op))
    for name, (role, op) in waits.items():
        if name not in arrivals:
            raise ModelError(
                f"{kernel.name}: role '{role.name}', operation '{op.label}': "
                f"waits for '{name}', at which nothing arrives"
            )


def _budgets(kernel: Kernel) -> None:
    arch, sm = kernel.arch, kernel.arch.sm
    if kernel.smem_bytes > sm.smem.max_cta_bytes:
        parts = ", ".join(f"{b.name} {b.stages} x {b.bytes}" for b in kernel.buffers if b.aliases is None)
        raise BudgetError(
            f"{kernel.name} on {arch.name}: shared memory {kernel.smem_bytes} B exceeds {sm.smem.max_cta_bytes} B "
            f"per CTA ({parts}); use a smaller tile or fewer stages"
        )
    for role in kernel.roles:
        if role.registers > sm.max_registers_per_thread + 1:
            raise BudgetError(
                f"{kernel.name} on {arch.name}: role '{role.name}' needs {role.registers} registers per thread, "
                f"the limit is {sm.max_registers_per_thread}"
            )
    if cta_registers(kernel) > sm.registers:
        parts = ", ".join(f"{r.name} {32 * r.warps * r.count} x {r.registers}" for r in kernel.roles)
        raise BudgetError(
            f"{kernel.name} on {arch.name}: {cta_registers(kernel)} registers exceed {sm.registers} per SM ({parts})"
        )
    named = named_barriers(kernel)
    if named > sm.named_barriers:
        raise BudgetError(f"{kernel.name} on {arch.name}: {named} named barriers exceed {sm.named_barriers} per CTA")
    if kernel.threads > sm.max_threads:
        raise BudgetError(f"{kernel.name} on {arch.name}: {kernel.threads} threads exceed {sm.max_threads} per SM")
    if kernel.tmem_columns:
        if sm.tmem is None:
            raise BudgetError(f"{kernel.name}: {arch.name} has no tensor memory")
        if kernel.tmem_columns > sm.tmem.columns:
            raise BudgetError(
                f"{kernel.name} on {arch.name}: {kernel.tmem_columns} TMEM columns exceed {sm.tmem.columns}"
            )
        for region in kernel.regions:
            end = region.first + region.columns * region.stages
            if end > kernel.tmem_columns:
                raise BudgetError(
                    f"{kernel.name}: region '{region.name}' of tensor memory ends at column {end}, "
                    f"the kernel allocates {kernel.tmem_columns}"
                )


def _tiles(kernel: Kernel) -> None:
    lengths = {name: len(column) for name, column in kernel.tiles.items()}
    if not lengths or len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
        raise ModelError(f"{kernel.name}: tile table is empty or ragged: {lengths}")
    if kernel.tile_count % kernel.cluster:
        raise ModelError(
            f"{kernel.name}: {kernel.tile_count} work tiles do not divide into clusters of {kernel.cluster}"
        )
    if kernel.arch.chip.sm_count % kernel.cluster:
        raise ModelError(
            f"{kernel.name}: {kernel.arch.chip.sm_count} SMs do not divide into clusters of {kernel.cluster}"
        )


def _uses(op: Op) -> list[tuple[BarrierUse, bool]]:
    """Barrier uses of ``op`` and whether it arrives there."""
    if isinstance(op, Arrive):
        return [(op.use, True)]
    if isinstance(op, Wait):
        return [(op.use, False)]
    if isinstance(op, Copy | Mma) and op.bar is not None:
        return [(op.bar, True)]
    return []


def _known_names(kernel: Kernel, role: Role, op: Op) -> None:
    where = f"{kernel.name}: role '{role.name}', operation '{op.label}'"
    barriers = {barrier.name for barrier in kernel.barriers}
    for use, _ in _uses(op):
        if use.barrier.partition("@")[0] not in barriers:
            raise ModelError(f"{where}: unknown barrier '{use.barrier}'")
    if isinstance(op, Loop) and isinstance(op.trips, str) and op.trips not in kernel.tiles:
        raise ModelError(f"{where}: the tile table has no column '{op.trips}' (has {', '.join(kernel.tiles)})")
    if isinstance(op, Copy):
        tensor = next((t for t in kernel.tensors if t.name == op.tensor), None)
        if tensor is None:
            raise ModelError(f"{where}: unknown tensor '{op.tensor}'")
        if tensor.start not in kernel.tiles:
            raise ModelError(f"{where}: the tile table has no column '{tensor.start}' (has {', '.join(kernel.tiles)})")


def _limits(kernel: Kernel, role: Role, op: Op) -> None:
    """What the engines keep count of is bounded: MMA groups a role can wait behind."""
    where = f"{kernel.name}: role '{role.name}', operation '{op.label}'"
    if isinstance(op, Mma) and op.count < 0:
        raise ModelError(f"{where}: an MMA group of {op.count} instructions")
    if isinstance(op, WaitMma) and not 0 <= op.pending < MAX_PENDING:
        raise ModelError(f"{where}: pending {op.pending} is outside 0 to {MAX_PENDING - 1}")


def _outside_tiles(kernel: Kernel, role: Role) -> None:
    """Copies and loops over a column mean nothing without a work tile."""
    outside = [op for op in walk(role.body, enter_tiles=False) if not isinstance(op, TileLoop)]
    for op in outside:
        if isinstance(op, Copy) or (isinstance(op, Loop) and isinstance(op.trips, str)):
            raise ModelError(f"{kernel.name}: role '{role.name}', operation '{op.label}': outside the loop over tiles")


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
