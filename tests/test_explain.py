"""``fasim bounds`` and ``fasim explain``, and what explain must find for kernels whose limits are known."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from fasim import cli
from fasim.problem import Problem
from fasim.studies.batch import Job
from fasim.studies.explain import explain

SMALL = "--batch 1 --seqlen 1024 --heads 2 --set chip.sm_count=4"


def fasim(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", shlex.split(f"fasim {line}"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_bounds_prints_the_story_and_draws_the_roofline(monkeypatch, tmp_path, capsys):
    line = f"bounds fa3 --arch h100 {SMALL} --plot {tmp_path}/roof.svg --json {tmp_path}/bounds.json"
    assert fasim(monkeypatch, line) == 0
    out = capsys.readouterr().out
    assert "intensity, FLOP/byte" in out and "kept for backward, model (80 layers)" in out
    data = json.loads((tmp_path / "bounds.json").read_text())
    assert data["limit"] == "tensor"
    assert data["needed_cycles"] <= data["cycles"]
    picture = (tmp_path / "roof.svg").read_bytes()
    assert fasim(monkeypatch, line) == 0
    assert (tmp_path / "roof.svg").read_bytes() == picture


def test_explain_says_limit_next_and_losses(monkeypatch, tmp_path, capsys):
    assert fasim(monkeypatch, f"explain fa3 --arch h100 {SMALL} --jobs 1 --json {tmp_path}/why.json") == 0
    out = capsys.readouterr().out
    assert "From peak to achieved" in out and "Limit: " in out and "Largest losses: " in out
    assert "gain %  infinite" not in out
    data = json.loads((tmp_path / "why.json").read_text())
    shares = [loss["percent"] for loss in data["losses"]]
    assert data["useful_percent"] + sum(shares) == pytest.approx(100)
    assert data["limits"] == [gain["resource"] for gain in data["gains"][:2]]


def test_explain_json_on_stdout_is_alone(monkeypatch, capsys):
    assert fasim(monkeypatch, f"explain fa3 --arch h100 {SMALL} --jobs 1 --infinite --json -") == 0
    out, err = capsys.readouterr()
    assert all(gain["infinite_percent"] is not None for gain in json.loads(out)["gains"])
    assert "gain %  infinite" in err


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("explain fa33 --arch h100 --jobs 1", 2, "did you mean 'fa3'"),
        ("explain fa3 --arch h100 --jobs 2 --knob stagess=1", 2, "did you mean 'stages'"),
        ("explain fa3 --arch h100 --jobs 1 --knob tile_n=256 --head-dim 256", 1, "registers"),
        ("bounds fa3 --arch h100 --plot roof.pdf --batch 1 --seqlen 512", 2, "unknown picture format"),
    ],
)
def test_errors_are_one_message(monkeypatch, capsys, line, code, message):
    assert fasim(monkeypatch, line) == code
    err = capsys.readouterr().err
    assert err.startswith("fasim: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("command", ["compare", "bounds", "explain"])
def test_help_ends_in_examples(monkeypatch, capsys, command):
    assert fasim(monkeypatch, f"{command} --help") == 0
    tail = [line.strip() for line in capsys.readouterr().out.split("Examples:")[1].splitlines() if line.strip()]
    assert tail == list(cli.EXAMPLES[command])


def names(schedule: str, chip: str, head_dim: int = 128) -> tuple[list[str], dict[str, float]]:
    """The first three resources by gain, and the losses, of a problem that fills the chip."""
    found = explain(Job(schedule, Problem(batch=2, seqlen_q=2048, head_dim=head_dim), chip), processes=1)
    return [gain.resource for gain in found.gains[:3]], {loss.name: loss.percent for loss in found.losses}


def test_fa3_d128_is_limited_by_the_tensor_cores():
    limits, lost = names("fa3", "h100")
    assert limits[0] == "tensor"
    assert lost["MMA interference"] > 3


def test_fa3_d64_is_limited_by_softmax_under_interference():
    limits, lost = names("fa3", "h100", head_dim=64)
    assert {"interference", "mufu"} & set(limits[:2])
    assert lost["MMA interference"] > 5
    assert lost["unit contention"] > 3


def test_fa2_on_h100_is_limited_by_mma_sync_and_exposed_softmax():
    limits, lost = names("fa2", "h100")
    assert limits[:2] == ["tensor", "interference"]
    assert lost["MMA rate"] > 10 and lost["MMA interference"] > 10


@pytest.mark.parametrize(("chip", "limited"), [("b200", True), ("b300", False)])
def test_exponentials_limit_fa4_d64_on_b200_only(chip: str, limited: bool):
    limits, _ = names("fa4", chip, head_dim=64)
    assert (limits[0] == "mufu") == limited


def test_run_with_an_ideal_resource(monkeypatch, tmp_path, capsys):
    times = {}
    for name, option in (("plain", ""), ("ideal", "--ideal mufu")):
        line = f"run fa3 --arch h100 --head-dim 64 {SMALL} {option} --json {tmp_path}/{name}.json"
        assert fasim(monkeypatch, line) == 0
        times[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert "Bound: " in capsys.readouterr().out
    assert times["ideal"]["cycles"] < times["plain"]["cycles"]
    assert times["ideal"]["utilisation"]["mufu"] < 1
    assert any(text.startswith("sm.mufu.ops_per_cycle=") for text in times["ideal"]["meta"]["overrides"])
    assert fasim(monkeypatch, f"run fa3 --arch h100 {SMALL} --ideal mufo") == 2
    assert "unknown resource 'mufo'; did you mean 'mufu'?" in capsys.readouterr().err
