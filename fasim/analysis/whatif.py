"""What-ifs: resources of a chip by name, and the overrides that make one faster.

A resource is a set of numbers of the arch file: rates, which are multiplied, and times, which are divided. Every
what-if is a list of "path=value" texts as ``--set`` takes them, so anybody can repeat it by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fasim.arch import Arch
from fasim.errors import ConfigError, did_you_mean

#: Factor that stands for "infinitely fast": less than a tick is left of most times, and no run takes none at all.
INFINITE = 1000.0


@dataclass(frozen=True)
class Resource:
    """Paths in an arch file that belong together; a path that a chip does not have is skipped."""

    meaning: str
    rates: tuple[str, ...] = ()
    times: tuple[str, ...] = ()


_RESOURCES: dict[str, Resource] = {
    "tensor": Resource(
        "tensor cores",
        ("sm.tensor.flops_per_cycle", "sm.tensor.mma_sync_flops_per_cycle"),
        ("sm.tensor.async_mma.overhead_cycles", "sm.tensor.async_mma.issue_interval_cycles"),
    ),
    "mufu": Resource(
        "exponentials",
        ("sm.mufu.ops_per_cycle", "sm.mufu.other_ops_per_cycle"),
        ("sm.interference.mufu_cycles", "sm.interference.mufu_port_cycles"),
    ),
    "fma": Resource(
        "FMA pipe",
        ("sm.fma.ops_per_cycle", "sm.fma.imad_ops_per_cycle", "sm.fma.packed_ops_per_cycle"),
        ("sm.interference.ffma_port_cycles", "sm.interference.fmul_port_cycles", "sm.interference.fadd_port_cycles"),
    ),
    "alu": Resource(
        "ALU pipe: maxima, conversions, masks",
        ("sm.alu.ops_per_cycle", "sm.alu.convert_ops_per_cycle", "sm.alu.convert_fp8_ops_per_cycle"),
        (
            "sm.interference.alu_cycles",
            "sm.interference.alu_port_cycles",
            "sm.interference.fsel_port_cycles",
        ),
    ),
    "issue": Resource("warp schedulers", ("sm.issue.ops_per_cycle",)),
    "lsu": Resource("shuffles", ("sm.lsu.shuffle_ops_per_cycle",), ("sm.interference.shuffle_cycles",)),
    "smem": Resource("shared-memory port", ("sm.smem.bytes_per_cycle",)),
    "tmem": Resource("tensor memory", ("sm.tmem.load_bytes_per_cycle", "sm.tmem.store_bytes_per_cycle")),
    "tma": Resource(
        "copies between L2 and SM: TMA, cp.async",
        ("sm.tma.bytes_per_cycle", "sm.tma.store_bytes_per_cycle"),
        (
            "sm.tma.issue_interval_cycles",
            "sm.tma.latency_cycles",
            "sm.tma.multicast_extra_cycles",
            "sm.tma.store_latency_cycles",
            "sm.cp_async.issue_cycles",
            "sm.cp_async.latency_extra_cycles",
        ),
    ),
    "l2": Resource("L2 bandwidth", ("l2.bytes_per_cycle", "atomics.reduce_bytes_per_cycle")),
    "hbm": Resource("HBM", ("hbm.achieved_bytes_per_second",), ("hbm.latency_cycles",)),
    "barriers": Resource("mbarriers, named barriers, __syncthreads", (), ("sm.sync",)),
    "latency": Resource(
        "result latencies, MMA completion included",
        (),
        (
            "sm.issue.stall_cycles",
            "sm.fma.latency_cycles",
            "sm.alu.latency_cycles",
            "sm.mufu.latency_cycles",
            "sm.lsu.shuffle_latency_cycles",
            "sm.smem.latency_cycles",
            "sm.tensor.mma_sync_latency_cycles",
            "sm.tensor.async_mma.completion_cycles",
            "sm.tensor.async_mma.two_cta_completion_cycles",
            "sm.tmem.load_latency_cycles",
            "sm.interference.shuffle_latency_cycles",
        ),
    ),
    "launch": Resource("launch, CTA start and turnover", (), ("launch",)),
    # A pipe keeps at least the interval that it has without an MMA.
    "interference": Resource(
        "MMA and vector work slowing each other",
        (),
        (
            "sm.interference.alu_cycles",
            "sm.interference.mufu_cycles",
            "sm.interference.shuffle_cycles",
            "sm.interference.alu_port_cycles",
            "sm.interference.fsel_port_cycles",
            "sm.interference.mufu_port_cycles",
            "sm.interference.ffma_port_cycles",
            "sm.interference.fmul_port_cycles",
            "sm.interference.fadd_port_cycles",
            "sm.interference.ex2_wait_cycles",
            "sm.interference.ex2_wait_ffma_cycles",
            "sm.interference.fmul_stop_cycles",
            "sm.interference.ffma_delay_cycles",
            "sm.interference.fmul_delay_cycles",
            "sm.interference.alu_delay_cycles",
            "sm.mma_sync_interference",
        ),
    ),
}

#: Resources that do the vector work (softmax, rescaling) between them; "vector" is all of them at once.
VECTOR: tuple[str, ...] = ("mufu", "fma", "alu", "lsu", "issue")

#: Share of the gain of all vector units from which on one of them is called the limit.
MOST = 0.6

RESOURCES: dict[str, Resource] = {
    **_RESOURCES,
    "vector": Resource(
        "softmax: exponentials, FMA, ALU, shuffles, schedulers",
        tuple(path for name in VECTOR for path in _RESOURCES[name].rates),
        tuple(path for name in VECTOR for path in _RESOURCES[name].times),
    ),
}


@dataclass(frozen=True)
class Gain:
    """How much faster a run gets, in per cent, with a resource 10 % faster and (None: not asked) infinitely fast."""

    resource: str
    meaning: str
    tenth_percent: float
    infinite_percent: float | None


def limits(gains: Sequence[Gain]) -> tuple[Gain, Gain]:
    """The resource whose speed matters most, and the next one that is not a part of it.

    The vector units count together, because a softmax spread evenly over them is limited by none of them alone; one
    that has most of their common gain (``MOST``) stands for them. It can have more than all of them together, where
    the others faster put the warps into a worse rhythm.
    """
    parts = {gain.resource: gain for gain in gains if gain.resource in VECTOR}
    strongest = max(parts.values(), key=lambda gain: gain.tenth_percent)

    def matters(gain: Gain) -> float:
        return max(gain.tenth_percent, strongest.tenth_percent) if gain.resource == "vector" else gain.tenth_percent

    first, second, *_ = sorted((gain for gain in gains if gain.resource not in parts), key=matters, reverse=True)

    def named(gain: Gain) -> Gain:
        alone = gain.resource == "vector" and strongest.tenth_percent >= MOST * gain.tenth_percent
        return strongest if alone else gain

    return named(first), named(second)


def faster(arch: Arch, name: str, factor: float = INFINITE) -> tuple[str, ...]:
    """Overrides that make resource ``name`` of ``arch`` ``factor`` times as fast.

    Raises ConfigError for a name that is not in RESOURCES, with the choices.
    """
    if name not in RESOURCES:
        raise ConfigError(f"unknown resource '{name}'{did_you_mean(name, RESOURCES)}")
    return scaled(arch, RESOURCES[name], factor)


def has(arch: Arch, name: str) -> bool:
    """Whether ``arch`` has any number of resource ``name`` above zero."""
    return bool(faster(arch, name, 1.1))


def scaled(arch: Arch, resource: Resource, factor: float) -> tuple[str, ...]:
    """Overrides that multiply the rates of ``resource`` by ``factor`` and divide its times."""
    rates = [(path, value * factor) for path, value in _numbers(arch, resource.rates)]
    times = [(path, value / factor) for path, value in _numbers(arch, resource.times)]
    return tuple(f"{path}={value!r}" for path, value in rates + times)


def _numbers(arch: Arch, paths: Sequence[str]) -> list[tuple[str, float]]:
    """Every number above zero at or below the paths, with its own path."""
    content = arch.model_dump(mode="json")
    found: list[tuple[str, float]] = []
    for path in paths:
        node: Any = content
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        leaves = {f"{path}.{key}": value for key, value in node.items()} if isinstance(node, dict) else {path: node}
        found += [(name, float(value)) for name, value in leaves.items() if isinstance(value, int | float) and value]
    return found
