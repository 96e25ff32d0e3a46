"""The architecture model: what an ``arch_models/*.toml`` file says about one GPU; its SM is in :mod:`fasim.arch.sm`.

Plain data with types. Rates are per SM unless a docstring says "chip", ``*_cycles`` are SM clock cycles. The numbers
and their sources live in the TOML files, not here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from fasim.arch.sm import DtypeTable, Sm
from fasim.files import Table, keyed_by, one_of

#: Kinds of work with a documented sustained clock, the keys of ``clock.sustained_mhz``.
WORK_KINDS = ("tensor_16bit", "tensor_8bit", "memory")

ClockTable = Annotated[Mapping[Annotated[str, AfterValidator(one_of(WORK_KINDS))], PositiveFloat], keyed_by(WORK_KINDS)]


class Chip(Table):
    """The whole chip."""

    sm_count: PositiveInt
    datasheet_tflops: DtypeTable = Field(default={})
    """Published dense peak, used only to cross-check ``flops_per_cycle``."""


class LoadLine(Table):
    """Clock of a power-limited chip under attention: a line in the achieved share of the dense tensor peak."""

    idle_mhz: PositiveFloat
    """At no tensor work."""
    drop_mhz: NonNegativeFloat
    """How much lower at the full dense tensor peak of the dtype."""

    def mhz(self, peak_share: float) -> float:
        """The clock at ``peak_share`` (0 to 1)."""
        return self.idle_mhz - self.drop_mhz * peak_share


class Clock(Table):
    """SM clock in MHz."""

    max_mhz: PositiveFloat
    """Highest clock the chip runs at."""
    datasheet_mhz: PositiveFloat
    """Clock behind the datasheet's tensor peak."""
    sustained_mhz: ClockTable
    """Clock held under load, by kind of work: busy tensor cores (16-bit, 8-bit and narrower), or memory bound."""
    attention: LoadLine | None = None
    """Clock under attention kernels; without it ``sustained_mhz`` stands for them."""


class L2(Table):
    """The L2 cache of the whole chip."""

    capacity_bytes: PositiveInt
    partitions: PositiveInt
    """Parts that each serve the SMs on their side.

    A line belongs to all of them in equal shares; what several SMs of a side read is copied there.
    """
    coalescers: NonNegativeInt
    """Stages in front of L2, one a GPC, that merge loads of one line by several SMs; 0: none."""
    bytes_per_cycle: PositiveFloat
    """Chip, reads of distinct lines, per SM clock cycle."""
    latency_cycles: PositiveFloat
    """Hit, averaged over near and far partitions."""


class Hbm(Table):
    """Device memory."""

    capacity_bytes: PositiveInt
    peak_bytes_per_second: PositiveFloat
    achieved_bytes_per_second: PositiveFloat
    latency_cycles: PositiveFloat
    """Whole latency of a miss as a load sees it, L2 included."""
    slowest_line_cycles: Annotated[tuple[NonNegativeFloat, ...], Field(strict=False, min_length=10, max_length=10)] = (
        0.0,
    ) * 10
    """Extra latency of a 16 KiB TMA load that misses L2: ten equally likely values."""


class Atomics(Table):
    """Reductions at L2."""

    reduce_bytes_per_cycle: PositiveFloat
    """Chip, FP32 red or bulk reduce-add, per SM clock cycle."""


class LaunchCosts(Table):
    """Kernel launch and CTA life cycle."""

    ramp_ns: NonNegativeFloat
    """Fixed cost of a kernel inside a graph."""
    first_load_ns: NonNegativeFloat = 0.0
    """Extra latency of a launch's first loads; 0: not measured."""
    cta_dispatch_ns: NonNegativeFloat
    """Per CTA, chip."""
    cta_turnover_cycles: NonNegativeFloat
    """End of a CTA to the start of the next one in its place."""
    registers_realloc_cycles: NonNegativeFloat
    """setmaxnreg."""


@dataclass(frozen=True)
class Provenance:
    """Where an :class:`Arch` came from."""

    source: str
    """Path of the file it was loaded from."""
    digest: str
    """SHA-256 (hex) of the resolved content before overrides."""
    overrides: tuple[str, ...]
    """"path=value" texts applied on top, in order."""


class Arch(Table):
    """One GPU. Load with :func:`fasim.arch.load_arch`."""

    name: str
    title: str
    architecture: Literal["ampere", "hopper", "blackwell"]
    compute_capability: str
    chip: Chip
    clock: Clock
    sm: Sm
    l2: L2
    hbm: Hbm
    atomics: Atomics
    launch: LaunchCosts

    _provenance: Provenance | None = None  # private, so that no TOML key can set it

    def with_provenance(self, provenance: Provenance) -> Arch:
        """Return a copy that carries ``provenance``."""
        copy = self.model_copy()
        copy._provenance = provenance
        return copy

    @property
    def source(self) -> str:
        """Path of the file, or the name when not loaded from one."""
        return self._provenance.source if self._provenance else self.name

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the resolved content before overrides."""
        return self._provenance.digest if self._provenance else self.content_digest()

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides ("path=value") applied on top of the file, in order."""
        return self._provenance.overrides if self._provenance else ()

    def content_digest(self) -> str:
        """SHA-256 (hex) of this object's content, overrides included; comments and layout do not count."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __hash__(self) -> int:
        """Hash of the content (the tables in it are mappings, which have no hash of their own)."""
        return hash(self.content_digest())
