"""The check command: verdicts, exit codes, JSON, and how wrong numbers are described."""

from __future__ import annotations

import json
import shlex
import sys

import numpy as np
import pytest

from fasim import cli
from fasim.arch import load_arch
from fasim.checker import Arrays, Log
from fasim.checker.check import check, compare, make_inputs
from fasim.numerics import attention_reference
from fasim.problem import Problem
from fasim.program.library import load_schedule

SMALL = "--seqlen 256 --heads 1"


@pytest.fixture
def fasim(monkeypatch):
    def call(line: str) -> int:
        monkeypatch.setattr(sys, "argv", shlex.split(f"fasim {line}"))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0)

    return call


def test_a_right_schedule_exits_with_0(fasim, capsys):
    assert fasim(f"check fa3 --arch h100 {SMALL}") == 0
    out = capsys.readouterr().out
    assert out.startswith("fa3 · h100 · B1 S256 H1 d128 bf16 forward\n")
    assert "deadlock  none\nraces     none\n" in out
    assert out.endswith("verdict   right, as far as checked\n")


def test_json_says_the_same(fasim, capsys):
    assert fasim(f"check fa3 --arch h100 {SMALL} --seed 3 --json -") == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["passed"] and result["findings"] == [] and result["seed"] == 3
    assert [row["output"] for row in result["values"]] == ["O", "LSE"]
    assert {"kernel": "fa3", "resource": "named barriers", "used": 4, "limit": 16} in result["budgets"]
    assert "verdict" in captured.err


#: A user's file that records FlashAttention-3 and breaks it.
BROKEN = """
from changes import At, drop, replace_effect
from fasim.program.effects import Rescale
from fasim.program.library import load_schedule, schedule


@schedule(architectures=("hopper",), dtypes=("bf16",))
def own(problem, arch):
    return CHANGE(load_schedule("fa3").build(problem, arch, {}))
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('drop(At("consumer", "release K", inside="full"))', "who waits for whom: "),
        ('drop(At("consumer", "wait QK", behind="pass turn", which="all"))', "race      consumer0 'row max' (cycle "),
        (
            'replace_effect(At("consumer", "scale S and O, exp", behind="release V", which="all"), Rescale)',
            "scale     consumer0 'PV' (cycle ",
        ),
    ],
)
def test_a_users_own_wrong_schedule_exits_with_1(fasim, capsys, tmp_path, change, said):
    (tmp_path / "own.py").write_text(BROKEN.replace("CHANGE", change))
    assert fasim(f"check {tmp_path}/own.py --arch h100 --seqlen 1024 --heads 1") == 1
    out = " ".join(capsys.readouterr().out.split("\n"))
    assert said in out
    assert "verdict   WRONG" in out


#: A schedule as a user writes it: one warpgroup, no overlap, every head its own K and V.
OWN = """
import numpy as np

from fasim.program.effects import Mask, Matmul, Normalise, Probabilities, Rescale, Round, RowMax, RowSum, Store
from fasim.program.effects import row_blocks
from fasim.program.tiles import Smem
from fasim.program.library import schedule
from fasim.program.language import Kernel


@schedule(architectures=("hopper",), dtypes=("bf16",))
def my(problem, arch) -> Kernel:
    m, n, d = 64, 128, problem.head_dim
    k = Kernel("my", problem, arch, {})
    heads, blocks = problem.batch * problem.heads_q, problem.kv_tiles(n)
    tile = np.arange(heads * problem.q_tiles(m))
    k.tiles = {"q": tile, "kv": tile // problem.q_tiles(m) * blocks}
    queries, keys = row_blocks(heads, problem.seqlen_q, m, d), row_blocks(heads, problem.seqlen_k, n, d)
    q = k.ring(k.tensor("Q", len(tile), 2 * m * d, "q", layout=queries), 2 * m * d, 1, consumers=1)
    ks = k.ring(k.tensor("K", heads * blocks, 2 * n * d, "kv", 1, keys), 2 * n * d, 2, consumers=1)
    vs = k.ring(k.tensor("V", heads * blocks, 2 * n * d, "kv", 1, keys), 2 * n * d, 2, consumers=1)
    out = k.tensor("O", len(tile), 2 * m * d, "q", layout=queries)
    with k.role("producer", warps=1, registers=40) as p, p.tiles():
        p.load(q)
        with p.loop(blocks, "keys"):
            p.load(ks)
            p.load(vs)
    with k.role("consumer", warpgroups=1, registers=200) as c, c.tiles():
        c.wait(q)
        with c.loop(blocks, "keys"):
            c.wait(ks)
            c.mma("QK", m=64, n=n, k=16, count=d // 16, effects=(Matmul("S", Smem("Q"), Smem("K"), transposed=True),))
            c.wait_mma()
            c.release(ks)
            c.vector("mask", {"alu": 64}, effects=(Mask("S"),))
            c.vector("row max", {"fmnmx": 68, "shfl": 4}, effects=(RowMax("S"),))
            softmax = (Rescale("O"), Probabilities("S"), RowSum("S"), Round("S", "P", "bf16"))
            c.vector("softmax", {"ffma": 64, "ex2": 66, "fadd": 64, "fmul": d / 2, "f2fp": 32}, effects=softmax)
            c.wait(vs)
            c.mma("PV", m=64, n=d, k=16, count=n // 16, a="register", effects=(Matmul("O", "P", Smem("V"), add=True),))
            c.wait_mma()
            c.release(vs)
        c.release(q)
        c.vector("divide", {"fmul": d / 2, "f2fp": d / 4}, effects=(Normalise("O"), Round("O", "O", "bf16")))
        c.copy("store O", out, out.line_bytes, "store", "threads", effects=(Store("O"),))
    return k
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", "verdict right, as far as checked"),
        (
            "            c.wait_mma()\n            c.release(ks)\n",
            "            c.release(ks)\n            c.wait_mma()\n",
            "race ",
        ),
        ("            c.release(vs)\n", "", "waits for 'V.empty'"),
        ('Rescale("O"), ', "", "a rescale is missing or twice"),
        ('effects=(Mask("S"),)', "effects=()", "takes in scores that the mask hides"),
        (
            '"kv", 1, keys), 2 * n * d, 2, consumers=1)\n    out',
            '"kv", 0, keys), 2 * n * d, 2, consumers=1)\n    out',
            "same keys",
        ),
        ('Normalise("O"), ', 'RowMax("S", "lse"), ', "were not divided by their row sum"),
        (
            '"V", heads * blocks, 2 * n * d, "kv", 1, keys), 2 * n * d, 2,',
            '"V", heads * blocks, 2 * n * d, "kv", 1, keys), 2 * n * d, 9,',
            "shared memory",
        ),
        ('(Store("O"),)', "()", "nothing was stored to O"),
    ],
)
def test_a_users_schedule_whole_and_broken(fasim, capsys, tmp_path, old, new, said):
    path = tmp_path / "my.py"
    assert not old or OWN.count(old) == 1
    path.write_text(OWN.replace(old, new) if old else OWN)
    code = fasim(f"check {path} --arch h100 --seqlen 333 --heads 2")
    out = " ".join(capsys.readouterr().out.split())
    assert said in out
    assert code == (1 if old else 0)


def test_effects_that_are_no_tuple_are_named(fasim, capsys, tmp_path):
    path = tmp_path / "my.py"
    path.write_text(OWN.replace('(Store("O"),)', '(Store("O"))'))
    assert fasim(f"check {path} --arch h100 --seqlen 333") == 2
    assert "operation 'store O': effects: expected a tuple of effects, got Store(" in capsys.readouterr().err


def rmse(fasim, tmp_path, options, schedule="fa2 --arch a100"):
    fasim(f"check {schedule} --seqlen 256 --heads 1 {options} --json {tmp_path}/check.json")
    return json.loads((tmp_path / "check.json").read_text())["values"][0]["rmse"]


def test_numeric_choices_cost_what_they_cost(fasim, tmp_path, capsys):
    own, cubic, line = (rmse(fasim, tmp_path, text) for text in ("", "--exp2-degree 3", "--exp2-degree 1"))
    assert "numerics  100% of the exponentials by degree 1\n" in capsys.readouterr().out
    assert own != cubic == pytest.approx(own, rel=1e-2)
    assert line > 5 * own
    assert own < rmse(fasim, tmp_path, "--exp2-degree 1 --exp2-fraction 0.25") < line
    assert rmse(fasim, tmp_path, "--p-format fp16") < 0.9 * own < 5 * own < rmse(fasim, tmp_path, "--p-format e4m3")


@pytest.mark.parametrize("schedule", ["fa2 --arch a100", "fa1 --arch a100", "fa3 --arch h100", "triton --arch b200"])
def test_any_schedule_keeps_its_output_with_a_rescale_threshold(fasim, tmp_path, schedule):
    own, seldom = (rmse(fasim, tmp_path, f"--spread 8 {text}", schedule) for text in ("", "--rescale-threshold 8"))
    assert own != seldom and seldom < 1.3 * own


def test_a_schedule_over_budget_exits_with_1(fasim, capsys):
    assert fasim(f"check fa3 --arch h100 {SMALL} --knob stages=9") == 1
    out = capsys.readouterr().out
    assert "structure fa3 on h100: shared memory" in out
    assert "values    not checked: the program does not run" in out


def test_bad_input_exits_with_2(fasim, capsys):
    assert fasim(f"check fa3 --arch h100 {SMALL} --knob stage=2") == 2
    assert "did you mean 'stages'?" in capsys.readouterr().err
    assert fasim(f"check fa3 --arch h100 {SMALL} --p-format e4m2") == 2
    assert "p_format: unknown format 'e4m2'; did you mean 'e4m3'?" in capsys.readouterr().err


def test_a_schedule_that_does_not_say_what_it_does_is_not_called_right(fasim, capsys, tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(
        "import numpy as np\n"
        "from fasim.program.library import schedule\n"
        "from fasim.program.language import Kernel\n"
        "@schedule(architectures=('hopper',), dtypes=('bf16',))\n"
        "def plain(problem, arch) -> Kernel:\n"
        "    k = Kernel('plain', problem, arch, {})\n"
        "    k.tiles = {'own': np.arange(4)}\n"
        "    with k.role('r', warps=4, registers=32) as r, r.tiles():\n"
        "        r.vector('work', {'ffma': 8})\n"
        "    return k\n"
    )
    result = check(load_schedule(path), Problem(batch=1, seqlen_q=64, heads_q=1), load_arch("h100"))
    assert result["passed"] and not result["annotated"]
    assert result["values"] is None
    assert result["values_reason"].startswith("the schedule does not say what its operations do")
    assert fasim(f"check {path} --arch h100 {SMALL}") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "values not checked: the schedule does not say what its operations do" in out
    assert out.endswith("verdict fits and does not deadlock; races and values were not checked")
    assert "races none" not in out


def test_the_same_seed_gives_the_same_result():
    arch, problem = load_arch("h100"), Problem(batch=1, seqlen_q=256, heads_q=1, dtype="fp8")
    one, two, other = (check(load_schedule("fa3"), problem, arch, seed=seed) for seed in (1, 1, 2))
    assert one == two
    assert one["values"] != other["values"]


# --- how wrong numbers look ------------------------------------------------------------------------------
def described(change):
    """What is said about exact outputs after ``change``."""
    problem = Problem(batch=1, seqlen_q=64, heads_q=2, head_dim=64)
    inputs = make_inputs(problem, 0)
    log = Log()
    exact = Arrays({"O": np.zeros((128, 64), np.float32)})
    for head in range(2):
        o = attention_reference(inputs["Q"][head], inputs["K"][head], inputs["V"][head]).output
        exact.data["O"][64 * head : 64 * (head + 1)] = o
    change(exact.data["O"])
    (error,) = compare(problem, inputs, exact, log)
    return error, [finding.message for finding in log.findings]


def test_exact_output_passes():
    error, found = described(lambda o: None)
    assert error.passed and found == []
    assert error.rmse < 1e-7 < error.straightforward_rmse


def test_rows_that_lack_a_factor_are_named():
    def change(o):
        o[10:20] *= 7

    error, _ = described(change)
    assert not error.passed
    assert error.hint == "10 of 128 rows, 10 to 19: each is right but for a factor (7 to 7)"


def test_rows_that_were_not_stored_are_named():
    def change(o):
        o[100] = np.nan

    error, found = described(change)
    assert not error.passed and error.max_abs == np.inf
    assert found == ["1 rows of O hold no number, the first is token 36 of head 1"]
