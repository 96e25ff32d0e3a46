import json
from pathlib import Path

import pytest
from fake_simulator import Fake, fake  # noqa: F401  (a fixture)
from test_cli import fasim  # noqa: F401  (a fixture)

from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.results.validation import Summary, Validation
from fasim.studies.validate.timing import validate

DATA = Path(__file__).parents[1] / "validation" / "data"
HEAD = "arch,kernel,dtype,direction,causal,batch,seqlen_q,seqlen_k,heads_q,heads_kv,head_dim,ms,sm_clock_mhz,cycles"


def row(kernel="fa3", seqlen=1000, head_dim=128, dtype="bf16", ms="", clock="1000", cycles="", arch="h200") -> str:
    return f"{arch},{kernel},{dtype},fwd,0,4,{seqlen},{seqlen},16,16,{head_dim},{ms},{clock},{cycles}"


@pytest.fixture
def study(tmp_path, fake: Fake):  # noqa: F811
    def run(*lines: str, head: str = HEAD, **options) -> Validation:
        path = tmp_path / "data.csv"
        path.write_text("\n".join((head, *lines)) + "\n")
        return validate(path, threads=1, **options)

    return run


def test_errors_are_signed_fractions_of_measured_cycles(study, fake: Fake):  # noqa: F811
    result = study(row(cycles="800"), row(cycles="1250", seqlen=1001))
    first, second = result.rows
    assert (first.predicted_cycles, first.measured_cycles, first.compared) == (1000, 800, "cycles")
    assert first.error == pytest.approx(0.25)
    assert second.error == pytest.approx(1001 / 1250 - 1)
    assert fake.simulated[0].problem == Problem(seqlen_q=1001)  # largest first
    assert {call.clock_mhz for call in fake.simulated} == {1000.0}


def test_cycles_follow_from_ms_and_clock(study):
    (result,) = study(row(ms="0.5", clock="1600")).rows
    assert result.measured_cycles == pytest.approx(0.5e-3 * 1600e6)


def test_without_a_clock_time_is_compared_at_the_clock_of_the_arch(study, fake: Fake):  # noqa: F811
    (result,) = study(row(ms="0.002", clock="", cycles="77")).rows
    assert fake.simulated[0].clock_mhz is None
    assert (result.compared, result.clock_mhz) == ("time", 1000.0)
    assert result.error == pytest.approx(1000 / 2000 - 1)


def test_a_locked_clock_is_an_upper_limit(study):
    line = row(ms="0.002", clock="")
    below, above = study(line + ",800", line + ",1830", head=HEAD + ",clock_limit_mhz").rows
    assert (below.clock_mhz, above.clock_mhz) == (800.0, 1000.0)
    assert below.error == pytest.approx(1000 / 1600 - 1)


def test_groups_and_totals(study):
    lines = [row(cycles="800"), row(cycles="1250"), row(cycles="2000", head_dim=64), row(ms="1", clock="1000")]
    result = study(*lines)
    wide = result.groups()["fa3", "bf16", "fwd", "128"]
    assert wide == Summary(3, pytest.approx((0.25 + 0.2 + 0.999) / 3), pytest.approx(0.999), pytest.approx(-0.949 / 3))
    assert result.groups()["fa3", "bf16", "fwd", "64"].bias == pytest.approx(-0.5)
    totals = result.totals()
    assert (totals["all"].n, totals["short"].n, totals["long"].n) == (4, 3, 1)


def test_rows_that_cannot_be_predicted_keep_their_reason(study):
    lines = [row(kernel="cudnn"), row(dtype="fp8"), row(dtype="fp7"), row(arch="h900"), row(), row(cycles="1000")]
    result = study(*lines)
    reasons = [r.reason or "" for r in result.rows]
    assert len(reasons) == 6
    assert reasons[0] == "no schedule for kernel 'cudnn'"
    assert "fp8 does not fit" in reasons[1]
    assert "fp7" in reasons[2] and "h900" in reasons[3] and "no measurement" in reasons[4] and reasons[5] == ""
    assert result.totals()["all"].n == 1


def test_a_column_named_after_a_knob_sets_it(study, fake: Fake):  # noqa: F811
    head = HEAD + ",pingpong,note"
    result = study(row(cycles="1000") + ",0,x", row(cycles="1000") + ",,y", head=head)
    assert [r.predicted_cycles for r in result.rows] == [2000, 1000]
    assert (result.knob_columns, result.carried_columns) == (("pingpong",), ("note",))
    assert result.to_dict()["rows"][0]["note"] == "x"


def test_aliases_pick_schedule_and_knobs(study, fake: Fake):  # noqa: F811
    study(row(kernel="fa4sm90", cycles="5"), row(kernel="fa3split", cycles="5"))
    assert sorted((c.schedule.name, *c.knobs.items()) for c in fake.simulated) == [("fa3", ("splits", 0)), ("fa4",)]


def test_equal_rows_are_simulated_once(study, fake: Fake):  # noqa: F811
    result = study(row(cycles="1000"), row(cycles="1100"), row(cycles="1000", clock="1001"))
    assert len(result.rows) == 3 and len(fake.simulated) == 2


def test_kernels_overrides_and_progress(study, fake: Fake):  # noqa: F811
    seen = []
    lines = (row(cycles="1"), row(kernel="fa4", cycles="1"))
    result = study(
        *lines, kernels=["fa4"], overrides=["chip.sm_count=7"], progress=lambda done, total: seen.append((done, total))
    )
    assert len(result.rows) == 1
    assert fake.simulated[0].arch.chip.sm_count == 7
    assert seen == [(1, 1)]


def test_effects_of_variants(study):
    head = HEAD + ",variant,pingpong"
    lines = [
        row(cycles="1000") + ",d128_default,",
        row(cycles="1500") + ",d128_nopp,0",
        row(cycles="900") + ",d128_same,1",
        row(cycles="700") + ",d128c_default,",  # another family
        row(cycles="500", seqlen=500) + ",d128_nopp,0",  # its shape has no default
    ]
    slower, same = study(*lines, head=head, effects=True).effects
    assert (slower.variant, slower.measured, slower.predicted) == ("d128_nopp", pytest.approx(0.5), pytest.approx(1.0))
    assert slower.sign_right
    assert (same.measured, same.predicted, same.sign_right) == (pytest.approx(-0.1), 0.0, False)


@pytest.mark.parametrize(
    ("head", "lines", "options", "message"),
    [
        (HEAD.replace("kernel", "kernal"), (), {}, "column 'kernel' is missing; did you mean 'kernal'?"),
        (HEAD.replace("ms,", "").replace(",cycles", ""), (), {}, "neither 'ms' nor 'cycles'"),
        (HEAD + ",error", (), {}, "column 'error' is reserved"),
        (HEAD + ",ms", (), {}, "column 'ms' is there twice"),
        (HEAD, (row(seqlen="x"),), {}, "data.csv:2: seqlen_q: 'x' is not a whole number"),
        (HEAD, (row(seqlen=""),), {}, "data.csv:2: seqlen_q: '' is not a whole number"),
        (HEAD, (row(cycles="-1"),), {}, "data.csv:2: cycles: '-1' is not a positive number"),
        (HEAD, (row() + ",1",), {}, "data.csv:2: more cells than columns"),
        (HEAD, (row(),), {"kernels": ["fa33"]}, "did you mean 'fa3'?"),
        (HEAD, (row(),), {"effects": True}, "column 'variant' is missing"),
        (HEAD, (row(),), {"overrides": ["sm.nothing=1"]}, "nothing"),
    ],
)
def test_bad_files_are_config_errors(study, head, lines, options, message):
    with pytest.raises(ConfigError) as error:
        study(*lines, head=head, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["h200_timing", "h200_fa3_ablations", "published_timing"])
@pytest.mark.usefixtures("fake")
def test_shipped_measurements_are_read(name):
    result = validate(DATA / f"{name}.csv", threads=1)
    assert len(result.rows) == len((DATA / f"{name}.csv").read_text().splitlines()) - 1
    assert all((r.error is None) == (r.reason is not None) for r in result.rows)
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.usefixtures("fake")
def test_ablations_have_a_default_for_each_variant():
    effects = validate(DATA / "h200_fa3_ablations.csv", threads=1, effects=True).effects
    nopp = [e.measured for e in effects if e.variant == "d64_nopp"]
    assert nopp == pytest.approx([0.163, 0.195, 0.198], abs=6e-4)


def test_command_prints_json_alone_and_fails_above(fasim, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "data.csv"
    path.write_text(f"{HEAD}\n{row(cycles='800')}\n{row(kernel='cudnn')}\n")
    assert fasim(f"validate --data {path} --jobs 1 --json - --fail-above 30") == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["groups"] == [
        {"kernel": "fa3", "dtype": "bf16", "direction": "fwd", "head_dim": 128, "n": 1}
        | {name: pytest.approx(0.25) for name in ("mape", "max", "bias")}
    ]
    assert {"predicted_cycles", "measured_cycles", "error", "reason"} <= set(data["rows"][1])
    assert "25.0" in err and "no schedule for kernel 'cudnn'" in err

    assert fasim(f"validate --data {path} --jobs 1 --rows --fail-above 20") == 3
    out, err = capsys.readouterr()
    assert "B4 S1000 H16 d128" in out
    assert err == f"fasim: {path}: above 20 %: fa3 bf16 fwd 128 25.0 %\n"


def test_nothing_predicted_is_a_failure(fasim, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "data.csv"
    path.write_text(f"{HEAD}\n{row(kernel='cudnn', cycles='1')}\n")
    assert fasim(f"validate --data {path} --jobs 1") == 0
    assert fasim(f"validate --data {path} --jobs 1 --fail-above 50") == 3
    assert "no row could be predicted" in capsys.readouterr().err


def test_threads_change_nothing(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("\n".join((HEAD, row(seqlen=512, cycles="1"), row(seqlen=640, ms="1", clock=""))) + "\n")
    alone, spread = (validate(path, threads=threads).to_dict() for threads in (1, 2))
    assert alone == spread
    assert [r["error"] is not None for r in alone["rows"]] == [True, True]


def test_plot_draws_every_predicted_row(fasim, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "data.csv"
    path.write_text("\n".join((HEAD, row(cycles="900"), row(kernel="fa4", cycles="900"), row(kernel="cudnn"))) + "\n")
    for name in ("a.svg", "b.svg", "c.png"):
        assert fasim(f"validate --data {path} --jobs 1 --plot {tmp_path / name}") == 0
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert all(name in text for name in ("fa3 bf16", "fa4 bf16", "2 rows")) and "cudnn" not in text
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_plot_refuses_what_it_cannot_draw(fasim, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "data.csv"
    path.write_text(f"{HEAD}\n{row(kernel='cudnn', cycles='1')}\n")
    assert fasim(f"validate --data {path} --jobs 1 --plot {tmp_path / 'a.png'}") == 2
    assert "nothing to draw" in capsys.readouterr().err
    assert fasim(f"validate --data {path} --jobs 1 --plot {tmp_path / 'a.pdf'}") == 2
    assert "(choices: .png, .svg)" in capsys.readouterr().err
    assert fasim(f"validate --counters {path} --plot {tmp_path / 'a.png'}") == 2


def test_rows_above_a_size_are_listed(study, fake: Fake):  # noqa: F811
    small, large = study(row(cycles="1000"), row(cycles="1", seqlen=9000), max_tflop=1).rows
    assert small.error == 0
    assert large.reason == "2.7 TFLOP: above --max-tflop 1"
    assert len(fake.simulated) == 1


def test_where_picks_rows_by_cell(fasim, tmp_path, fake: Fake, capsys):  # noqa: F811
    path = tmp_path / "data.csv"
    lines = [row(cycles="800") + ",A", row(cycles="1250", seqlen=1001) + ",B"]
    path.write_text("\n".join((HEAD + ",grade", *lines)) + "\n")
    assert fasim(f"validate --data {path} --jobs 1 --where grade=A --json -") == 0
    assert [r["grade"] for r in json.loads(capsys.readouterr().out)["rows"]] == ["A"]
    assert fasim(f"validate --data {path} --where grad=A") == 2
    assert "did you mean 'grade'" in capsys.readouterr().err
