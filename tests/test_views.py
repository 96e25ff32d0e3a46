"""The views show what the run holds: the numbers add up, files parse back, bad input is named."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group
from sample_run import GEMM_CYCLES, TICKS, TRACKS, report_text, sample_run, sample_trace

from fasim.analysis.bounds import bounds
from fasim.analysis.compare import compare
from fasim.arch import load_arch
from fasim.errors import ConfigError
from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import Run, Trace
from fasim.views import common, plot, report, timeline
from fasim.views.bounds_report import render_bounds
from fasim.views.common import atomic_output, rows_of, window_of
from fasim.views.compare_report import render_comparison
from fasim.views.perfetto import write_trace
from fasim.views.pictures import PALETTE
from fasim.views.plot import plot_timeline
from fasim.views.report import render_report
from fasim.views.timeline import render_timeline

TENSOR = TRACKS.index("tensor")


def make_trace(slices: list[tuple[int, int, str, str]], tracks: tuple[str, ...] = TRACKS) -> Trace:
    """A one-SM trace of (start, end, track, reason or owner of a unit slice), one tick a cycle."""
    rows = []
    for start, end, track, what in sorted(slices):
        kind = REASONS.index(what) if what in REASONS else UNIT_SLICE
        owner = tracks.index(what) if what in tracks else -1
        rows.append((start, end, 0, 0, tracks.index(track), 0, kind, 0, -1, owner, -1))
    return Trace(1, tracks, ("op",), *np.array(rows, dtype=np.int64).T)


def sample_in(module: ModuleType) -> str:
    """The sample output in a module's docstring."""
    assert module.__doc__ is not None
    block = module.__doc__.split("A sample::\n\n")[1].split("\nHow to read it")[0]
    return textwrap.dedent(block).strip("\n")


# ---- report


def test_docstring_shows_the_real_report() -> None:
    assert sample_in(report) == report_text(sample_run(), 80).rstrip("\n")


def test_headline_states_clock_reason_knobs_and_overrides() -> None:
    head = report_text(sample_run(pingpong=False), 120).split("\n\n")[0]
    assert "68,391 cycles = 42.74 us at 1600 MHz (h200.toml: sustained clock of 16-bit tensor work)" in head
    assert "bottleneck: latency" in head
    assert "fa3 · B3 S1408 H8 d128 bf16 forward · h200 · sm.mufu.ops_per_cycle=16 · pingpong=off" in head


@given(st.lists(st.integers(0, 10_000), min_size=len(REASONS), max_size=len(REASONS)).filter(any))
def test_printed_stall_rows_add_up_to_100(weights: list[int]) -> None:
    shares = {reason: 100 * w / sum(weights) for reason, w in zip(REASONS, weights, strict=True)}
    text = report_text(replace(sample_run(), stalls={"mma": shares}))
    (row,) = re.findall(r"^mma +(.*)$", text, re.MULTILINE)
    printed = [float(cell) for cell in row.split() if cell != "-"]
    assert sum(printed) == pytest.approx(100, abs=1e-9)


def test_utilisation_lists_the_chips_units_by_value() -> None:
    run = replace(sample_run(), utilisation={"alu": 10.0, "tensor": 70.0, "tmem": 30.0}, utilisation_steady=None)
    table = report_text(run).split("\n\n")[1]
    assert re.findall(r"^(\w+) +[\d.]+", table, re.MULTILINE) == ["tensor", "tmem", "alu"]
    assert "steady" not in table
    assert re.search(r"^tensor .*limit$", table, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_report_fits_the_width_and_loses_nothing(width: int) -> None:
    run = sample_run()
    shares = dict(zip(REASONS, (50.0, *[100 / 18] * 9), strict=True))
    text = report_text(replace(run, stalls={"correction": shares}), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert text.count("5.5") + text.count("5.6") >= 9
    assert (" dependency " in text) == (width > 60)


@pytest.mark.parametrize("bottleneck", ["tensor", "latency"])
def test_no_number_is_cut_off_at_40_columns(bottleneck: str) -> None:
    shares = dict(zip(REASONS, (50.0, *[100 / 18] * 9), strict=True))
    run = replace(sample_run(), stalls={"correction": shares}, bottleneck=bottleneck)
    text = report_text(run, 40)
    assert max(len(line) for line in text.splitlines()) <= 40
    assert "…" not in text and " steady" in text
    assert re.search(r"^mufu +54\.2 +58\.5", text, re.MULTILINE)
    told = " ".join(text.split("Time of each role, %\n")[1].split("\n\n")[0].split())
    assert told.startswith("correction: work 50.0 ")
    assert [float(n) for n in re.findall(r"[\d.]+", told)] == pytest.approx([50.0, *[100 / 18] * 9], abs=0.06)


def test_comparison_and_bounds_at_40_columns() -> None:
    run = replace(sample_run(), cycles=9_876_543.0)
    problem = {"batch": 3, "seqlen_q": 1408, "heads_q": 8, "head_dim": 128, "dtype": "bf16"}
    whole = replace(run, meta={**run.meta, "problem": problem})
    found = bounds(whole, load_arch("h200"))
    shown = Group(render_comparison(compare([("A", run), ("B", sample_run())])), render_bounds(whole, found))
    console = Console(file=StringIO(), width=40, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    text = capture.get()
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 40
    assert "A: 9,876,543 cycles, 32.93 us at 1600 MHz" in " ".join(text.split())
    assert re.search(r"^tensor +[\d,]+ +[\d,]{9} +85\.5 +92\.4$", text, re.MULTILINE)


def test_legend_of_colours_where_there_are_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def output(**options: bool) -> str:
        file = StringIO()
        Console(file=file, width=80, **options).print(render_report(sample_run()))
        return file.getvalue()

    assert "a wait above 20 %" in output(force_terminal=True)
    assert "a wait above 20 %" not in output()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "a wait above 20 %" not in output(force_terminal=True)


def test_colour_only_for_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def output(**options: bool) -> str:
        file = StringIO()
        Console(file=file, width=80, **options).print(render_report(sample_run()))
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    red = re.compile(r"\x1b\[[\d;]*31m")
    assert red.search(output(force_terminal=True))
    assert "\x1b" not in output()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not red.search(output(force_terminal=True))


# ---- timeline


def test_docstring_shows_the_real_timeline() -> None:
    assert sample_in(timeline) == render_timeline(sample_trace()).plain


def row_of(text: str, label: str) -> str:
    (row,) = re.findall(rf"^{label} +(\S+) +\d+ %$", text, re.MULTILINE)
    return row


def test_pingpong_and_serial_are_told_apart_on_the_tensor_row() -> None:
    pingpong = row_of(render_timeline(sample_trace()).plain, "tensor")
    serial = row_of(render_timeline(sample_trace(pingpong=False)).plain, "tensor")
    assert re.fullmatch(r"(0+1+\.{,2})+", pingpong)
    assert serial.count(".") > 2 * pingpong.count(".")


def test_a_cell_shows_what_took_most_of_it() -> None:
    first = [(0, 6, "producer", "work"), (6, 10, "producer", "full")]
    tie = [(10, 14, "producer", "memory"), (14, 18, "producer", "barrier")]
    idle = [(20, 23, "producer", "work"), (23, 26, "producer", "full")]
    trace = make_trace([*first, *tie, *idle, (300, 400, "producer", "empty")])
    text = render_timeline(trace, cycles=(0, 400), width=10 + 40 + 6).plain
    assert "10 cycles per column" in text
    # Most work; the earlier reason of two equal ones; neither has as much as the idle rest.
    assert row_of(text, "producer") == "#b." + "." * 27 + "e" * 10
    assert "   2 %\n" in text  # 9 of 400 cycles are work


def test_every_reason_has_its_character() -> None:
    slices = [(10 * i, 10 * i + 10, "producer", reason) for i, reason in enumerate(REASONS)]
    assert row_of(render_timeline(make_trace(slices), cycles=(0, 100), width=118).plain, "producer") == "".join(
        mark * 10 for mark in "#i=dbfem.."
    )


def test_tensor_owner_marks_are_digits_or_initials_and_unique() -> None:
    tracks = ("mma", "softmax1", "merge", "tensor")
    trace = make_trace([(0, 9, "tensor", "mma"), (9, 20, "tensor", "softmax1"), (20, 30, "tensor", "merge")], tracks)
    text = render_timeline(trace, cycles=(0, 30), width=45).plain
    assert text.endswith("tensor: m merge   0 mma   1 softmax1")
    assert row_of(text, "tensor") == "0" * 9 + "1" * 11 + "m" * 10


def test_cta_slots_have_their_own_rows_and_units_only_when_they_overlap() -> None:
    labels = [row.label for row in rows_of(sample_trace(slots=2), 0)]
    assert labels[:6] == [f"{role}/{slot}" for slot in (0, 1) for role in TRACKS[:3]]
    assert labels[6:] == ["tensor/0", "tensor/1", "tma/0", "tma/1"]
    assert [row.label for row in rows_of(sample_trace(), 1)] == list(TRACKS)
    turns = make_trace([(0, 5, "tensor", "consumer0"), (5, 9, "tensor", "consumer0")])
    turns = replace(turns, slot=np.array([0, 1]))
    assert [row.label for row in rows_of(turns, 0)] == ["tensor"]
    assert row_of(render_timeline(turns, cycles=(0, 9), width=40).plain, "tensor") == "000001111"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=20), st.integers(1, 40))
def test_time_in_cells_adds_up(gaps: list[tuple[int, int]], per_column: int) -> None:
    slices, now = [], 0
    for idle, busy in gaps:
        slices.append((now + idle, now + idle + busy, "producer", REASONS[busy % len(REASONS)]))
        now += idle + busy
    trace = make_trace(slices)
    (row,) = rows_of(trace, 0)
    edges = np.arange(0, now + 2 * per_column, per_column)
    share = timeline._time_share(trace, row, trace.kind[row.index], len(REASONS), edges)
    assert share.min() >= 0
    assert share.sum(axis=0).max() <= 1 + 1e-9
    for kind in range(len(REASONS)):
        expected = (trace.end - trace.start)[trace.kind == kind].sum()
        assert share[kind].sum() * per_column == pytest.approx(expected)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_timeline_fits_the_width(width: int) -> None:
    assert max(len(line) for line in render_timeline(sample_trace(), width=width).plain.splitlines()) <= width


def test_default_window_is_four_steady_iterations_of_one_tile() -> None:
    trace = sample_trace()
    first, last = window_of(trace, 0, None)
    total = int(trace.end.max()) / TICKS
    assert 0.25 * total < (first + last) / 2 < 0.75 * total
    inside = (trace.sm == 0) & (trace.start >= first * TICKS) & (trace.start < last * TICKS)
    consumer = inside & (trace.track == TRACKS.index("consumer0"))
    assert len(np.unique(trace.iteration[consumer])) == common.DEFAULT_ITERATIONS
    assert len(np.unique(trace.tile[consumer])) == 1
    assert trace.iteration[consumer].min() > 0


def test_short_recording_is_shown_whole() -> None:
    assert window_of(make_trace([(3, 20, "tensor", "consumer0")]), 0, None) == (3, 20)


def test_truncation_is_said() -> None:
    assert "truncated" in render_timeline(replace(sample_trace(), truncated=True)).plain


def test_what_is_not_in_the_trace_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"SM 7 .*choices: 0, 1"):
        render_timeline(sample_trace(), sm=7)
    for cycles in ((500, 500), (600, 500), (90_000, 91_000)):
        with pytest.raises(ConfigError, match=rf"cycles {cycles[0]}:{cycles[1]}: .*0:52685"):
            render_timeline(sample_trace(), cycles=cycles)


# ---- picture


def pair() -> list[tuple[str, Run]]:
    return [("ping-pong", sample_run()), ("serial", sample_run(pingpong=False))]


def test_svg_is_reproducible_and_says_what_it_shows(tmp_path: Path) -> None:
    plot_timeline(pair(), tmp_path / "a.svg")
    plot_timeline(pair(), tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "<dc:date>" not in text
    for word in (
        "ping-pong",
        "serial",
        "consumer1",
        "exp2",
        "QK",
        "wait for empty",
        "92 %",
        "fasim 0.1.0",
        "5f2c9d1e77aa",
    ):
        assert word in text, word


def test_svg_draws_every_tensor_slice_in_the_colour_of_its_owner(tmp_path: Path) -> None:
    run = sample_run()
    window = (0, int(run.cycles))
    plot_timeline([("all", run)], tmp_path / "a.svg", cycles=window)
    text = (tmp_path / "a.svg").read_text()
    blue = text.count(f'style="fill: {PALETTE[0].lower()}')
    trace, row = run.trace, REASONS.index("work")
    assert trace is not None
    mine = (trace.sm == 0) & (trace.owner == 1) & (trace.track == TENSOR)
    work = (trace.sm == 0) & (trace.track == 1) & (trace.kind == row)
    assert blue == mine.sum() + work.sum() + 1  # and the legend


def test_png_has_provenance(tmp_path: Path) -> None:
    plot_timeline(pair(), tmp_path / "a.PNG", sm=1)
    data = (tmp_path / "a.PNG").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert b"fasim 0.1.0" in data
    assert b"5f2c9d1e77aa" in data


def test_panels_have_the_same_length_from_their_own_steady_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[str, tuple[int, int], int]] = []
    draw = plot._draw_row

    def spy(axes, trace, row, position, window, origin, colours):  # type: ignore[no-untyped-def]
        seen.append((row.label, window, origin))
        return draw(axes, trace, row, position, window, origin, colours)

    monkeypatch.setattr(plot, "_draw_row", spy)
    plot_timeline(pair(), tmp_path / "a.png")
    windows = [(window, origin) for label, window, origin in seen if label == "tensor"]
    assert [origin for _, origin in windows] == [window_of(sample_trace(pingpong=p), 0, None)[0] for p in (True, False)]
    assert len({last - first for (first, last), _ in windows}) == 1


def test_plot_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.pdf: unknown picture format '\.pdf' \(choices: \.png, \.svg\)"):
        plot_timeline(pair(), tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match="no trace"):
        plot_timeline([("x", replace(sample_run(), trace=None))], tmp_path / "a.png")
    with pytest.raises(ConfigError, match="no runs"):
        plot_timeline([], tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


# ---- trace files

Parsed = dict[tuple[str, str], list[tuple[float, float, str, dict[str, object]]]]


def read_json(path: Path) -> Parsed:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    names: dict[tuple[str, int, int], str] = {}
    tracks: Parsed = defaultdict(list)
    for event in json.loads(data)["traceEvents"]:
        key = event["pid"], event["tid"]
        if event["ph"] == "M":
            names[(event["name"], *key)] = event["args"].get("name", "")
        else:
            where = names[("process_name", *key)], names[("thread_name", *key)]
            tracks[where].append((event["ts"], event["ts"] + event["dur"], event["name"], event["args"]))
    return tracks


def read_pftrace(path: Path) -> Parsed:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

    packets = pb.Trace.FromString(path.read_bytes()).packet
    processes: dict[int, str] = {}
    names: dict[int, tuple[str, str]] = {}
    tracks: Parsed = defaultdict(list)
    for packet in packets:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.HasField("process"):
                processes[track.uuid] = track.process.process_name
            else:
                names[track.uuid] = processes[track.parent_uuid], track.name
            continue
        event, cycles = packet.track_event, packet.timestamp / 1000
        where = names[event.track_uuid]
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            args = {a.name: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations}
            tracks[where].append((cycles, -1.0, event.name, args))
        else:
            start, _, name, args = tracks[where][-1]
            tracks[where][-1] = (start, cycles, name, args)
    return tracks


READERS = {".pftrace": read_pftrace, ".json": read_json, ".json.gz": read_json}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("suffix", READERS)
def test_trace_file_holds_every_slice(suffix: str, slots: int, tmp_path: Path) -> None:
    run = sample_run(slots=slots)
    assert run.trace is not None
    write_trace(run, tmp_path / f"run{suffix}")
    tracks = READERS[suffix](tmp_path / f"run{suffix}")
    ((_, end, title, args),) = tracks.pop(("fasim", "run"))
    assert (end, args["clock_mhz"], args["scale"]) == (run.cycles, 1600.0, "1 us = 1 cycle")
    assert title.startswith("fa3 · B3 S1408")

    assert {process for process, _ in tracks} == {"SM 0 (1 us = 1 cycle)", "SM 1 (1 us = 1 cycle)"}
    assert sum(len(slices) for slices in tracks.values()) == len(run.trace)
    for slices in tracks.values():
        assert all(a[1] <= b[0] for a, b in pairwise(slices))
    total = sum(end - start for slices in tracks.values() for start, end, _, _ in slices)
    assert total == (run.trace.end - run.trace.start).sum() / TICKS


@pytest.mark.parametrize("suffix", READERS)
def test_slices_carry_tile_iteration_reason_and_owner(suffix: str, tmp_path: Path) -> None:
    write_trace(sample_run(), tmp_path / f"run{suffix}")
    tracks = READERS[suffix](tmp_path / f"run{suffix}")
    sm = "SM 0 (1 us = 1 cycle)"
    start, end, name, args = tracks[(sm, "tensor")][2]
    assert (name, end - start) == ("QK", GEMM_CYCLES)
    assert args == {"reason": "busy", "tile": 0, "iteration": 0, "owner": "consumer1"}
    consumer = tracks[(sm, "consumer0")]
    assert consumer[0][2:] == ("launch", {"reason": "launch"})
    names = [
        next(name for _, _, name, args in consumer if args["reason"] == reason and name.endswith(op))
        for reason, op in (("work", "exp2"), ("pipe", "exp2"), ("issue", "QK"))
    ]
    assert names == ["exp2", "pipe: exp2", "issue: QK"]


@pytest.mark.parametrize("suffix", READERS)
def test_same_run_same_bytes(suffix: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_trace(sample_run(), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_trace_file_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"run\.txt: .*\(choices: \.pftrace, \.json, \.json\.gz\)"):
        write_trace(sample_run(), tmp_path / "run.txt")
    with pytest.raises(ConfigError, match="no trace"):
        write_trace(replace(sample_run(), trace=None), tmp_path / "run.json")
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(ConfigError, match=r"fasim\[trace\]"):
        write_trace(sample_run(), tmp_path / "run.pftrace")
    assert not list(tmp_path.iterdir())


# ---- output files


def test_unwritable_path_is_named_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "run.json"
    with pytest.raises(ConfigError, match=re.escape(f"{missing}: cannot write: No such file or directory")):
        write_trace(sample_run(), missing)
    (tmp_path / "dir.json").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        write_trace(sample_run(), tmp_path / "dir.json")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half way"), atomic_output(path) as file:
        file.write(b"new")
        raise RuntimeError("half way")
    assert path.read_text() == "old"
    with pytest.raises(ConfigError, match="disk full"), atomic_output(path):
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    with atomic_output(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"


def test_importing_the_views_is_light() -> None:
    code = "import sys, fasim.views.plot, fasim.views.perfetto; print({'matplotlib', 'perfetto'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
