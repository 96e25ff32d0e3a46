"""What the machine remembers of CTAs, role instances and instructions in flight."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from fasim.checker.storage import Clock, PieceKey, Share, Storage, join
from fasim.engine import image as im
from fasim.engine.reference_state import Agent
from fasim.program.effects import Effect
from fasim.program.language import Role
from fasim.program.ops import Op
from fasim.program.tiles import Cursor


@dataclass
class Cta:
    """Storage of one CTA and what an observer of its barriers knows."""

    smem: Storage
    tmem: Storage
    pending: dict[int, Clock] = field(default_factory=dict)  # barrier -> clocks of all arrivals so far
    phases: dict[int, list[Clock]] = field(default_factory=dict)


@dataclass
class Actor:
    """A role instance in a CTA of a cluster."""

    agent: Agent
    role: Role
    instance: int
    ctas: list[Cta]  # of the cluster, by rank
    key: tuple[int, int, int, int]
    clock: Clock = field(default_factory=dict)
    counts: dict[Cursor | None, int] = field(default_factory=dict)
    mma: Clock = field(default_factory=dict)  # the queue of its MMAs
    #: Where the role's warps are looked at one by one (``effects.Syncthreads``): what all of them know, and what each
    #: knows of its own part beyond that and ``clock``, which is what a warp knows of work on its own rows.
    met: Clock | None = None
    own: Clock = field(default_factory=dict)
    groups: list[Execution] = field(default_factory=list)
    copies: dict[str, list[Execution]] = field(default_factory=lambda: {"load": [], "store": []})
    registers: dict[str, Storage] = field(default_factory=dict)
    accesses: dict[Hashable, int] = field(default_factory=dict)  # by component
    turns: dict[type[Effect], int] = field(default_factory=dict)  # executions in this work tile
    copied: dict[tuple[str, str], int] = field(default_factory=dict)  # copies of this work tile by tensor and kind

    @property
    def name(self) -> str:
        """Role and instance, as in traces."""
        return self.role.name if self.role.count == 1 else f"{self.role.name}{self.instance}"

    def count(self, cursor: Cursor | None) -> None:
        """The role has executed what it counts by ``cursor``."""
        if cursor is not None:
            self.counts[cursor] = self.counts.get(cursor, 0) + 1

    def learn(self, clock: Clock, own: bool = False) -> None:
        """The role knows what ``clock`` knows; ``own``: each warp of it only of its own part.

        Of copies by its own threads a warp knows its own part, however it waits.
        """
        if self.met is None:
            join(self.clock, clock)
            return
        for component, count in clock.items():
            if own or (isinstance(component, tuple) and component[:2] == ("threads", self.key)):
                join(self.own, {component: count})
            else:
                join(self.clock, {component: count})
                join(self.met, {component: count})

    def meet(self) -> None:
        """The warps of the role meet."""
        join(self.clock, self.own)
        self.met = dict(self.clock)

    @property
    def common(self) -> Clock:
        """What all warps of the role know."""
        return self.clock if self.met is None else self.met

    def known(self, more: Clock) -> Clock:
        """``more`` and what the role knows, taken as one."""
        known = dict(more)
        for clock in (self.clock, self.own):
            join(known, clock)
        return known


@dataclass(frozen=True)
class Located:
    """An operand found: an interval of addresses of a storage."""

    storage: Storage
    name: str
    stage: int
    share: Share
    lo: float
    hi: float
    text: str
    columns: Share = (0.0, 1.0)  # of what it holds, to be read
    of: Literal["register", "rows", "all"] = "register"  # whose it is: the role's, each warp's own rows, everybody's

    @property
    def key(self) -> PieceKey:
        """What it is called in its storage."""
        return self.name, self.stage, self.share


@dataclass(eq=False)
class Execution:
    """One execution of an instruction."""

    actor: Actor
    op: Op
    pc: int
    tile: int
    begin: int
    until: int | None = None
    line: int = -1
    clock: Clock = field(default_factory=dict)
    found: list[tuple[Effect, list[dict[str, Located]]]] = field(default_factory=list)  # operands by rank
    done: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.actor.name} '{self.op.label}'"

    def cycles(self) -> str:
        """When it ran."""
        until = "" if self.until is None else f" to {self.until / im.TICKS:.0f}"
        return f"cycle {self.begin / im.TICKS:.0f}{until}"
