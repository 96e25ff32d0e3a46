import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomlkit
from test_cli import call

from fasim.arch import arch_folder, load_arch
from fasim.errors import ConfigError
from fasim.results.validation import Row, Validation
from fasim.studies import kernel_fit
from fasim.studies.calibrate.estimates import Estimate
from fasim.studies.calibrate.microbench import Microbench
from fasim.studies.calibrate.rules import POWER_OF_TWO, RULES, Rule
from fasim.studies.calibrate.study import calibrate, current_value, set_value, with_values
from fasim.studies.kernel_fit import Fitter, KernelFit, Parameter

RESULTS = Path(__file__).parents[1] / "validation" / "data" / "h200_microbench.json"


def results_file(path: Path, chip: str = "NVIDIA H200", **tables: dict[str, list[object]]) -> Path:
    """Results of one program ``p`` with tables given by column."""
    content = {
        name: {"columns": list(columns), "rows": [list(row) for row in zip(*columns.values(), strict=True)]}
        for name, columns in tables.items()
    }
    program = {"status": "ok", "sm_clock_mhz": 1500.4, "tables": content}
    head = {"schema_version": 1, "chip": chip, "driver": "580.1", "date": "2026-01-02T03:04:05Z"}
    path.write_text(json.dumps({**head, "benchmarks": {"p": program, "q": {"status": "failed", "reason": "late"}}}))
    return path


def rule(key: str, value: float, grain: float = 1, **options: object) -> Rule:
    return Rule(key, "p", lambda results: Estimate(value, 0.5, 3), grain, **options)


# ---- the checked-in files ----


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_results_recreate_the_checked_in_file(name, tmp_path):
    path = arch_folder() / f"{name}.toml"
    content = path.read_text()
    result = calibrate(RESULTS, path)
    assert result.text == content, f"run: fasim calibrate {RESULTS} --arch {name} -o {path}"
    stated = [change.rule for change in result.changes if not change.inherited]
    spoilt = tomlkit.parse(content)
    for part in stated:
        old = current_value(load_arch(name), part.key)
        other = tuple(2 * v for v in old) if isinstance(old, tuple) else 2 * old
        set_value(spoilt, part.key, part.text(other), "measured somewhere else")
    copy = tmp_path / f"{name}.toml"
    copy.write_text(tomlkit.dumps(spoilt))
    assert copy.read_text() != content and len(stated) >= 5
    assert calibrate(RESULTS, copy).text == content


def test_every_rule_is_stated_in_one_of_the_files():
    stated = {c.rule.key for name in ("h100", "h200") for c in calibrate(RESULTS, name).changes if not c.inherited}
    assert stated == {rule.key for rule in RULES}


def test_rules_find_the_chip_they_know(tmp_path):
    """Estimates before rounding, against what is certain about Hopper or was published by others."""
    found = {rule.key: rule.formula(Microbench.read(RESULTS)).value for rule in RULES}
    assert found["sm.tensor.flops_per_cycle.bf16"] == pytest.approx(4096, rel=0.001)
    assert found["sm.tensor.flops_per_cycle.fp8"] == pytest.approx(8192, rel=0.001)
    assert found["sm.tensor.mma_sync_flops_per_cycle"] == pytest.approx(4 * 4096 / 6.05, rel=0.01)
    assert found["sm.tensor.async_mma.overhead_cycles"] < 0.1
    assert found["sm.smem.bytes_per_cycle"] == pytest.approx(128, rel=0.01)
    assert found["sm.mufu.ops_per_cycle"] == pytest.approx(16, rel=0.01)
    assert found["hbm.achieved_bytes_per_second"] < load_arch("h200").hbm.peak_bytes_per_second
    assert found["launch.cta_dispatch_ns"] == pytest.approx(0.54, rel=0.2)


# ---- the mechanism ----


def test_order_comments_and_other_numbers_stay(tmp_path):
    path = tmp_path / "mine.toml"
    text = 'base = "h100"  # like it\n\n[sm.mufu]\n# above\nlatency_cycles = 40  # dependent; A\nops_per_cycle = 8\n'
    path.write_text(text)
    results = results_file(tmp_path / "r.json")
    result = calibrate(results, path, [rule("sm.mufu.latency_cycles", 17.3)])
    note = " [measured 2026-01-02: p, NVIDIA H200, driver 580.1, 1500 MHz]"
    assert result.text == text.replace("40  # dependent; A", f"17  # dependent; A{note}")
    (change,) = result.changes
    assert (change.old, change.new, change.inherited) == (40, 17, False)
    path.write_text(result.text)
    assert calibrate(results, path, [rule("sm.mufu.latency_cycles", 17.3)]).text == result.text


def test_what_the_base_has_is_stated_only_where_it_differs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100"\n')
    rules = [rule("sm.mufu.ops_per_cycle", 15.8, POWER_OF_TWO), rule("sm.tensor.flops_per_cycle.fp8", 8001.0)]
    result = calibrate(results_file(tmp_path / "r.json"), path, rules)
    assert [change.inherited for change in result.changes] == [True, False]
    path.write_text(result.text)
    arch = load_arch(path)
    assert (arch.sm.mufu.ops_per_cycle, arch.sm.tensor.flops_per_cycle["fp8"]) == (16, 8001)
    assert "mufu" not in result.text and result.text.startswith('base = "h100"\n')


def test_numbers_of_a_product_need_that_product(tmp_path):
    results = results_file(tmp_path / "r.json", chip="NVIDIA H100 80GB HBM3")
    part = rule("l2.latency_cycles", 999.0, of_the_chip=True)
    taken, left = calibrate(results, "h100", [part]), calibrate(results, "h200", [part])
    assert "latency_cycles = 999 " in taken.text and not left.changes
    assert left.skipped == (("l2.latency_cycles", "measured on NVIDIA H100 80GB HBM3, not on NVIDIA H200 SXM 141 GB"),)


def test_a_program_that_failed_sets_nothing(tmp_path):
    part = replace(rule("sm.mufu.latency_cycles", 1.0), program="q")
    result = calibrate(results_file(tmp_path / "r.json"), "h100", [part])
    assert result.skipped == (("sm.mufu.latency_cycles", "q has no results"),)
    assert result.text == (arch_folder() / "h100.toml").read_text()


@pytest.mark.parametrize(
    ("value", "grain", "text"),
    [
        (126.4, POWER_OF_TWO, "128"),
        (4.08, 0.1, "4.1"),
        (0.996, 0.1, "1.0"),
        (4731.0, 50, "4750"),
        (4.616e12, 1e11, "4.6e12"),
        ((0.0, 0.094), 0.01, "[0.00, 0.09]"),
    ],
)
def test_rounding(value, grain, text):
    part = rule("x", 0.0, grain)
    assert part.text(part.rounded(Estimate(value, 0.0, 1))) == text
    assert isinstance(tomlkit.value(text).unwrap(), int | float | list)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "'benchmarks' is missing"),
        ('{"benchmarks": {}, "schema_version": 2}', "schema_version: expected 1, got 2"),
        ('{"benchmarks": {}, "schema_version": 1, "chip": 3}', "chip: expected a string, got 3"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Microbench.read(path)


def test_missing_tables_columns_and_rows_are_named(tmp_path):
    results = Microbench.read(results_file(tmp_path / "r.json", rate={"op": ["ex2", "shfl"], "lanes": [16, 32]}))
    assert results.column("p.rate", "lanes", op=("ex2", "shfl")).tolist() == [16, 32]
    for table, column, where, message in (
        ("p.rates", "lanes", {}, r"no table 'p.rates'; did you mean 'rate'"),
        ("p.rate", "lane", {}, r"no column 'lane'; did you mean 'lanes'"),
        ("p.rate", "lanes", {"op": "ffma"}, r"no row with op = ffma"),
    ):
        with pytest.raises(ConfigError, match=message):
            results.column(table, column, **where)


def test_other_architectures_are_refused():
    with pytest.raises(ConfigError, match="describe Hopper, 'a100' is ampere"):
        calibrate(RESULTS, "a100")


# ---- fits on whole kernels ----

FIT = KernelFit((Parameter("a", 0, 10, 11, 0.5), Parameter("b", 0, 4, 5, 0.5)), ("k",), {"dtype": "bf16"})


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Row i errs by (a - 7) (1 + i / 10) and, where odd, by b - 2, in per cent; the overrides simulated with.

    An error jumps by half a per cent on every second value of ``a``, but for the one that is right.
    """
    asked: list[list[str]] = []

    def validate(data, *, kernels, cells, overrides, threads):
        assert (kernels, cells) == (("k",), {"dtype": "bf16"})
        asked.append(overrides)
        a, b = (float(text.partition("=")[2]) for text in overrides)
        jump = 0.5 * (a % 2) * (-1) ** (a // 2) * (a != 7)
        rows = [Row({}, i == 12, error=((a - 7) * (1 + i / 10) + i % 2 * (b - 2) + jump) / 100) for i in range(13)]
        return Validation("", "", "compiled", (), tuple(rows), (), ())

    monkeypatch.setattr(kernel_fit, "validate", validate)
    return asked


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "data.csv"
    path.write_text("kernel\nk\n")
    return path


def test_a_half_is_enough_to_find_the_values(data, simulations):
    fitter = Fitter([data], FIT)
    for result in fitter.cross_validate(range(2)):
        assert result.values == (7.0, 2.0)
        assert (result.fitted.n, result.held_out.n) == (6, 6)  # the short row is neither
        assert result.fitted.mape == result.held_out.mape == 0
    assert len(simulations) == 55, "each point once, whatever the number of fits"


def test_what_was_simulated_is_resumed(data, simulations, tmp_path):
    file = tmp_path / "points.jsonl"
    points = [(0.0, 0.0), (1.0, 0.0)]
    first = Fitter([data], FIT, resume=file).errors(points)
    with file.open("a") as stream:
        stream.write('{"origin": "cut o')
    again = Fitter([data], FIT, resume=file)
    assert np.array_equal(again.errors(points), first) and len(simulations) == 2
    data.write_text("kernel\nk\nk\n")
    file.write_text(file.read_text().rpartition("\n")[0] + "\n")
    Fitter([data], FIT, resume=file).errors(points)
    assert len(simulations) == 4
    file.write_text("a note\nof mine\n")
    with pytest.raises(ConfigError, match="not a file of results: 'a note'"):
        Fitter([data], FIT, resume=file)


def test_rows_without_prediction_or_too_few_of_them_are_refused(data, monkeypatch):
    for rows, message in (([Row({}, False, reason="no schedule")], "no schedule"), ([], "0 rows to fit on")):
        result = Validation("", "", "compiled", (), tuple(rows), (), ())
        monkeypatch.setattr(kernel_fit, "validate", lambda *_, found=result, **__: found)
        with pytest.raises(ConfigError, match=message):
            Fitter([data], FIT).errors([(0.0, 0.0)])


def test_the_parameters_exist_and_are_measured_in_the_range_of_the_fit():
    text = (arch_folder() / "h100.toml").read_text()
    for parameter in kernel_fit.KERNEL_FIT.parameters:
        value = current_value(load_arch("h100"), parameter.key)
        assert parameter.lowest < value < parameter.highest
        assert re.search(rf"^{parameter.key.rpartition('.')[2]} = {value:g}  #.*\[measured ", text, re.MULTILINE)


def test_a_fitted_value_replaces_the_last_fit():
    key = "sm.interference.fmul_stop_cycles"
    once = with_values("h100", [(key, "99", "fitted on a b c")])
    assert once.count("[fitted on a b c]") == 1
    assert load_arch("h100").content_digest() != "" and "fmul_stop_cycles = 99  #" in once


# ---- the command ----


def test_command_prints_and_writes(monkeypatch, tmp_path, capsys):
    assert call(monkeypatch, f"fasim calibrate {RESULTS} --arch h200") == 0
    out = capsys.readouterr().out
    assert re.search(r"sm\.mufu\.latency_cycles +17 +17 +17 +0 +1 +measured +pipes +in base", out)
    output = tmp_path / "mine.toml"
    assert call(monkeypatch, f"fasim calibrate {RESULTS} --arch h200 -o {output}") == 0
    assert output.read_text() == (arch_folder() / "h200.toml").read_text()
    assert "written" in capsys.readouterr().err


def test_command_fits_kernels(monkeypatch, simulations, data, tmp_path, capsys):
    monkeypatch.setattr(kernel_fit, "KERNEL_FIT", FIT)
    monkeypatch.setattr(kernel_fit.Fitter.__init__, "__defaults__", (FIT,))
    line = f"fasim calibrate --fit-kernels {data} --arch h100"
    assert call(monkeypatch, f"{line} --cross-validate 2") == 0
    out = capsys.readouterr().out
    assert "mean: fitted 0.00 %, held out 0.00 %, +0.00 points" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arch h200", "give RESULTS.json"),
        ("{results} --fit-kernels x.csv --arch h200", "give RESULTS.json"),
        ("{results} --arch h200 --cross-validate 2", "--cross-validate: needs --fit-kernels"),
        ("--fit-kernels x.csv --cross-validate 2 --arch h200 -o x.toml", "--cross-validate: writes no file"),
        ("{results}x --arch h200", "cannot read: No such file"),
        ("{results} --arch h900", "unknown architecture 'h900'"),
        ("--fit-kernels /nowhere.csv --arch h200", "/nowhere.csv: cannot read"),
    ],
)
def test_command_names_bad_input(monkeypatch, capsys, arguments, message):
    assert call(monkeypatch, f"fasim calibrate {arguments.format(results=RESULTS)}") == 2
    assert message in capsys.readouterr().err
