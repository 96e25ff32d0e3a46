"""What a Run shows of itself: HTML for notebooks, its timeline, tables for pandas."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
from sample_run import TICKS, TRACKS, sample_run
from test_html import Page

from fasim.errors import ConfigError
from fasim.results.reasons import REASONS
from fasim.views.timeline import render_timeline


def test_a_run_shows_itself_as_html():
    run = sample_run()
    text = run._repr_html_()
    page = Page(text)
    assert page.loads == [] and "<script" not in text
    assert page.texts["h1"] == [f"{run.cycles:,.0f} cycles = {run.time_us:.4g} µs"]
    words = {word for texts in page.texts.values() for word in texts}
    assert {"consumer1", "dependency", "tensor", f"{run.utilisation['tensor']:.1f}"} <= words
    assert " id=" not in text  # several runs share a page


def test_names_are_escaped():
    run = replace(sample_run(), bottleneck="<script>alert(1)</script>")
    assert "<script" not in run._repr_html_()


def test_timeline_is_that_of_the_terminal():
    run = sample_run()
    assert run.trace is not None
    assert run.timeline() == render_timeline(run.trace)
    shown = run.timeline(sm=1, cycles=(2000, 4000), width=60)
    assert shown == render_timeline(run.trace, sm=1, cycles=(2000, 4000), width=60)
    with pytest.raises(ConfigError, match="no trace"):
        replace(run, trace=None).timeline()


def test_runs_concatenate_to_a_table():
    runs = [sample_run(), sample_run(pingpong=False)]
    table = pd.concat([run.to_frame() for run in runs], ignore_index=True)
    assert list(table["cycles"]) == [run.cycles for run in runs]
    assert list(table["pingpong"]) == [True, False]
    assert set(table["head_dim"]) == {128} and set(table["arch"]) == {"h200"}
    assert list(table["hbm_read_bytes"]) == [run.traffic["hbm_read_bytes"] for run in runs]


def test_utilisation_and_stalls():
    run = sample_run()
    units = run.to_frame("utilisation")
    assert units["run"].to_dict() == run.utilisation
    assert units["steady"].to_dict() == run.utilisation_steady
    assert replace(run, utilisation_steady=None).to_frame("utilisation")["steady"].isna().all()
    stalls = run.to_frame("stalls")
    assert list(stalls.columns) == list(REASONS)
    assert stalls.to_dict("index") == run.stalls
    assert stalls.sum(axis=1).to_numpy() == pytest.approx(100)


def test_trace_is_decoded():
    run = sample_run()
    table = run.to_frame("trace")
    assert run.trace is not None and len(table) == len(run.trace)
    tensor = table[(table.track == "tensor") & (table.sm == 0)]
    assert set(tensor.reason) == {"busy"} and set(tensor.owner) == {"consumer0", "consumer1"}
    assert set(table[table.track == "consumer0"].owner) == {""}
    work = table[(table.track == "consumer0") & (table.reason == "work")]
    assert {"exp2", "row_max"} <= set(work.name)
    assert (
        work.end_cycles.max()
        == run.trace.end[run.trace.kind == 0][run.trace.track[run.trace.kind == 0] == TRACKS.index("consumer0")].max()
        / TICKS
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [("stall", r"unknown table 'stall'; did you mean 'stalls'\? \(choices: run, "), ("trace", "no trace")],
)
def test_bad_tables_are_named(what, message):
    with pytest.raises(ConfigError, match=message):
        replace(sample_run(), trace=None).to_frame(what)


def test_without_pandas_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'fasim\[frames\]'"):
        sample_run().to_frame()


def test_a_run_brings_no_view_along():
    loaded = "import sys, fasim.results.run; sys.exit(any('views' in name or 'pandas' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", loaded], timeout=60).returncode == 0
