"""What the reference engine tells someone who follows a run: enough to execute the program on values.

Callbacks come in the order of events and change nothing: a run with an observer has the ticks, counters and trace
of a run without one.
"""

from __future__ import annotations

from typing import Protocol

from fasim.engine.reference_state import Agent


class Observer(Protocol):
    """Follows a run. What :meth:`begin` returns stands for that execution of the instruction in later calls."""

    def start(self, group: int, slot: int, tick: int) -> None:
        """A new cluster takes a slot of a group: fresh shared memory, barriers and counters."""

    def begin(self, agent: Agent, pc: int, tick: int) -> object:
        """``agent`` begins to execute the instruction at ``pc``."""

    def copying(self, step: object, line: int, until: int) -> None:
        """The copy ``step`` moves memory line ``line`` and is complete at tick ``until``."""

    def issued(self, step: object, until: int) -> None:
        """The MMA group ``step`` is issued and will be complete at tick ``until``."""

    def arrived(self, step: object, rank: int, barrier: int, phases: int, tick: int) -> None:
        """An arrival by ``step`` reaches a barrier of the CTA ``rank``, which has then completed ``phases``."""

    def passed(self, step: object, barrier: int, phase: int) -> None:
        """The wait ``step`` found ``phase`` of ``barrier`` complete."""

    def end(self, step: object, tick: int) -> None:
        """The agent goes on to its next instruction."""

    def finished(self, agent: Agent, tick: int) -> None:
        """The agent has reached its end."""
