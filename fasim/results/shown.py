"""How a run shows itself: the package fills in its views here, so that results know none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_views: dict[str, Callable[..., Any]] = {}


def show_with(name: str, view: Callable[..., Any]) -> None:
    """Let ``view`` be what a run calls ``name``."""
    _views[name] = view


def shown(name: str) -> Callable[..., Any]:
    """The view called ``name``."""
    return _views[name]
