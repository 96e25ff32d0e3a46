"""How the engine is compiled and where Numba keeps the result: one folder per version of its sources.

Numba only looks at the file that holds a function, so a change in a module that the engine inlines
would go unseen; a digest of all of them in the folder's name rules that out. Having no folder to
write to is no error: the engine is then compiled anew in each process.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.extending import register_jitable

#: Every module whose text or constants end up in the machine code.
SOURCES = (
    "engine/account.py",
    "engine/agenda.py",
    "engine/cache.py",
    "engine/common.py",
    "engine/compiled.py",
    "engine/instructions.py",
    "engine/image.py",
    "engine/memory.py",
    "engine/state.py",
    "results/reasons.py",
)


def engine_digest() -> str:
    """Digest of the sources and of the Numba version that made the machine code."""
    digest = hashlib.sha256(numba.__version__.encode())
    root = Path(__file__).parents[1]
    for name in SOURCES:
        digest.update((root / name).read_bytes())
    return digest.hexdigest()[:16]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The first folder that is the user's own and can be written, None if there is none.

    Looks at ``NUMBA_CACHE_DIR``, at ``XDG_CACHE_HOME`` or ``~/.cache``, and at the system's folder for
    temporary files. Loading machine code from a folder of somebody else would run his code.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    home = environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folders = [Path(home, "fasim"), Path(tempfile.gettempdir(), f"fasim-{user}")]
    if "NUMBA_CACHE_DIR" in environment:
        folders.insert(0, Path(environment["NUMBA_CACHE_DIR"], "fasim"))
    for folder in folders:
        target = folder / engine_digest()
        try:
            target.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_uid != user:
                continue
            tempfile.TemporaryFile(dir=target).close()
        except OSError:
            continue
        return target
    return None


# Without the reference-counting runtime: nothing in the engine allocates, and counting references to
# its state arrays at every call costs ten times the work itself.
_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy"}
# Only the entry can be called from Python and is stored. What it calls is compiled for it alone, which
# halves the time to compile: no wrappers, and no copies for arguments that happen to be constants.
_PART: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
jit = register_jitable(**_PART)
inline = register_jitable(forceinline=True, **_PART)


def _load_without_blas() -> None:
    """Load Numba's array functions while ``scipy.linalg`` cannot be imported.

    They import it only to see whether there is a BLAS, which takes a tenth of the time of a command, and the engine has
    no linear algebra. In compiled code of the user's own, ``np.correlate`` and ``np.convolve`` then do without BLAS;
    ``np.dot`` and ``np.linalg`` look for it again.
    """
    name = "scipy.linalg"
    if name in sys.modules:
        return
    sys.modules[name] = None  # type: ignore[assignment]  # how the import system is told that there is none
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        del sys.modules[name]


def entry(function: Callable[..., None]) -> Callable[..., None]:
    """Compile ``function`` on its first call, or load it from the cache folder."""
    _load_without_blas()
    folder = cache_folder()
    if folder is None:
        return numba.njit(**_OPTIONS)(function)
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


class _Compiling(event.Listener):
    """Calls ``tell`` when Numba starts on a function of the engine, the first time only."""

    def __init__(self, tell: Callable[[], None]):
        self.tell: Callable[[], None] | None = tell

    def on_start(self, started: event.Event) -> None:
        tell, function = self.tell, started.data["dispatcher"].py_func
        if tell is not None and function.__module__.startswith("fasim.engine."):
            self.tell = None
            tell()

    def on_end(self, ended: event.Event) -> None:
        pass


@contextmanager
def on_compile(tell: Callable[[], None]) -> Iterator[None]:
    """Call ``tell``, once, if the engine is not stored yet and has to be compiled in this context."""
    with event.install_listener("numba:compile", _Compiling(tell)):
        yield
