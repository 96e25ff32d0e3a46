"""The HTML report holds what the run holds, loads nothing from elsewhere, and works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from fake_simulator import Fake, fake  # noqa: F401
from sample_run import GEMM_CYCLES, TICKS, TRACKS, sample_run
from test_cli import call

from fasim.analysis.bounds import bounds
from fasim.analysis.critical_path import EventGraph
from fasim.analysis.losses import Loss
from fasim.analysis.whatif import Gain
from fasim.arch import load_arch
from fasim.engine import image as im
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.results.reasons import REASONS
from fasim.results.run import Run
from fasim.studies.simulate import TraceSpec, simulate
from fasim.views import html
from fasim.views.common import rows_of, window_of
from fasim.views.html import write_html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
VOID = {"meta", "link", "br", "img"}
B200 = load_arch("b200", ("chip.sm_count=4",))
LOSSES = (
    Loss("launch and ramp", 1e3, 5.0, "launch and dispatch take no time"),
    Loss("memory", -2e3, -10.0, "HBM infinitely fast"),
    Loss("unit contention", 5e3, 25.0, "vector pipes infinitely fast"),
)


class Page(HTMLParser):
    """Checks nesting; collects text by tag, tables by id, and every attribute that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.loads: list[str] = []
        self.styles: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [f"{tag} {name}" for name in given if name in ("src", "href", "srcset", "action", "data")]
        self.styles += [given["style"] or ""] if "style" in given else []
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = self.tables[given.get("id") or ""] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(text)
            if self.open[-1] in ("td", "th"):
                self.rows[-1][-1] += text


def written(path: Path, run=None, **options) -> str:
    write_html(sample_run() if run is None else run, path / "run.html", **options)
    return (path / "run.html").read_text()


def embedded(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def absolute(row: dict) -> np.ndarray:
    """Start, end, kind, name, tile, iteration of the slices of a row, shape (n, 6), times in ticks."""
    slices = np.array(row["slices"]).reshape(-1, 6)
    times = np.cumsum(slices[:, :2].ravel()).reshape(-1, 2)
    return np.column_stack((times, slices[:, 2:]))


def test_page_holds_every_slice_of_the_sm(tmp_path):
    run = sample_run()
    assert run.trace is not None
    data = embedded(written(tmp_path, run, sm=1))
    rows = rows_of(run.trace, 1)
    assert [row["label"] for row in data["rows"]] == [row.label for row in rows] == list(TRACKS)
    for row, found in zip(rows, data["rows"], strict=True):
        t, i, shown = run.trace, row.index, absolute(found)
        kept = np.column_stack((t.start[i], t.end[i], t.name[i], t.tile[i], t.iteration[i]))
        assert np.array_equal(shown[:, [0, 1, 3, 4, 5]], kept)
        if row.is_unit:
            assert [found["owners"][o] for o in shown[:, 2]] == [TRACKS[o] for o in t.owner[i]]
        else:
            assert np.array_equal(shown[:, 2], t.kind[i])
    assert data["window"] == list(window_of(run.trace, 1, None))
    assert data["ticks"] == TICKS
    assert set(data["colours"]) == {"producer", "consumer0", "consumer1"}


def test_page_loads_nothing_and_forbids_it(tmp_path):
    text = written(tmp_path, losses=LOSSES)
    assert Page(text).loads == []
    assert not re.search(r"https?:|url\(|@import|\bfetch\(|XMLHttpRequest", text)
    assert "default-src 'none'" in text


def test_tables_say_what_the_run_says(tmp_path):
    run = sample_run()
    page = Page(written(tmp_path, run))
    shown = {row[0]: row[1:3] for row in page.tables["utilisation"][1:]}
    assert run.utilisation_steady is not None
    assert shown == {u: [f"{p:.1f}", f"{run.utilisation_steady[u]:.1f}"] for u, p in run.utilisation.items()}
    head, *roles = page.tables["stalls"]
    assert [row[0] for row in roles] == list(run.stalls)
    assert set(head[1:]) <= set(REASONS)
    for row in roles:
        assert sum(float(cell) for cell in row[1:] if cell != "-") == pytest.approx(100)
    assert page.tables["traffic"][1][:3] == ["L2", "199.0", "8.7"]
    assert page.texts["h1"] == [f"{run.cycles:,.0f} cycles = {run.time_us:.4g} µs"]
    assert {"5f2c9d1e77aa", "sm.mufu.ops_per_cycle=16"} <= set(page.texts["dd"])


def test_waterfall_ends_at_100_percent(tmp_path):
    page = Page(written(tmp_path, losses=LOSSES))
    assert [row[:2] for row in page.tables["losses"]] == [
        ["useful", "80.0"],
        ["launch and ramp", "5.0"],
        ["memory", "-10.0"],
        ["unit contention", "25.0"],
    ]
    falls = [re.fullmatch(r"margin-left:([\d.]+)%;width:([\d.]+)%", style) for style in page.styles]
    assert [tuple(map(float, m.groups())) for m in falls if m] == [(0, 80), (80, 5), (75, 10), (75, 25)]
    assert "losses" not in Page(written(tmp_path)).tables


@pytest.fixture(scope="module")
def fa4() -> Run:
    """A run whose roles hand over to each other all the time."""
    return simulate("fa4", Problem(batch=1, seqlen_q=1024, heads_q=1), B200, trace=TraceSpec())


def links(data: dict) -> set[tuple[int, int, int, int]]:
    """Row and position of every slice with a cause in a page, and those of the cause."""
    found = set()
    for r, row in enumerate(data["rows"]):
        i, last = 0, [0] * len(data["rows"])
        for step, other, ahead in np.array(row["causes"]).reshape(-1, 3).tolist():
            i, last[other] = i + step, last[other] + ahead
            found.add((r, i, other, last[other]))
    return found


def test_page_holds_what_released_each_slice(tmp_path, fa4, monkeypatch):
    assert fa4.trace is not None
    rows = [row.index.tolist() for row in rows_of(fa4.trace, 0)]
    place = {i: (r, position) for r, row in enumerate(rows) for position, i in enumerate(row)}
    causes = EventGraph(fa4.trace).causes().tolist()
    expected = {(*place[i], *place[cause]) for i, cause in enumerate(causes) if i in place and cause in place}
    assert links(embedded(written(tmp_path, fa4, arch=B200))) == expected
    assert len(expected) > 0.2 * len(place)
    monkeypatch.setattr(html, "MAX_SLICES", len(place) // 2)
    cut = embedded(written(tmp_path, fa4, arch=B200))
    sizes = [len(row["slices"]) // 6 for row in cut["rows"]]
    assert 0.3 * len(expected) < len(links(cut)) < 0.7 * len(expected)
    assert all(i < sizes[r] and j < sizes[other] for r, i, other, j in links(cut))


def test_gains_go_to_both_sides_and_the_limit_is_said(tmp_path):
    gains = [
        Gain(n, f"what {n} is", p, None) for n, p in {"tensor": 6.0, "vector": 1.0, "mufu": 0.8, "smem": -2.0}.items()
    ]
    page = Page(written(tmp_path, gains=gains, losses=LOSSES))
    assert [row[:2] for row in page.tables["gains"]] == [
        ["tensor", "+6.0"],
        ["vector", "+1.0"],
        ["mufu", "+0.8"],
        ["smem", "-2.0"],
    ]
    bars = [re.fullmatch(r"margin-left:([\d.]+)%;width:([\d.]+)%", style) for style in page.styles]
    assert [tuple(map(float, m.groups())) for m in bars if m][-4:] == [(25, 75), (25, 12.5), (25, 10), (0, 25)]
    assert any("Limit: tensor (what tensor is)" in text for text in page.texts["p"])
    assert "gains" not in Page(written(tmp_path)).tables


def test_roofline_shows_the_run_under_its_roof(tmp_path, fa4):
    text = written(tmp_path, fa4, arch=B200)
    found = bounds(fa4, B200)
    assert f"moves one byte for {found.simulated_intensity:,.0f} FLOP; from {found.story.ridge:,.0f} on" in text
    x, y = map(float, re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text).groups())
    slope = re.search(r'class="roof" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)L', text)
    x0, y0, x1, y1 = map(float, slope.groups())
    assert y > y1 + (y0 - y1) * max(0.0, x1 - x) / (x1 - x0)  # y grows downwards
    assert Page(text).loads == []
    assert 'id="roofline"' not in written(tmp_path, fa4)


def test_same_run_gives_the_same_bytes(tmp_path):
    assert written(tmp_path, losses=LOSSES) == written(tmp_path, losses=LOSSES)


def test_hostile_text_stays_text(tmp_path):
    run = sample_run()
    assert run.trace is not None
    evil = "</script><script>alert('x')</script>&"
    trace = replace(run.trace, names=tuple(name and evil + name for name in run.trace.names))
    text = written(tmp_path, replace(run, trace=trace, bottleneck=evil, meta={**run.meta, "schedule": evil}))
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    assert embedded(text)["names"][1] == evil + "QK"
    assert unescape("".join(Page(text).texts["title"])).startswith(f"fasim: {evil}")


def test_long_recording_is_cut_around_the_window_and_says_so(tmp_path, monkeypatch):
    run = sample_run()
    assert run.trace is not None
    assert 'id="cut"' not in written(tmp_path, run)
    monkeypatch.setattr(html, "MAX_SLICES", 60)
    text = written(tmp_path, run)
    data = embedded(text)
    first, last = data["limits"]
    assert first < sum(data["window"]) / 2 < last
    rows = list(map(absolute, data["rows"]))
    # Slices that reach into the window from the left are kept: nothing in it is blank.
    assert 60 <= sum(map(len, rows)) <= 60 + len(rows)
    assert all(end > TICKS * first and start <= TICKS * last for row in rows for start, end, *_ in row)
    assert f"Cut to cycles {first:,} to " in text
    assert "about 60 of " in text


def test_file_of_a_long_recording_stays_below_3_megabytes(tmp_path):
    run = sample_run()
    assert run.trace is not None
    n = html.MAX_SLICES + 1000
    # Numbers as wide as those of the longest runs of shipped schedules.
    start = 30_000 * np.arange(n)
    columns = {"start": start, "end": start + 15_000, "tile": start % 8999 + 1000, "iteration": start % 899 + 100}
    zeros = {name: np.zeros(n, dtype=np.int64) for name in ("sm", "slot", "track", "kind")}
    none = np.full(n, -1)
    trace = replace(run.trace, **columns, **zeros, name=np.full(n, 10), owner=none, cause=none)
    text = written(tmp_path, replace(run, trace=trace))
    assert f"of {n:,} slices" in text
    assert 2e6 < len(text.encode()) < 3e6


def test_window_opens_the_view(tmp_path):
    assert embedded(written(tmp_path, cycles=(2000, 3000)))["window"] == [2000, 3000]


@pytest.mark.parametrize(
    ("name", "change", "options", "message"),
    [
        ("run.htm", {}, {}, r"run\.htm: unknown report format '\.htm' \(choices: \.html\)"),
        ("run.html", {"trace": None}, {}, "no trace"),
        ("run.html", {}, {"sm": 7}, r"SM 7 is not in the trace \(choices: 0, 1\)"),
        ("run.html", {}, {"cycles": (10**8, 10**9)}, "cycles 100000000:1000000000"),
        ("none/run.html", {}, {}, "cannot write"),
    ],
)
def test_bad_input_is_named_and_leaves_no_file(tmp_path, name, change, options, message):
    with pytest.raises(ConfigError, match=message):
        write_html(replace(sample_run(), **change), tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_run_option_traces_and_writes(monkeypatch, fake: Fake):  # noqa: F811
    calls = []
    view = SimpleNamespace(write_html=lambda run, path, *, arch, sm, cycles: calls.append((str(path), sm, cycles)))
    monkeypatch.setitem(sys.modules, "fasim.views.html", view)
    assert call(monkeypatch, "fasim run fa3 --arch h100 --html out.html --sm 2 --cycles 10:20") == 0
    assert calls == [("out.html", 2, (10, 20))]
    assert fake.simulated[0].trace.sms == (0, 2)


# ---- in the browser


class Browser:
    """A headless Chromium, driven over WebDriver (w3.org/TR/webdriver2): its input events are real ones."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None and DRIVER is not None
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        arguments += ["--window-size=1200,1000", f"--user-data-dir={profile}"]
        self.driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.driver.stdout is not None
        started = (re.search(r"successfully on port (\d+)", line) for line in self.driver.stdout)
        self.url = f"http://127.0.0.1:{next(found[1] for found in started if found)}/session"
        wanted = {
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            self.url += "/" + self.post("", capabilities={"alwaysMatch": wanted})["sessionId"]
        except BaseException:
            self.driver.kill()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send(Request(self.url, method="DELETE"))
        finally:
            self.driver.kill()
            self.driver.communicate()

    def post(self, path: str, **body: Any) -> Any:
        return self._send(Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}))

    def _send(self, request: Request) -> Any:
        with urlopen(request, timeout=30) as answer:
            return json.load(answer)["value"]

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression after the next frame, to which the page defers drawing."""
        script = (
            f"const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done({expression})))"
        )
        return self.post("/execute/async", script=script, args=[])

    def act(self, kind: str, *actions: dict[str, Any]) -> None:
        parameters = {"parameters": {"pointerType": "mouse"}} if kind == "pointer" else {}
        self.post("/actions", actions=[{"type": kind, "id": kind, "actions": actions, **parameters}])

    def point(self, x: float, y: float, *more: dict[str, Any]) -> None:
        self.act("pointer", {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}, *more)

    def key(self, code: str) -> None:
        """Press a key: one of WebDriver's code points or a character."""
        self.act("key", {"type": "keyDown", "value": code}, {"type": "keyUp", "value": code})

    def window(self) -> tuple[int, int]:
        """The window the page says it shows, in cycles."""
        first, last = re.findall(r"[\d,]+", self.value('document.getElementById("window").textContent'))
        return int(first.replace(",", "")), int(last.replace(",", ""))

    def place(self, cycle: float, row: int) -> tuple[float, float]:
        """Where a cycle of a row is on the screen."""
        box = "canvas.getBoundingClientRect()"
        x, y = self.value(f"[{box}.left + x({cycle}), {box}.top + TOP + ROW * ({row} + 0.5)]")
        return x, y


LEFT_KEY, UP_KEY, RIGHT_KEY, DOWN_KEY, HOME_KEY, END_KEY = (chr(c) for c in (*range(0xE012, 0xE016), 0xE011, 0xE010))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium and its driver")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def opened(browser, tmp_path):
    """The browser with the sample report; its console has to be empty at the end of the test."""
    write_html(sample_run(), tmp_path / "run.html", losses=LOSSES)
    browser.post("/url", url=(tmp_path / "run.html").as_uri())
    yield browser, embedded((tmp_path / "run.html").read_text())
    assert browser.post("/se/log", type="browser") == []


def test_console_errors_are_seen(browser, tmp_path):
    (tmp_path / "bad.html").write_text("<script>nowhere()</script>")
    browser.post("/url", url=(tmp_path / "bad.html").as_uri())
    assert "nowhere is not defined" in browser.post("/se/log", type="browser")[0]["message"]


def test_pointing_at_a_slice_says_what_it_is(opened):
    browser, data = opened
    row = TRACKS.index("tensor")
    later = (s for s in absolute(data["rows"][row]) if s[0] > TICKS * (data["window"][0] + 500))
    start, end, owner, name, tile, iteration = next(later)
    who = data["rows"][row]["owners"][owner]
    x, y = browser.place((start + end) / 2 / TICKS, row)
    browser.point(x, y)
    assert browser.value("tip.innerText.split('\\n')") == [
        data["names"][name],
        f"tensor: issued by {who}",
        f"tile {tile}, iteration {iteration}",
        f"{start // TICKS:,} to {end // TICKS:,}: {GEMM_CYCLES} cycles",
    ]
    role = data["rows"].index(next(row for row in data["rows"] if row["label"] == who))
    wait = next(s for s in absolute(data["rows"][role]) if s[0] > start and REASONS[s[2]] == "dependency")
    browser.point(*browser.place((wait[0] + wait[1]) / 2 / TICKS, role))
    assert browser.value("tip.innerText.split('\\n')[1]") == f"{who}: dependency"
    copies = absolute(data["rows"][TRACKS.index("tma")])
    gap = next((a[1] + b[0]) / 2 for a, b in pairwise(copies) if b[0] > a[1] > TICKS * data["window"][0])
    browser.point(*browser.place(gap / TICKS, TRACKS.index("tma")))
    assert browser.value("tip.offsetWidth") == 0
    browser.point(x, y)
    assert browser.value("tip.offsetWidth") > 0
    browser.point(x, 10)
    assert browser.value("tip.offsetWidth") == 0
    colour = data["colours"][who]
    inside = f"x({start / TICKS + GEMM_CYCLES / 8}) * devicePixelRatio, (TOP + ROW * {row} + 7) * devicePixelRatio"
    pixel = browser.value(f"[...pen.getImageData({inside}, 1, 1).data].slice(0, 3)")
    assert pixel == pytest.approx([int(colour[i : i + 2], 16) for i in (1, 3, 5)], abs=2)


def test_wheel_zooms_at_the_pointer_and_dragging_moves(opened):
    browser, data = opened
    first, last = data["window"]
    assert browser.window() == (first, last)
    quarter = first + (last - first) / 4
    x, y = browser.place(quarter, 0)
    at = {"x": round(x), "y": round(y), "duration": 0}
    browser.act("wheel", {"type": "scroll", **at, "deltaX": 0, "deltaY": -400})
    inner = browser.window()
    assert inner[1] - inner[0] == pytest.approx((last - first) * 1.0015**-400, rel=0.01)
    assert inner[0] + (inner[1] - inner[0]) / 4 == pytest.approx(quarter, rel=0.01)
    browser.value('document.getElementById("reset").click()')
    assert browser.window() == (first, last)
    to = {"type": "pointerMove", "x": round(x - 100), "y": round(y), "duration": 0}
    browser.point(x, y, {"type": "pointerDown", "button": 0}, to, {"type": "pointerUp", "button": 0})
    moved = 100 / browser.value("width - LEFT - RIGHT") * (last - first)
    assert browser.window() == pytest.approx((first + moved, last + moved), abs=2)


def test_keys_move_and_zoom_within_the_recording(opened):
    browser, data = opened
    first, last = data["window"]
    length = last - first
    browser.value("canvas.focus()")
    browser.key(RIGHT_KEY)
    assert browser.window() == pytest.approx((first + length / 5, last + length / 5), abs=1)
    browser.key(LEFT_KEY)
    assert browser.window() == (first, last)
    browser.key(UP_KEY)
    assert browser.window() == pytest.approx((first + 0.15 * length, last - 0.15 * length), abs=1)
    browser.key(END_KEY)
    assert browser.window() == tuple(data["limits"])
    for key in (DOWN_KEY, RIGHT_KEY, LEFT_KEY):
        browser.key(key)
        assert browser.window() == tuple(data["limits"])
    browser.key(HOME_KEY)
    assert browser.window() == (first, last)


def test_arrows_lead_from_what_released_a_slice(browser, tmp_path, fa4):
    write_html(fa4, tmp_path / "run.html", arch=B200)
    data = embedded((tmp_path / "run.html").read_text())
    browser.post("/url", url=(tmp_path / "run.html").as_uri())
    shown = "data.rows.flatMap((row, r) => [...row.cause].map(([i, c]) => [r, i, data.rows.indexOf(c.row), c.i]))"
    assert set(map(tuple, browser.value(shown))) == links(data)
    labels = [row["label"] for row in data["rows"]]
    waiter, wait = labels.index("softmax0"), data["names"].index("wait S")
    slices = absolute(data["rows"][waiter])
    other, j, i = next(
        (other, j, i)
        for row, i, other, j in sorted(links(data))
        if row == waiter and slices[i][3] == wait and slices[i][0] > im.TICKS * data["window"][0]
    )
    end = absolute(data["rows"][other])[j][1] / im.TICKS
    half = f"x({end}) * devicePixelRatio - 3, (TOP + ROW * {max(waiter, other)}) * devicePixelRatio, 7, 1"
    browser.point(*browser.place((slices[i][0] + slices[i][1]) / 2 / im.TICKS, waiter))
    assert browser.value("tip.innerText.split('\\n').at(-1)") == f"released by {labels[other]}: QK of mma"
    # Between the rows there is nothing as dark as ink but the arrow.
    assert min(browser.value(f"[...pen.getImageData({half}).data].filter((_, i) => i % 4 < 3)")) < 60
    assert browser.post("/se/log", type="browser") == []


def test_light_and_dark(opened):
    browser, _ = opened
    for scheme, paper in (("light", [255, 255, 255]), ("dark", [22, 24, 28])):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.post("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": [feature]})
        assert browser.value("getComputedStyle(document.body).backgroundColor") == f"rgb({', '.join(map(str, paper))})"
        # A wait is hatched on a pale ground; its middle tone follows the page.
        luma = browser.value("look('full', '#808080').plain.match(/\\d+/g).map(Number)")
        assert luma == pytest.approx([0.3 * 128 + 0.7 * tone for tone in paper], abs=1)
