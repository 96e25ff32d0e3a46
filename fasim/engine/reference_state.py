"""What changes during a run of the reference engine: SMs, role instances, CTAs and their slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import simpy

from fasim.engine import image as im


@dataclass
class Sm:
    """What the CTAs on one SM share."""

    free: list[int] = field(default_factory=lambda: [0] * len(im.PIPES))  # next free tick per pipe
    mma_until: int = 0  # the tensor core runs asynchronous MMAs until here
    owed: int = 0  # delay by vector work that the next MMA instruction pays; negative: absorbed in advance
    owed_at: int = 0
    absorbed: int = 0  # of the running MMA, see image.M_ABSORB
    stopped: int = 0  # delay that nothing absorbs
    tma_free: int = 0
    ingress_free: int = 0
    egress_free: int = 0
    # For the trace: the slice that holds each pipe, and the one in which the TMA was given its last copy.
    held_by: list[int] = field(default_factory=lambda: [im.NO_CAUSE] * len(im.PIPES))
    tma_held_by: int = im.NO_CAUSE

    def settle(self, now: int, ahead: int) -> None:
        """Let the running MMA absorb delay since the last look; in advance as much as in ``ahead`` ticks."""
        gone = ((now - self.owed_at) * self.absorbed) >> im.FRACTION_SHIFT
        self.owed = max(-((ahead * self.absorbed) >> im.FRACTION_SHIFT), self.owed - gone)
        self.owed_at = now


@dataclass
class Agent:
    """One role instance of one CTA."""

    group: int
    index: int  # within the group
    kind: int  # within the CTA
    sm: int  # within the group
    slot: int
    start: simpy.Event
    pc: int = 0
    row: int = -1
    iteration: int = -1
    sequence: int = 0  # tiles taken
    done_at: int | None = None
    started: bool = False
    left: dict[int, int] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)
    address: dict[int, int] = field(default_factory=dict)
    mma_ends: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    loads_done: int = 0
    stores_done: int = 0
    waiting: tuple[int, int] | None = None  # barrier and phase, or (SCHEDULER, 0)
    since: int = 0
    wake: simpy.Event | None = None
    wake_ticks: int = 0
    # For the trace: slices of this role and of what it started, NO_CAUSE where they were not kept
    last_slice: int = im.NO_CAUSE  # of the role
    mma_slices: list[dict[int, int]] = field(default_factory=list)  # beside mma_ends, by rank
    commit_slices: list[int] = field(default_factory=list)  # beside commits: the last MMA of the group
    load_slice: int = im.NO_CAUSE  # the load that is done at loads_done
    store_slice: int = im.NO_CAUSE  # issued the store that is done at stores_done
    released_by: int = im.NO_CAUSE  # of the wait that ends
    step: object = None  # what an observer calls the instruction being executed


@dataclass
class Cta:
    """A CTA's barriers."""

    arrived: list[int]
    phases: list[int]
    agents: list[Agent]


@dataclass
class Slot:
    """One CTA slot of every SM of a group: the home of a cluster."""

    ctas: list[Cta]  # by rank
    cluster: int = -1
    running: int = 0
    drawn: list[int] = field(default_factory=list)
