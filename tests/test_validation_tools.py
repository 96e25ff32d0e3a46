"""The GPU tools in ``validation/``, as far as they can be checked without a GPU, and the results they left."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

VALIDATION = Path(__file__).resolve().parent.parent / "validation"
MICROBENCH = VALIDATION / "microbench" / "run.py"
TIME_KERNELS = VALIDATION / "time_kernels.py"
TRITON = VALIDATION / "triton_attention.py"
PHASES = VALIDATION / "triton_phases.py"
RESULT = VALIDATION / "data" / "h200_microbench.json"


def call(script: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if path is not None:
        environment["PATH"] = path
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def tool(folder: Path, name: str, body: str) -> None:
    """An executable shell script."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


@pytest.fixture
def run_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(MICROBENCH.parent))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    return importlib.import_module("run")


# ---- microbench/run.py ----


def test_missing_output_and_unknown_program_are_usage_errors(tmp_path: Path) -> None:
    missing = call(MICROBENCH)
    assert missing.returncode == 2
    assert "-o FILE is required" in missing.stderr
    unknown = call(MICROBENCH, "-o", str(tmp_path / "x.json"), "--only", "wgma")
    assert unknown.returncode == 2
    assert "unknown program wgma (choices: arbitration, " in unknown.stderr


def test_missing_compiler_and_gpu_are_named(tmp_path: Path) -> None:
    output = str(tmp_path / "x.json")
    no_compiler = call(MICROBENCH, "-o", output, path=str(tmp_path))
    assert no_compiler.returncode == 2
    assert "nvcc not found" in no_compiler.stderr
    tool(tmp_path, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    no_gpu = call(MICROBENCH, "-o", output, path=str(tmp_path))
    assert no_gpu.returncode == 2
    assert "nvidia-smi not found: the benchmarks need an NVIDIA GPU" in no_gpu.stderr
    tool(tmp_path, "nvidia-smi", "echo 'NVIDIA A100, 580.1, 8.0'")
    other_gpu = call(MICROBENCH, "-o", output, path=str(tmp_path))
    assert other_gpu.returncode == 2
    assert "NVIDIA A100 has compute capability 8.0" in other_gpu.stderr
    assert not Path(output).exists()


FAKE_NVCC = r"""
case "$*" in
  --version) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit 0;;
  *sync.cu*) echo 'sync.cu(1): error: no such thing' >&2; exit 1;;
  *tma.cu*) body='exec sleep 20';;
  *clock.cu*) body='echo broken >&2; exit 1';;
  *) body="echo '{\"table\": \"t\", \"question\": \"q\", \"units\": {\"n\": \"\", \"c\": \"cycles\"}}'
echo '{\"row\": \"t\", \"n\": 8}'
echo '{\"sm_clock_mhz\": 1980.0}'";;
esac
for last; do :; done
printf '#!/bin/sh\n%s\n' "$body" > "$last"
chmod +x "$last"
"""


def test_one_failure_does_not_lose_the_rest(tmp_path: Path) -> None:
    tool(tmp_path, "nvcc", FAKE_NVCC)
    tool(tmp_path, "nvidia-smi", "echo 'NVIDIA H200, 580.1, 9.0'")
    output = tmp_path / "x.json"
    programs = ["wgmma", "sync", "tma", "clock"]
    options = ["-o", str(output), "--build-dir", str(tmp_path / "build"), "--time-limit", "1", "--only", *programs]
    done = call(MICROBENCH, *options, path=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 1, done.stderr
    results = json.loads(output.read_text())
    assert (results["chip"], results["driver"], results["cuda"]) == ("NVIDIA H200", "580.1", "13.0")
    found = results["benchmarks"]
    assert list(found) == programs
    assert found["wgmma"]["tables"]["t"]["rows"] == [[8, None]]
    assert "does not compile: sync.cu(1): error" in found["sync"]["reason"]
    assert found["tma"]["reason"] == "still running after 1 s"
    assert found["clock"]["reason"] == "exit code 1: broken"


@pytest.mark.parametrize(
    "output",
    [
        "not json",
        '{"row": "nowhere", "n": 1}',
        '{"table": "t", "question": "", "units": {"n": ""}}\n{"row": "t", "m": 1}\n{"sm_clock_mhz": 1}',
        '{"table": "t", "question": "", "units": {"n": ""}}',
    ],
)
def test_malformed_output_is_an_error(run_module: ModuleType, output: str) -> None:
    with pytest.raises(run_module.BenchmarkError):
        run_module.parse(output)


def test_header_has_one_wrapper_per_width(run_module: ModuleType) -> None:
    header = run_module.wgmma_header()
    widths = importlib.import_module("wgmma_header").WIDTHS
    for n in widths:
        assert header.count(f"wgmma.mma_async.sync.aligned.m64n{n}k16.") == 2  # operand A from memory, from registers
        assert f"float (&d)[{n // 2}]" in header


# ---- the checked-in result ----


@pytest.fixture(scope="module")
def result() -> dict[str, dict[str, list[dict[str, object]]]]:
    """Table name -> rows as dicts."""
    data = json.loads(RESULT.read_text())
    assert data["schema_version"] == 1
    assert data["chip"] == "NVIDIA H200"
    assert all(data[key] for key in ("driver", "cuda", "date"))
    tables = {}
    for name, entry in data["benchmarks"].items():
        assert entry["status"] == "ok", name
        assert 1000 < entry["sm_clock_mhz"] < 2000
        for table, content in entry["tables"].items():
            assert content["question"]
            assert content["rows"], table
            assert len(content["columns"]) == len(content["units"])
            for row in content["rows"]:
                assert len(row) == len(content["columns"]), table
                assert all(not isinstance(value, float) or math.isfinite(value) for value in row), table
            tables[table] = [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]
    return tables


def test_result_holds_every_program(result: dict[str, list[dict[str, object]]], run_module: ModuleType) -> None:
    assert set(json.loads(RESULT.read_text())["benchmarks"]) == set(run_module.PROGRAMS)


def test_result_repeats_what_is_known_of_hopper(result: dict[str, list[dict[str, float]]]) -> None:
    """A result file measured with a broken benchmark (work optimised away, starved queue) fails here."""
    for row in result["wgmma_interval"]:
        if row["instr_per_group"] == 8 and row["groups_in_flight"] == 2:
            n = row["n"]
            expected = max(n / 2, 16 + n / 4) if row["operand"] == "ss" else max(n / 2, 13)  # hardware floor of rs: 13
            assert row["cycles_per_instr"] == pytest.approx(expected, abs=1)
    fp8 = {tuple(row.values()) for row in result["wgmma_fp8"]}
    assert fp8 and fp8 <= {tuple(row.values()) for row in result["wgmma_interval"]}  # 32 bytes deep, as BF16's
    rates = {row["op"]: row["lanes_per_cycle"] for row in result["rate"] if row["warps"] == 16}
    for op, lanes in {"ex2": 16, "fmnmx": 64, "f2fp": 64, "sel": 64, "ffma": 128, "fadd": 128, "shfl": 32}.items():
        assert rates[op] == pytest.approx(lanes, rel=0.03)
    for row in result["corun"]:
        if row["vector"] == "none" and row["n"] >= 128:
            assert row["mma_cycles_per_instr"] == pytest.approx(row["mma_ideal"], rel=0.01)


# ---- the Triton kernel and its timings ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either -o FILE or --counters FILE"),
        (["-o", "x.csv", "--seqlens", "1000"], "1000 does not divide 16384"),
        (["-o", "x.csv", "--kernels", "fa9"], "invalid choice: 'fa9'"),
        (["-o", "x.csv", "--sweep", "--knobs", "1", "2", "3", "4"], "not allowed with"),
    ],
)
def test_time_kernels_rejects_bad_arguments(arguments: list[str], message: str) -> None:
    done = call(TIME_KERNELS, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(("script", "options"), [(TIME_KERNELS, ["-o"]), (TRITON, []), (PHASES, ["-o", "--kernels"])])
def test_without_torch_or_gpu_the_message_says_so(script: Path, options: list[str], tmp_path: Path) -> None:
    done = call(script, *(part for i, option in enumerate(options) for part in (option, str(tmp_path / f"{i}.csv"))))
    assert done.returncode == 2
    assert "PyTorch and Triton are needed" in done.stderr or "NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_triton_timings_extend_the_timing_schema() -> None:
    with (VALIDATION / "data" / "h200_timing.csv").open() as stream:
        schema = next(csv.reader(stream))
    with (VALIDATION / "data" / "h200_triton.csv").open() as stream:
        reader = csv.DictReader(stream)
        rows = list(reader)
        assert reader.fieldnames == [*schema, "tile_m", "tile_n", "stages", "warps"]
    assert {row["kernel"] for row in rows} == {"triton", "fa2", "cudnn"}
    for row in rows:
        assert bool(row["tile_m"]) == (row["kernel"] == "triton")
        assert float(row["ms_min"]) <= float(row["ms"]) <= float(row["ms_max"])
        cycles = float(row["ms"]) * 1e3 * float(row["sm_clock_mhz"])
        assert int(row["cycles"]) == pytest.approx(cycles, rel=1e-3)
        flops = 4.0 * int(row["batch"]) * int(row["heads_q"]) * int(row["head_dim"]) * int(row["seqlen_q"]) ** 2
        flops /= 1 + int(row["causal"])
        assert float(row["tflops"]) == pytest.approx(flops / float(row["ms"]) / 1e9, rel=2e-3)


def test_stamps_are_counted_per_tile_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(VALIDATION))
    rows = importlib.import_module("triton_phases").stamp_rows
    elsewhere = [[[0, 0], [0, 0]], [[0, 0], [0, 0]]]
    late = [[[900, 950], [0, 0]], [[910, 960], [0, 0]]]  # its second block is masked
    early = [[[100, 150], [300, 350]], [[90, 160], [310, 360]]]
    assert list(rows("v", [elsewhere, late, early])) == [
        ["v", 0, 0, 1, 10, "", 60],
        ["v", 0, 0, 2, 210, "", 260],
        ["v", 1, 0, 1, 0, "", 70],
        ["v", 1, 0, 2, 220, "", 270],
        ["v", 0, 1, 1, 810, "", 860],
        ["v", 1, 1, 1, 820, "", 870],
    ]


def test_a_loop_of_fa3_takes_as_long_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(VALIDATION))
    loops = importlib.import_module("loops")
    with loops.DATA.open() as file:
        rows = [row for row in csv.DictReader(file) if not row["left_out"]]
    assert len(rows) > 20
    alone = [row for row in rows if row["dtype"] == "bf16" and row["tile_n"] == "176" and row["warpgroups"] == "1"]
    causal = [row for row in rows if row["causal"] == "1"]
    assert len(alone) == len(causal) == 1
    for row in alone + causal:
        assert loops.simulated_period(row) == pytest.approx(float(row["period"]), rel=0.03)
