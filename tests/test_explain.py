"""``fasim bounds`` and ``fasim explain``, and what explain must find for kernels whose limits are known."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest

from fasim import cli
from fasim.analysis.whatif import VECTOR, Gain
from fasim.analysis.whatif import limits as limits_of
from fasim.problem import Problem
from fasim.studies.batch import Job
from fasim.studies.explain import Explanation, explain
from fasim.views.explain_report import verdict

SOFTMAX = ("vector", *VECTOR)
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


def test_memory_kept_for_backward_of_a_head_and_of_a_model(monkeypatch, capsys):
    assert fasim(monkeypatch, "bounds fa3 --arch h100 --batch 1 --seqlen 8192 --heads 64 --layers 80") == 0
    out = capsys.readouterr().out
    assert re.search(r"intensity, FLOP/byte +64 +4,096\n", out)
    assert re.search(r"kept for backward, head +336 MB +2\.13 MB\n", out)
    assert re.search(r"kept for backward, model \(80 layers\) +1\.72 TB +10\.9 GB\n", out)


def test_explain_says_limit_next_and_losses(monkeypatch, tmp_path, capsys):
    assert fasim(monkeypatch, f"explain fa3 --arch h100 {SMALL} --jobs 1 --json {tmp_path}/why.json") == 0
    out = capsys.readouterr().out
    assert "From peak to achieved" in out and "Limit: " in out and "Largest losses: " in out
    assert "gain %  infinite" not in out
    data = json.loads((tmp_path / "why.json").read_text())
    shares = [loss["percent"] for loss in data["losses"]]
    assert data["useful_percent"] + sum(shares) == pytest.approx(100)
    assert set(data["limits"]) <= {gain["resource"] for gain in data["gains"]}


def test_explain_html_has_the_losses(monkeypatch, tmp_path, capsys):
    assert fasim(monkeypatch, f"explain fa3 --arch h100 {SMALL} --html {tmp_path}/why.html") == 0
    page = (tmp_path / "why.html").read_text()
    assert 'id="losses"' in page and 'id="roofline"' in page and "MMA interference" in page
    assert fasim(monkeypatch, f"explain fa3 --arch h100 --html {tmp_path}/why.htm") == 2
    assert "unknown report format '.htm'" in capsys.readouterr().err


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


def explained(schedule: str, chip: str, head_dim: int = 128, dtype: str = "bf16", batch: int = 2) -> Explanation:
    """A problem that fills the chip."""
    return explain(Job(schedule, Problem(batch=batch, seqlen_q=2048, head_dim=head_dim, dtype=dtype), chip))


def limits(found: Explanation) -> list[str]:
    return [gain.resource for gain in found.limits]


def losses(found: Explanation) -> dict[str, float]:
    return {loss.name: loss.percent for loss in found.losses}


def test_fa3_d128_is_limited_by_tensor_cores_and_softmax_that_slow_each_other():
    found = explained("fa3", "h100")
    gains = {gain.resource: gain.tenth_percent for gain in found.gains}
    assert set(sorted(gains, key=gains.get)[-3:]) == {"tensor", "vector", "interference"}
    assert gains["tensor"] > 3
    assert losses(found)["MMA interference"] > 3


def test_fa3_d64_is_limited_by_softmax_under_interference():
    found = explained("fa3", "h100", head_dim=64)
    assert set(limits(found)[:2]) <= {"vector", "mufu", "interference"}
    assert losses(found)["MMA interference"] > 5
    assert losses(found)["unit contention"] > 3
    assert f"Limit: {limits(found)[0]} (" in verdict(found.run, found.losses, found.gains)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fa2_on_h100_is_limited_by_mma_sync_and_exposed_softmax(head_dim: int):
    found = explained("fa2", "h100", head_dim, batch=4)
    assert "tensor" in limits(found)
    exposed = losses(found)["MMA interference"] + losses(found)["barriers and dependencies"]
    assert losses(found)["MMA rate"] > 10 and exposed > 20


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fa2_on_a100_is_limited_by_the_tensor_cores_then_by_exposed_softmax(head_dim: int):
    found = explained("fa2", "a100", head_dim, batch=4)  # with 2, CTAs keep step and meet at HBM
    assert limits(found) == ["tensor", "interference"]
    assert losses(found)["MMA rate"] < 1 < losses(found)["MMA interference"]


def test_exponentials_limit_fa4_d64_on_b200_then_the_serial_loop():
    found = explained("fa4", "b200", 64)
    assert limits(found) == ["mufu", "barriers"]  # result latencies come next, close behind
    told = verdict(found.run, found.losses, found.gains)
    assert "% with all vector units) faster by a tenth of it. Next: " in told


def test_softmax_limits_fa4_fp8_on_b200_and_exponentials_most_of_it():
    found = explained("fa4", "b200", dtype="fp8")
    assert limits(found) == ["vector", "latency"]
    parts = {gain.resource: gain.tenth_percent for gain in found.gains if gain.resource in VECTOR}
    assert max(parts, key=lambda name: parts[name]) == "mufu"


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp8")])
def test_twice_the_exponentials_move_the_limit_of_fa4_on_b300(head_dim: int, dtype: str):
    found = explained("fa4", "b300", head_dim, dtype)
    assert set(limits(found)) <= {"vector", "latency", "smem"}
    assert next(gain for gain in found.gains if gain.resource == "mufu").tenth_percent < 1


def test_fa4_d128_is_limited_by_the_tensor_cores_on_b200_with_softmax_close_behind():
    found = explained("fa4", "b200")
    assert limits(found)[0] == "tensor" and limits(found)[1] in SOFTMAX
    assert found.limits[1].tenth_percent > 1


def test_fa4_d128_is_limited_by_the_tensor_cores_alone_on_b300():
    found = explained("fa4", "b300")
    assert limits(found)[0] == "tensor"
    assert found.limits[0].tenth_percent > 5 > 1 > found.limits[1].tenth_percent


def test_a_limit_is_named_by_its_strongest_part():
    def found(**percents: float) -> list[str]:
        rest = dict.fromkeys(("fma", "alu", "lsu", "issue"), 0.0)
        return [gain.resource for gain in limits_of([Gain(n, n, p, None) for n, p in (percents | rest).items()])]

    assert found(vector=5.0, mufu=3.1, tensor=4.0) == ["mufu", "tensor"]
    assert found(vector=5.0, mufu=2.9, tensor=4.0) == ["vector", "tensor"]
    assert found(tensor=6.0, vector=5.0, mufu=5.5) == ["tensor", "mufu"]


def test_gains_within_chance_are_called_so():
    gains = [Gain(n, n, p, None) for n, p in {"tensor": 1.2, "vector": 0.4, "mufu": 0.1, "smem": -2.1}.items()]
    run = Job("fa3", Problem(batch=1, seqlen_q=256, heads_q=1), "h100", ("chip.sm_count=4",)).run()
    assert "A faster smem loses 2.1 %" in verdict(run, [], gains)
    assert "loses" not in verdict(run, [], [*gains[:3], Gain("smem", "smem", -0.3, None)])


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
