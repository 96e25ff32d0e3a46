import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tomlkit
from test_cli import call

from fasim.arch import arch_folder, load_arch
from fasim.errors import ConfigError
from fasim.studies.calibrate.estimates import Estimate
from fasim.studies.calibrate.microbench import Microbench
from fasim.studies.calibrate.rules import POWER_OF_TWO, RULES, Rule
from fasim.studies.calibrate.study import calibrate, current_value, set_value

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


# ---- the command ----


def test_command_prints_and_writes(monkeypatch, tmp_path, capsys):
    assert call(monkeypatch, f"fasim calibrate {RESULTS} --arch h200") == 0
    out = capsys.readouterr().out
    assert re.search(r"sm\.mufu\.latency_cycles +17 +17 +17 +0 +1 +measured +pipes +in base", out)
    output = tmp_path / "mine.toml"
    assert call(monkeypatch, f"fasim calibrate {RESULTS} --arch h200 -o {output}") == 0
    assert output.read_text() == (arch_folder() / "h200.toml").read_text()
    assert "written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arch h200", "Missing argument 'RESULTS.json'"),
        ("{results}x --arch h200", "cannot read: No such file"),
        ("{results} --arch h900", "unknown architecture 'h900'"),
    ],
)
def test_command_names_bad_input(monkeypatch, capsys, arguments, message):
    assert call(monkeypatch, f"fasim calibrate {arguments.format(results=RESULTS)}") == 2
    assert message in capsys.readouterr().err
