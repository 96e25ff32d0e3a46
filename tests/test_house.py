import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fasim

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_has_one_source():
    assert re.fullmatch(r"\d+\.\d+\.\d+", fasim.__version__)
    assert "version" not in CONFIG["project"]
    assert CONFIG["project"]["dynamic"] == ["version"]
    assert CONFIG["tool"]["hatch"]["version"]["path"] == "fasim/__init__.py"
    assert f"## {fasim.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_imports_go_down_only():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["explain"], ["validate"], ["list", "knobs"]])
def test_help_imports_nothing_heavy(command):
    code = (
        "import sys\nfrom fasim.cli import app\n"
        f"try:\n    app({[*command, '--help']!r})\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert {"fasim", "typer"} <= loaded
    assert not loaded & {"numpy", "numba", "simpy", "scipy", "matplotlib", "networkx", "pandas", "perfetto"}


def test_what_is_drawn_is_drawn_in_views():
    drawing = re.compile(r"^\s*(from|import) (rich\.(table|text|tree|panel|columns)|matplotlib|jinja2)\b", re.MULTILINE)
    drawn_in = {path.parent.name for path in (ROOT / "fasim").rglob("*.py") if drawing.search(path.read_text())}
    assert drawn_in == {"views", "results"}  # results: the type of what Run.timeline returns


@pytest.mark.parametrize("folder", ["arch_models", "schedules"])
def test_wheel_ships_the_data_folders(folder):
    shipped = CONFIG["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert shipped[folder] == f"fasim/data/{folder}"
    assert any((ROOT / folder).iterdir())
