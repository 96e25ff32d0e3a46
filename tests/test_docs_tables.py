import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_parts_of_make_can_be_imported_and_residual_costs_exist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    importlib.import_module("make")
    residuals = importlib.import_module("residuals")
    for _, _, schedule, costs in residuals.MEASURED:
        found = residuals.choose_build(schedule, "hopper")
        assert set(costs) <= set(found.costs)
        assert "build" in residuals.load_schedule(schedule).knobs


def test_headings_say_what_fills_a_column(tables, monkeypatch):
    run = {"cycles": 1234.4, "tflops": 99.6, "utilisation_steady": {"tensor": 81.26}}
    asked = []
    monkeypatch.setattr(tables, "output", lambda words: asked.append(words) or run)
    page = [
        "Text | with a bar.",
        "| `fasim run fa3 --arch h100` | cycles | tensor % | remark |",
        "|---|---|---|---|",
        "| `--knob pingpong=off` | 1 | 2 (79.9, measured) | typed |",
        "| no command | 1 | 2 | |",
        "",
        "| other | cycles |",
        "|---|---|",
        "| `--knob pingpong=off` | 1 |",
    ]
    filled = list(tables.filled(page))
    assert filled[3] == "| `--knob pingpong=off` | 1,234 | 81.3 (79.9, measured) | typed |"
    assert filled[:3] + filled[4:] == page[:3] + page[4:]
    assert set(asked) == {("run", "fa3", "--arch", "h100", "--knob", "pingpong=off")}


def test_validations_are_filtered_not_repeated(tables, monkeypatch):
    rows = [
        {"head_dim": 64, "error": -0.1},
        {"head_dim": 128, "error": 0.02},
        {"head_dim": 128, "error": 0.04},
        {"head_dim": 128, "error": None},
    ]
    asked = []
    monkeypatch.setattr(tables, "output", lambda words: asked.append(words) or {"rows": rows})
    whole = "fasim validate --data a.csv --kernel fa3"
    assert tables.value("rows", whole) == "3"
    assert tables.value("bias % by head_dim", whole) == "64: -10.0, 128: +3.0"
    assert tables.value("error %", f"{whole} --where head_dim=128") == "+2 to +4"
    assert len(asked) == 1
    tables.value("rows", "fasim validate --data a.csv")
    assert len(asked) == 2


def test_what_shows_nothing_is_an_error(tables, monkeypatch):
    monkeypatch.setattr(tables, "output", lambda words: {"rows": [], "utilisation_steady": {}, "utilisation": {}})
    with pytest.raises(SystemExit, match="predicts no row"):
        tables.value("rows", "fasim validate --data a.csv")
    with pytest.raises(SystemExit, match="no column"):
        list(tables.filled(["| `fasim run fa3` | cycle |", "|---|---|", "| `--arch h100` | 1 |"]))


def test_what_the_deviations_name_as_data_exists():
    lines = (ROOT / "validation" / "DEVIATIONS.md").read_text().splitlines()
    seen_in = [line.split(" | ")[2] for line in lines if line.startswith("| ") and line.count(" | ") == 3]
    commands = [cell.split("`")[1] for cell in seen_in if cell.startswith("`")]
    assert len(commands) > 20
    assert [words for words in commands if not (ROOT / words.split()[0]).is_file()] == []
