"""What execution on values finds wrong, each thing once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["race", "data", "scale", "output"]


@dataclass(frozen=True)
class Finding:
    """Something wrong: ``message`` names cause and cycles, ``count`` says how often it happened.

    ``kind``: ``race`` (two accesses that nothing orders), ``data`` (a place that does not hold what is read from it),
    ``scale`` (numbers relative to different row maxima), ``output`` (rows stored twice or never).
    """

    kind: Kind
    kernel: str
    role: str
    op: str
    place: str
    message: str
    count: int = 1


class Log:
    """Findings in the order of their first occurrence."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], Callable[[], Finding]] = {}
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, key: tuple[str, ...], describe: Callable[[], Finding]) -> None:
        """Add what ``describe`` will say, when all times are known; one with the same ``key`` is only counted."""
        self._found.setdefault(key, describe)
        self._counts[key] = self._counts.get(key, 0) + 1

    @property
    def findings(self) -> list[Finding]:
        """All of them, after the run."""
        return [replace(describe(), count=self._counts[key]) for key, describe in self._found.items()]
