"""fasim: a discrete-event simulator of attention kernels on NVIDIA GPUs."""

from __future__ import annotations

import importlib
from typing import Any

from fasim.results.shown import show_with

__version__ = "0.1.0"


def _view(name: str) -> Any:
    """A view of a run that is imported when it is called."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("fasim.views.notebook"), name)(*args, **options)

    return call


for _name in ("run_timeline", "run_frame", "run_html"):
    show_with(_name, _view(_name))
