"""The names of ``import fasim``: what there is, that it comes late, and that notebooks and docs need nothing else."""

import ast
import contextlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

import fasim

ROOT = Path(__file__).parents[1]


def public_imports(source):
    """Imports of fasim in Python source, and in sources that stand in it as texts: (line, what)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fasim":
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, f"import {a.name}") for a in node.names if a.name.split(".")[0] == "fasim")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            with contextlib.suppress(SyntaxError):
                yield from public_imports(node.value)


def is_public(statement):
    return statement == "import fasim" or statement.startswith("from fasim import ")


def code_of(path):
    if path.suffix == ".py":
        return ["\n".join(cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code")]
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if "```python" in path.read_text()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_examples_run(path, capsys):
    for code in code_of(path):
        exec(code, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", [*sorted((ROOT / "notebooks").glob("*.py")), *PAGES], ids=lambda path: path.stem)
def test_notebooks_and_docs_import_public_names_only(path):
    found = [statement for code in code_of(path) for _, statement in public_imports(code)]
    assert found
    assert [statement for statement in found if not is_public(statement)] == []


def test_an_import_from_a_submodule_is_seen():
    source = "import fasim.arch\nSOURCE = '''\nfrom fasim.problem import Problem\n'''\nfrom fasim import Problem\n"
    statements = [statement for _, statement in public_imports(source)]
    assert [s for s in statements if not is_public(s)] == ["import fasim.arch", "from fasim.problem import Problem"]


def test_a_type_checker_sees_the_names_that_there_are():
    tree = ast.parse(Path(fasim.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        (node.module, alias.name) for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert all(alias.asname == alias.name for node in guarded.body for alias in node.names)  # re-exported
    assert imported == {
        *((module, name) for name, module in fasim._MODULE.items()),
        *(("fasim", room) for room in fasim._ROOMS),
    }


@pytest.mark.parametrize("name", fasim.__all__)
def test_every_name_is_there_and_says_what_it_is(name):
    found = getattr(fasim, name)
    assert inspect.getdoc(found)
    assert name in dir(fasim)
    # A module of that name would take the place of a function as soon as something imports it.
    assert inspect.ismodule(found) == (name in fasim._ROOMS)
    assert name in fasim._ROOMS or not {name, f"{name}.py"} & {path.name for path in (ROOT / "fasim").iterdir()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = fasim.simulat


def test_importing_the_package_imports_nothing_heavy():
    code = "import fasim, sys; print(*sorted(name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"numpy", "numba", "simpy", "scipy", "matplotlib", "networkx", "pandas", "pydantic", "rich"}


def test_names_and_files_do_where_objects_do(tmp_path):
    problem = fasim.Problem(batch=1, seqlen_q=256, heads_q=1)
    by_name = fasim.simulate("fa3", problem, "h100", knobs={"pingpong": "off"})
    schedule, arch = fasim.load_schedule("fa3"), fasim.load_arch("h100")
    assert fasim.simulate(schedule, problem, arch, knobs={"pingpong": "off"}) == by_name
    derived = tmp_path / "mine.toml"
    derived.write_text('base = "h100"\n')
    assert fasim.simulate("fa3", problem, derived).meta["arch"] == "mine"
    checked = fasim.check("fa3", problem, "h100")
    assert checked["passed"] and checked == fasim.check(schedule, problem, arch)
    with pytest.raises(fasim.ConfigError, match="did you mean 'h100'"):
        fasim.simulate("fa3", problem, "h10")
