import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import call

from fasim.arch import load_arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.results.reasons import REASONS, UNITS
from fasim.results.run import Run
from fasim.studies.batch import Job
from fasim.studies.simulate import simulate
from fasim.studies.validate import counters as study
from fasim.studies.validate.counters import PIPES, compare_counters
from fasim.views.counters_report import render_counters

DATA = Path(__file__).parents[1] / "validation" / "data" / "h200_counters.csv"
REQUESTS = DATA.with_name("h200_l2_requests.csv")
SHAPE = ("arch", "kernel", "dtype", "direction", "causal", "batch", "seqlen_q", "heads_q", "head_dim", "kernel_name")


def line(kernel="fa3", direction="fwd", name="attention", scale=1.0, elapsed=1000.0, tma=1.0, **changes: object) -> str:
    """A launch: active for 800 of 1000 cycles, ``scale`` x 50 % of every unit's peak, 64 B a cycle into SMEM."""
    cells: dict[str, object] = dict.fromkeys(PIPES.values(), 50 * scale)
    cells |= {study._ACTIVE: 0.8 * elapsed, study._ELAPSED: elapsed, study._TMA: tma}
    cells |= {study._WAVEFRONTS: 0.2 * elapsed, study._FILL_BYTES: 64 * elapsed}
    cells |= {"lts__t_sectors_op_read.sum": 100, "dram__bytes_read.sum": 1000, "dram__bytes_write.sum": 500}
    shape = ("h200", kernel, "bf16", direction, 0, 4, 512, 16, 128, name)
    cells = dict(zip(SHAPE, shape, strict=True)) | cells | changes
    return ",".join(str(cells[key]) for key in (*SHAPE, *study._COUNTERS))


@pytest.fixture
def compare(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Compare lines with a run that keeps every unit 41 % busy; ``naive`` is three kernels."""
    knobs: list[dict[str, object]] = []

    def simulate(job: Job) -> Run:
        knobs.append(dict(job.knobs))
        traffic = {"sm_read_bytes": 64000.0, "l2_read_bytes": 3600.0, "l2_far_bytes": 400.0}
        traffic |= {"hbm_read_bytes": 900.0, "hbm_write_bytes": 500.0}
        return Run(
            cycles=1000.0,
            time_us=1.0,
            clock_mhz=1000.0,
            tflops=1.0,
            peak_percent=1.0,
            bottleneck="tensor",
            utilisation=dict.fromkeys(UNITS, 41.0),
            utilisation_steady=None,
            stalls={"consumer": dict.fromkeys(REASONS, 10.0)},
            traffic=traffic,
            events=1,
            meta={"kernels": ["k"] * (3 if job.schedule == "naive" else 1)},
        )

    monkeypatch.setattr(Job, "run", simulate)

    def run(*lines: str, **options):
        path = tmp_path / "counters.csv"
        path.write_text("\n".join((",".join((*SHAPE, *study._COUNTERS)), *lines)) + "\n")
        result = compare_counters(path, **options)
        return result, knobs

    return run


def test_utilisation_is_scaled_to_elapsed_cycles_and_bytes_are_relative(compare):
    result, _ = compare(line())
    (launch,) = result.launches
    assert launch.measured["tensor"] == pytest.approx(50 * 0.8)
    assert launch.error("tensor") == pytest.approx(1.0)
    assert launch.measured["smem"] == pytest.approx(100 * (0.2 + 0.5))  # wavefronts, and 64 of 128 B
    assert launch.measured["l2_read_bytes"] == 3200  # sectors of 32 bytes
    assert launch.error("l2_read_bytes") == pytest.approx(0.25)  # with what partitions pass on
    assert launch.error("sm_read_bytes") == 0.0
    assert launch.error("hbm_read_bytes") == pytest.approx(-0.1)


def test_launches_of_a_shape_are_taken_together(compare):
    parts = [line("naive", elapsed=3000.0), line("naive", scale=0.0, tma=0.0), line("naive", scale=0.0)]
    result, _ = compare(*parts)
    (launch,) = result.launches
    assert launch.measured["tensor"] == pytest.approx(50 * 0.8 * 3000 / 5000)
    assert launch.measured["hbm_write_bytes"] == 1500
    assert "smem" not in launch.measured  # one of them does not load by TMA
    assert launch.error("smem") is None


def test_mean_absolute_does_not_cancel(compare):
    low, high = line(), line(scale=1.05, head_dim=64)  # 40 and 42 % against 41
    result, _ = compare(low, high)
    assert [launch.error("mufu") for launch in result.launches] == pytest.approx([1.0, -1.0])
    assert result.mean_absolute()["mufu"] == pytest.approx(1.0)
    assert result.mean_absolute()["hbm_write_bytes"] == 0.0


def test_every_row_is_compared_or_has_a_reason(compare):
    rows = [
        line(),
        line(name="void at::vectorized_elementwise_kernel<4>"),
        line("cudnn"),
        line("naive"),
        line("fa2", name="pytorch_flash::flash_fwd_kernel"),
    ]
    result, knobs = compare(*rows)
    assert [launch.columns["kernel"] for launch in result.launches] == ["fa3", "fa2"]
    reasons = {row.columns["kernel"]: row.reason for row in result.unpredicted}
    assert reasons == {
        "fa3": "auxiliary kernel of PyTorch",
        "cudnn": "no schedule for kernel 'cudnn'",
        "naive": "1 kernels were launched, the schedule has 3",
    }
    assert {"build": "pytorch"} in knobs  # the kernel's name says which build of fa2 it is


def test_backward_has_no_schedule(tmp_path):
    path = tmp_path / "counters.csv"
    path.write_text("\n".join((",".join((*SHAPE, *study._COUNTERS)), line("fa2", direction="bwd"))) + "\n")
    result = compare_counters(path)
    assert not result.launches
    assert "bwd" in result.unpredicted[0].reason


@pytest.mark.parametrize(
    ("change", "message"),
    [({study._ELAPSED: "n/a"}, f"counters.csv:2: {study._ELAPSED}: 'n/a'"), ({"causal": "maybe"}, "causal: 'maybe'")],
)
def test_bad_cells_name_file_row_and_column(compare, change, message):
    with pytest.raises(ConfigError, match=r"counters\.csv:2") as error:
        compare(line(**change))
    assert message in str(error.value)


def test_missing_column_is_named(tmp_path):
    path = tmp_path / "short.csv"
    path.write_text(",".join(SHAPE) + "\n")
    with pytest.raises(ConfigError, match=r"short\.csv: column 'sm__cycles_active\.sum' is missing"):
        compare_counters(path)


def test_table_and_json(compare):
    result, _ = compare(line(), line("cudnn"))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_counters(result))
    text = console.export_text()
    assert "fa3 B4 S512 H16 d128 bf16 forward" in text and "+25.0 %" in text
    assert "no schedule for kernel 'cudnn'" in text
    data = json.loads(json.dumps(result.to_dict()))
    assert data["launches"][0]["error"]["l2_read_bytes"] == pytest.approx(0.25)
    assert data["not_predicted"][0]["kernel"] == "cudnn"


def test_command_refuses_what_is_for_timings(monkeypatch, capsys):
    assert call(monkeypatch, f"fasim validate --counters {DATA} --rows") == 2
    assert "--rows" in capsys.readouterr().err
    assert call(monkeypatch, "fasim validate") == 2
    assert "give --data (timings) or --counters" in capsys.readouterr().err


@pytest.mark.slow
def test_fa3_uses_its_units_as_counted():
    """The compiled engine on the real file: BF16 d128 within 3 points of every unit."""
    result = compare_counters(DATA, kernels=["fa3"])
    launch = next(launch for launch in result.launches if launch.name == "fa3 B4 S4096 H16 d128 bf16 forward")
    for unit in study.UNITS:
        assert abs(launch.error(unit) or 0.0) < 3.0, unit
    assert abs(launch.error("l2_read_bytes") or 0.0) < 0.01  # multicast: nothing to merge
    assert abs(launch.error("hbm_write_bytes") or 0.0) < 0.06  # some of O is still in L2


@pytest.mark.slow
def test_sms_ask_for_the_bytes_that_were_counted():
    """What arrives in SMs, what L2 serves of it, and what crosses between the partitions."""
    with REQUESTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        shape = {name: int(row[name]) for name in ("batch", "seqlen_q", "heads_q", "head_dim")}
        knobs = {"pingpong": row["pingpong"]} if row["pingpong"] else {}
        traffic = simulate("fa3", Problem(**shape, dtype=row["dtype"]), load_arch("h200"), knobs=knobs).traffic
        counted = {name: float(cell) for name, cell in row.items() if "sectors" in name or "bytes" in name if cell}
        if row["cluster"] == "1":  # without multicast, what SMs ask for is what they get
            asked = counted.get("lrc_coalescable_sectors", counted.get("l1tex__m_xbar2l1tex_read_bytes.sum", 0.0) / 32)
            assert traffic["sm_read_bytes"] == pytest.approx(32 * asked, rel=0.001), row
        if served := counted.get("lts__t_sectors_srcunit_tex_op_read.sum"):
            # how many reads merge before L2 depends on how closely SMs keep step: validation/DEVIATIONS.md
            assert traffic["l2_read_bytes"] == pytest.approx(32 * served, rel=0.25), row
            passed_on = counted["lts__t_sectors_op_read.sum"] - served
            assert traffic["l2_far_bytes"] == pytest.approx(32 * passed_on, rel=0.3), row
