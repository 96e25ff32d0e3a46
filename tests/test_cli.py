import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fake_simulator import Fake, fake  # noqa: F401  (a fixture)

from fasim import __version__, cli
from fasim.cli.app import run
from fasim.problem import Problem

ROOT = Path(__file__).parents[1]


def call(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    """Run a command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.fixture
def fasim(monkeypatch: pytest.MonkeyPatch, fake: Fake):  # noqa: F811
    return lambda line: call(monkeypatch, f"fasim {line}")


def test_version(fasim, capsys):
    assert fasim("--version") == 0
    assert capsys.readouterr().out == f"fasim {__version__}\n"


def test_run_reports_on_stdout_with_the_defaults_of_problem(fasim, fake: Fake, capsys):  # noqa: F811
    assert fasim("run fa3 --arch h100") == 0
    report, bound = capsys.readouterr().out.splitlines()
    assert report == "REPORT 4096 cycles"
    assert bound == "Bound: 2,048 cycles by tensor; the run takes 2.00 times as long"
    (run,) = fake.simulated
    assert run.problem == Problem()
    assert (run.arch.name, run.engine, run.clock_mhz, run.knobs, run.trace) == ("h100", "compiled", None, {}, None)


def test_help_states_the_default_shape():
    assert Problem() == Problem(
        batch=4, seqlen_q=4096, heads_q=16, head_dim=128, causal=False, dtype="bf16", direction="fwd"
    )
    assert "4 sequences of 4096 tokens with 16 heads of 128, BF16 forward" in (run.__doc__ or "")


def test_run_passes_every_option(fasim, fake: Fake):  # noqa: F811
    shape = "--batch 2 --seqlen 64 --seqlen-k 128 --heads 8 --kv-heads 2 --head-dim 64 --head-dim-v 32 --causal"
    more = "--dtype fp16 --direction fwd --clock 1500 --knob stages=1 --knob pingpong=off --engine reference"
    assert fasim(f"run fa4 -a h100 {shape} {more} --set chip.sm_count=100") == 0
    (run,) = fake.simulated
    assert run.problem == Problem(
        batch=2, seqlen_q=64, seqlen_k=128, heads_q=8, heads_kv=2, head_dim=64, head_dim_v=32, causal=True, dtype="fp16"
    )
    assert run.schedule.name == "fa4"
    assert (run.clock_mhz, run.engine) == (1500.0, "reference")
    assert run.knobs == {"stages": "1", "pingpong": "off"}
    assert run.arch.chip.sm_count == 100


def test_json_on_stdout_is_alone(fasim, capsys):
    assert fasim("run fa3 --arch h100 --timeline --cycles 0:9 --json -") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cycles"] == 4096
    assert "REPORT" in err and "TIMELINE sm 0 (0, 9)" in err


def test_json_file(fasim, tmp_path, capsys):
    assert fasim(f"run fa3 --arch h100 --json {tmp_path}/run.json") == 0
    assert json.loads((tmp_path / "run.json").read_text())["cycles"] == 4096
    assert "REPORT" in capsys.readouterr().out


def test_views_share_window_and_sms(fasim, fake: Fake, capsys):  # noqa: F811
    assert fasim("run fa3 --arch h100 --plot a.svg --trace b.json --sm 2 --trace-sms 5,0 --cycles 10:20") == 0
    (run,) = fake.simulated
    assert (run.trace.sms, run.trace.cycles) == ((0, 2, 5), (10, 20))
    assert fake.files == ["a.svg", "b.json"]


def test_truncated_trace_is_said(fasim, capsys):
    assert fasim("run fa3 --arch h100 --timeline") == 0
    assert "the trace is incomplete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run fa33 --arch h100", "did you mean 'fa3'?"),
        ("run fa3 --arch h1000", "h100"),
        ("run fa3 --arch h100 --set sm.fmaa=1", "did you mean 'fma'"),
        ("run fa3 --arch h100 --dtype bf15", "did you mean 'bf16'"),
        ("run fa3 --arch h100 --knob pingpong", "--knob: 'pingpong' is not NAME=VALUE"),
        ("run fa3 --arch h100 --timeline --cycles 9", "--cycles: '9' is not A:B"),
        ("run fa3 --arch h100 --timeline --cycles 9:3", "--cycles: '9:3': A must be at least 0 and below B"),
        ("run fa3 --arch h100 --trace-sms a", "--trace-sms: 'a' is not a list of numbers"),
        ("run fa3 --arch h100 --json /nowhere/run.json", "/nowhere/run.json: cannot write: No such file or directory"),
        ("arch check /nowhere/x.toml", "/nowhere/x.toml"),
        ("validate --data /nowhere/x.csv", "/nowhere/x.csv: cannot read: No such file or directory"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(fasim, capsys, line, message):
    assert fasim(line) == 2
    err = capsys.readouterr().err
    assert err.startswith("fasim: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("line", ["run", "rum fa3", "run fa3 --arch h100 --batch x", "run fa3 --arch h100 --engine x"])
def test_usage_errors_exit_2(fasim, line):
    assert fasim(line) == 2


def test_model_error_exits_1(fasim, capsys):
    assert fasim("run fa3 --arch h100 --dtype fp8") == 1
    assert "fp8 does not fit" in capsys.readouterr().err


def test_lists(fasim, capsys):
    assert fasim("list archs") == 0
    assert "h100" in capsys.readouterr().out
    assert fasim("list schedules") == 0
    assert "What fa4 is." in capsys.readouterr().out
    assert fasim("list knobs fa3") == 0
    out = capsys.readouterr().out
    assert "pingpong  on" in out and "Stages of K and V. (1, 2, 3)" in out and "fa4" not in out
    assert fasim("list knobs") == 0
    assert "fa4" in capsys.readouterr().out


def test_arch_commands(fasim, capsys):
    assert fasim(f"arch check {ROOT}/arch_models/h100.toml") == 0
    assert "1 file ok" in capsys.readouterr().out
    assert fasim("arch schema") == 0
    assert "properties" in json.loads(capsys.readouterr().out)


def test_reader_that_leaves_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "fasim", "arch", "schema"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False
    )
    os.close(write)
    assert done.stderr == b""


def commands() -> list[str]:
    return [line for lines in cli.EXAMPLES.values() for line in lines]


@pytest.mark.parametrize("command", ["run", "validate", "list", "list archs", "list knobs", "arch", "arch check"])
def test_help_ends_in_examples(fasim, capsys, command):
    assert fasim(f"{command} --help") == 0
    tail = [line.strip() for line in capsys.readouterr().out.split("Examples:")[1].splitlines() if line.strip()]
    assert tail == list(cli.EXAMPLES[command.split()[0]])


@pytest.mark.parametrize("line", commands())
def test_examples_run(line, tmp_path):
    (tmp_path / "arch_models").symlink_to(ROOT / "arch_models")
    data = tmp_path / "validation" / "data"
    data.mkdir(parents=True)
    for file in (ROOT / "validation" / "data").glob("*.csv"):  # a few rows show that the command works
        lines = file.read_text().splitlines(keepends=True)
        short = [
            line
            for line in lines[6:]
            if line.startswith("h200,fa3,bf16,fwd,") and (",777," in line or ",1,4096," in line)
        ]
        (data / file.name).write_text("".join((*lines[:6], *short[:5])))
    for name in ("validation/data/h200_microbench.json", "results.json"):
        (tmp_path / name).symlink_to(ROOT / "validation" / "data" / "h200_microbench.json")
    command = f"{shlex.quote(sys.executable)} -m {line}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
