"""Where Numba keeps the compiled engine: one folder per version of the engine's sources.

Numba only looks at the file that holds a function, so a change in a module the engine inlines would
go unseen; a digest of all of them in the folder's name rules that out. A folder that cannot be
written is no error: the engine is then compiled anew in each process.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numba
from numba.extending import register_jitable

_SOURCES = (
    "engine/account.py",
    "engine/agenda.py",
    "engine/cache.py",
    "engine/common.py",
    "engine/compiled.py",
    "engine/instructions.py",
    "engine/memory.py",
    "engine/state.py",
    "image.py",
    "run.py",
)


def engine_digest() -> str:
    """Digest of the sources and of the Numba version that made the machine code."""
    digest = hashlib.sha256(numba.__version__.encode())
    root = Path(__file__).parents[1]
    for name in _SOURCES:
        digest.update((root / name).read_bytes())
    return digest.hexdigest()[:16]


def _candidates() -> list[Path]:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = getattr(os, "getuid", lambda: 0)()
    return [Path(base) / "fasim", Path(tempfile.gettempdir()) / f"fasim-{user}"]


def prepare_cache() -> Path | None:
    """Point Numba at the first writable cache folder, unless NUMBA_CACHE_DIR already says where."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return Path(os.environ["NUMBA_CACHE_DIR"])
    for folder in _candidates():
        target = folder / engine_digest()
        try:
            target.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target):
                pass
        except OSError:
            continue
        numba.config.CACHE_DIR = str(target)  # type: ignore[attr-defined]
        return target
    return None


prepare_cache()
# Without the reference-counting runtime: nothing in the engine allocates, and counting references to
# its state arrays at every call costs ten times the work itself.
_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy"}
# Only the entry is stored and can be called from Python. What it calls is compiled for it alone, which
# halves the time to compile: no wrappers, and no copies for arguments that happen to be constants.
_PART: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
entry = numba.njit(cache=True, **_OPTIONS)
jit = register_jitable(**_PART)
inline = register_jitable(forceinline=True, **_PART)
