import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest

from fasim.engine import cache

ENGINE = Path(cache.__file__).parent


PREPARE = """
from fasim.engine import cache, compiled
with cache.on_compile(lambda: print("compiling")):
    compiled.prepare()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder chosen in an environment whose home and temporary folder are below ``tmp_path``."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))

    def choose(**variables):
        return cache.cache_folder({"XDG_CACHE_HOME": str(tmp_path / "home"), **variables})

    return choose


def start(caches):
    """A process that prepares the engine, with a cache of its own."""
    variables = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    variables |= {"XDG_CACHE_HOME": str(caches), "TMPDIR": str(caches), "PYTHONPATH": str(ENGINE.parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    return out


def test_every_source_of_the_engine_counts():
    others = {
        "engine/__init__.py",
        "engine/observer.py",
        "engine/reference.py",
        "engine/reference_state.py",
        "engine/reference_units.py",
    }
    compiled = {f"engine/{path.name}" for path in ENGINE.glob("*.py")} - others
    assert set(cache.SOURCES) == compiled | {"results/reasons.py"}


def test_a_changed_source_changes_the_digest(tmp_path, monkeypatch):
    for name in cache.SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ENGINE.parent / name).read_bytes())
    before = cache.engine_digest()
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "engine" / "cache.py"))
    assert cache.engine_digest() == before
    (tmp_path / "engine" / "agenda.py").write_text("changed")
    assert cache.engine_digest() != before


def test_user_folder_comes_first(tmp_path, folder):
    assert folder() == tmp_path / "home" / "fasim" / cache.engine_digest()


def test_numba_folder_comes_before_it(tmp_path, folder):
    assert folder(NUMBA_CACHE_DIR=str(tmp_path / "numba")) == tmp_path / "numba" / "fasim" / cache.engine_digest()


def test_unwritable_user_folder_falls_back_to_temporary_files(tmp_path, folder):
    (tmp_path / "home").write_text("a file where the folder should be")
    assert folder().is_relative_to(tmp_path / "temporary")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners to tell apart")
def test_folder_of_somebody_else_is_not_used(folder, monkeypatch):
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    assert folder() is None


def test_nowhere_to_write_is_no_error(monkeypatch):
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    calls = []
    monkeypatch.setattr(numba, "njit", lambda **options: calls.append(options) or (lambda function: function))
    cache.entry(len)
    assert "cache" not in calls[0]


def test_entry_leaves_numbas_own_cache_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path)
    before = numba.config.CACHE_DIR

    def nothing():
        pass

    stored = cache.entry(nothing)
    assert Path(stored._cache.cache_path).is_relative_to(tmp_path)
    assert before == numba.config.CACHE_DIR


@pytest.mark.parametrize(("module", "told"), [("fasim.engine.compiled", 1), ("somebody.else", 0)])
def test_only_the_engine_is_announced_and_once(module, told):
    calls = []
    function = SimpleNamespace(py_func=SimpleNamespace(__module__=module))
    with cache.on_compile(lambda: calls.append(1)):
        for _ in range(2):
            with numba.core.event.trigger_event("numba:compile", data={"dispatcher": function}):
                pass
    with numba.core.event.trigger_event("numba:compile", data={"dispatcher": function}):
        pass
    assert len(calls) == told


def test_the_engine_loads_without_blas_and_code_of_the_user_with_it():
    code = (
        "import sys, numpy, numba\nfrom fasim.engine import compiled\n"
        "numba.njit(lambda: 1)()\nprint('scipy.linalg' in sys.modules)\n"
        "print(numba.njit(lambda a: numpy.dot(a, a))(numpy.full(2, 3.0)), 'scipy.linalg' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "18.0", "True"]


@pytest.mark.slow
def test_concurrent_first_runs_then_a_second(tmp_path):
    both = [start(tmp_path), start(tmp_path)]
    assert [finish(process) for process in both] == ["compiling\n", "compiling\n"]
    assert finish(start(tmp_path)) == ""
