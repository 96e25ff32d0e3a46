import json
import shlex
import sys
from dataclasses import replace

import pytest

from fasim import cli
from fasim.analysis.compare import busy_cycles, compare, load_run, role_cycles
from fasim.arch import load_arch
from fasim.cli.console import console_for
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.results.run import Run
from fasim.studies.simulate import simulate
from fasim.views.compare_report import render_comparison

SMALL = "--batch 1 --seqlen 512 --heads 4 --set chip.sm_count=8"


def small(*overrides: str, **knobs: object) -> Run:
    arch = load_arch("h100", ("chip.sm_count=8", *overrides))
    return simulate("fa3", Problem(batch=1, seqlen_q=512, heads_q=4), arch, knobs=knobs)


@pytest.fixture(scope="module")
def base() -> Run:
    return small()


def fasim(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", shlex.split(f"fasim {line}"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_a_run_does_not_differ_from_itself(base: Run):
    (change,) = compare([("A", base), ("B", base)]).changes
    assert (change.cycles_percent, change.time_percent, change.tflops_percent) == (0, 0, 0)
    assert set(change.points.values()) == {0.0} and not change.settings
    assert all(not any(reasons.values()) for reasons in change.role_cycles.values())


def test_changes_of_a_role_add_up_to_the_change_of_cycles(base: Run):
    serial = small(overlap="off", pingpong="off")
    (change,) = compare([("A", base), ("B", serial)]).changes
    assert change.time_percent > 3
    assert change.cycles_percent == pytest.approx(100 * (serial.cycles / base.cycles - 1))
    for role, reasons in change.role_cycles.items():
        assert sum(reasons.values()) == pytest.approx(serial.cycles - base.cycles), role
    assert change.settings == {"overlap": (True, False), "pingpong": (True, False)}
    assert change.work_percent["mufu"] == pytest.approx(0, abs=0.1)  # the same exponentials in more time
    assert change.points["mufu"] < -1


def test_a_faster_unit_moves_and_does_the_same_work_in_fewer_cycles(base: Run):
    faster = small("sm.mufu.ops_per_cycle=32")
    (change,) = compare([("A", base), ("B", faster)]).changes
    assert change.moved == "mufu"
    assert busy_cycles(faster)["mufu"] == pytest.approx(busy_cycles(base)["mufu"] / 2, rel=0.05)
    assert change.work_percent["mufu"] == pytest.approx(-50, abs=3)


def test_clock_counts_in_time_but_not_in_cycles(base: Run):
    slow = replace(base, clock_mhz=base.clock_mhz / 2, time_us=base.time_us * 2)
    comparison = compare([("A", base), ("B", slow), ("C", base)])
    assert comparison.changes[0].cycles_percent == 0
    assert comparison.changes[0].time_percent == pytest.approx(100)
    assert [change.label for change in comparison.slower_than(99)] == ["B"]
    assert not comparison.slower_than(101)


def test_roles_of_several_kernels_count_their_own_kernels_cycles(base: Run):
    stalls = {"one.main": base.stalls["consumer"], "two.main": base.stalls["consumer"]}
    meta = {**base.meta, "kernels": ["one", "two"], "kernel_cycles": [base.cycles / 4, base.cycles * 3 / 4]}
    cycles = role_cycles(replace(base, stalls=stalls, meta=meta))
    assert sum(cycles["one.main"].values()) == pytest.approx(base.cycles / 4)
    assert sum(cycles["two.main"].values()) == pytest.approx(base.cycles * 3 / 4)


def test_report_names_speed_limit_settings_and_reasons(base: Run):
    console = console_for()
    with console.capture() as capture:
        console.print(render_comparison(compare([("A", base), ("B", small(overlap="off", pingpong="off"))])))
    text = capture.get()
    assert "overlap on -> off" in text and "pingpong on -> off" in text
    assert "slower than A" in text and "moved most" in text
    assert "consumer dependency" in text


def test_saved_runs_are_read_back_and_compared(base: Run, tmp_path, monkeypatch, capsys):
    path = tmp_path / "base.json"
    path.write_text(base.to_json())
    assert load_run(path) == base
    assert fasim(monkeypatch, f"compare {path} fa3 --arch h100 {SMALL} --json {tmp_path}/c.json") == 0
    data = json.loads((tmp_path / "c.json").read_text())
    assert [run["label"] for run in data["runs"]] == ["A", "B"]
    assert data["runs"][0]["cycles"] == data["runs"][1]["cycles"] == base.cycles
    assert data["changes"][0]["time_percent"] == 0


def test_fail_above_is_for_b_slower_than_a(monkeypatch, capsys):
    line = f"compare fa3 fa3 --arch h100 {SMALL} --knob-b overlap=off --knob-b pingpong=off --fail-above"
    assert fasim(monkeypatch, f"{line} 1") == 3
    assert "% slower than A (allowed: 1 %)" in capsys.readouterr().err
    assert fasim(monkeypatch, f"{line} 90") == 0
    faster = f"compare fa3 fa3 --arch h100 {SMALL} --knob-a overlap=off --knob-a pingpong=off --fail-above 0"
    assert fasim(monkeypatch, faster) == 0


def test_three_chips_in_one_picture(monkeypatch, tmp_path, capsys):
    picture = tmp_path / "three.svg"
    line = f"compare fa3 fa3 fa3 --arch h100 --arch-b h200 {SMALL} --plot {picture}"
    assert fasim(monkeypatch, line) == 0
    assert "C: as fast" in capsys.readouterr().out
    text = picture.read_text()
    assert "B: fa3 h200" in text and "C: fa3 h100" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare fa3 --arch h100", "give 2 to 8 runs, not 1"),
        ("compare fa3 fa3 --arch-a h100", "no architecture for B: give --arch"),
        ("compare fa33 fa3 --arch h100", "did you mean 'fa3'"),
        ("compare fa3 /nowhere/b.json --arch h100 --batch 1 --seqlen 256", "/nowhere/b.json: cannot read"),
        ("compare {saved} fa3 --arch h100 --knob-a stages=1", "A is the saved run"),
        ("compare {saved} {saved} --plot x.png", "a saved run has no timeline"),
        ("compare {other} {saved}", "not a run saved by 'fasim run --json'"),
        ("compare fa3 fa3 --arch h100 --knob-b pingpongg=off --batch 1 --seqlen 256", "did you mean 'pingpong'"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(base: Run, monkeypatch, tmp_path, capsys, line, message):
    saved, other = tmp_path / "saved.json", tmp_path / "other.json"
    saved.write_text(base.to_json())
    other.write_text('{"schema_version": 99}')
    assert fasim(monkeypatch, line.format(saved=saved, other=other)) == 2
    err = capsys.readouterr().err
    assert err.startswith("fasim: ") and err.count("\n") == 1
    assert message in err


def test_fewer_than_two_runs(base: Run):
    with pytest.raises(ConfigError, match="at least two"):
        compare([("A", base)])
