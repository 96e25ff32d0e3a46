import ast
import re
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
notebooks = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_every_notebook_is_a_pair():
    assert SOURCES
    assert [path.with_suffix("") for path in SOURCES] == sorted(
        path.with_suffix("") for path in (ROOT / "notebooks").glob("*.ipynb")
    )


@notebooks
def test_pairs_are_in_sync_and_without_outputs(source):
    paired = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(paired)
    assert cells(paired) == cells(jupytext.read(source)), "run: jupytext --update --to ipynb notebooks/*.py"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in paired.cells)


@notebooks
def test_notebook_says_what_it_ran_on_and_checks_what_it_says(source):
    code = [cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    assert re.search(r"^print\(.*fasim\.__version__.*\.digest", code[0], re.MULTILINE)
    assert any(isinstance(node, ast.Assert) for node in ast.parse(code[-1]).body)


@pytest.mark.slow
@notebooks
def test_notebook_runs(source):
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    # The kernel starts in the checkout, where it finds fasim as the tests do. A first run compiles the engine.
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
