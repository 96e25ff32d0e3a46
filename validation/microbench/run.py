"""Compiles and runs the GPU microbenchmarks and writes one JSON of measured numbers.

    python validation/microbench/run.py -o results.json

Needs ``nvcc`` (CUDA 12.4 or later) and an NVIDIA GPU of compute capability 9.0 (H100, H200). Every ``*.cu`` beside
this file is one program; each runs as its own process with a time limit, so that one failure does not lose the rest: it
is recorded with its reason. Exit code 0: all ran; 1: some failed (the JSON is written all the same); 2: bad usage, or
nvcc or the GPU is missing. The JSON is described in README.md.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wgmma_header import wgmma_header

SCHEMA_VERSION = 1
HERE = Path(__file__).resolve().parent
PROGRAMS = tuple(sorted(path.stem for path in HERE.glob("*.cu")))
TARGET = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-split-compile=0")


class UsageError(Exception):
    """What the user has to change; becomes one line on stderr and exit code 2."""


class BenchmarkError(Exception):
    """Why one program has no result."""


def command_output(command: Sequence[str], missing: str) -> str:
    """Standard output of ``command``; UsageError with the text ``missing`` when it cannot run."""
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]} not found: {missing}")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UsageError(f"{' '.join(command)} failed ({(done.stdout + done.stderr).strip()}): {missing}")
    return done.stdout


def cuda_version() -> str:
    """Release of the compiler, such as "13.0"."""
    text = command_output(["nvcc", "--version"], "the benchmarks need the CUDA compiler")
    return text.split("release ")[1].split(",")[0]


def gpu_facts() -> dict[str, str]:
    """Name and driver of the first GPU; UsageError unless its compute capability is 9.0."""
    fields = "name,driver_version,compute_cap"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    lines = command_output(query, "the benchmarks need an NVIDIA GPU").strip().splitlines()
    if not lines:
        raise UsageError("no NVIDIA GPU found: the benchmarks need one of compute capability 9.0")
    name, driver, capability = (field.strip() for field in lines[0].split(","))
    if capability != "9.0":
        raise UsageError(f"{name} has compute capability {capability}: the benchmarks use wgmma and need 9.0")
    return {"chip": name, "driver": driver}


def build(program: str, folder: Path) -> Path:
    """Compile one program into ``folder``; the file name carries a hash of all sources, so unchanged ones are reused.

    Raises BenchmarkError with the compiler's message.
    """
    sources = [HERE / f"{program}.cu", *sorted(HERE.glob("*.cuh"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update((wgmma_header() + " ".join(TARGET)).encode())
    binary = folder / f"{program}-{digest.hexdigest()[:12]}"
    if not binary.exists():
        partial = binary.with_suffix(".partial")
        command = ["nvcc", *TARGET, f"-I{HERE}", f"-I{folder}", str(sources[0]), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchmarkError(f"does not compile: {(done.stderr or done.stdout).strip()[-2000:]}")
        partial.rename(binary)
    return binary


def parse(output: str) -> dict[str, Any]:
    """Tables and mean SM clock from a program's JSON lines (see ``common.cuh``).

    Raises BenchmarkError on a line of another form, a row of an unknown table or with unknown columns, or when the last
    line is missing.
    """
    tables: dict[str, dict[str, Any]] = {}
    clock: float | None = None
    for line in output.splitlines():
        try:
            item = json.loads(line)
            if "table" in item:
                columns, units = list(item["units"]), list(item["units"].values())
                tables[item["table"]] = {"question": item["question"], "columns": columns, "units": units, "rows": []}
            elif "row" in item:
                table = tables[item.pop("row")]
                row = [item.pop(column, None) for column in table["columns"]]
                if item:
                    raise KeyError(next(iter(item)))
                table["rows"].append(row)
            else:
                clock = item["sm_clock_mhz"]
        except (ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"unexpected output {line!r} ({error!r})") from None
    if clock is None:
        raise BenchmarkError("stopped before its last line")
    return {"sm_clock_mhz": clock, "tables": tables}


def run(binary: Path, time_limit_s: float) -> dict[str, Any]:
    """Run one program. Raises BenchmarkError when it fails or runs out of time."""
    try:
        done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"still running after {time_limit_s:g} s") from None
    except OSError as error:
        raise BenchmarkError(f"cannot start: {error}") from None
    if done.returncode != 0:
        raise BenchmarkError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return parse(done.stdout)


def measure(program: str, folder: Path, time_limit_s: float | None) -> dict[str, Any]:
    """Build and (unless ``time_limit_s`` is None) run one program: its entry in ``benchmarks`` of the JSON."""
    start = time.monotonic()
    try:
        binary = build(program, folder)
        result = {} if time_limit_s is None else run(binary, time_limit_s)
        status: dict[str, Any] = {"status": "ok"}
    except BenchmarkError as error:
        result, status = {}, {"status": "failed", "reason": str(error)}
    seconds = time.monotonic() - start
    print(f"{program}: {status['status']} ({seconds:.1f} s) {status.get('reason', '')}", file=sys.stderr, flush=True)
    return {**status, "seconds": round(seconds, 1), **result}


def to_text(results: dict[str, Any]) -> str:
    """JSON with one table row per line, so that two files can be compared line by line."""
    text = json.dumps(results, indent=1)
    # A row is a list of scalars: the only brackets without brackets or braces inside.
    return re.sub(r"\[[^\[\]{}]*\]", lambda match: json.dumps(json.loads(match[0])), text) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Run the GPU microbenchmarks.", epilog=f"programs: {', '.join(PROGRAMS)}"
    )
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", default=list(PROGRAMS), help="run these programs only")
    parser.add_argument("--time-limit", type=float, default=120, metavar="S", help="seconds per program (default 120)")
    parser.add_argument("--build-only", action="store_true", help="compile and stop; needs no GPU")
    default_folder = Path(tempfile.gettempdir()) / "fasim-microbench"
    parser.add_argument("--build-dir", type=Path, default=default_folder, help=f"binaries (default {default_folder})")
    options = parser.parse_args(arguments)
    try:
        unknown = sorted(set(options.only) - set(PROGRAMS))
        if unknown:
            raise UsageError(f"--only: unknown program {', '.join(unknown)} (choices: {', '.join(PROGRAMS)})")
        if options.output is None and not options.build_only:
            raise UsageError("-o FILE is required (or --build-only)")
        facts = {"cuda": cuda_version()}
        if not options.build_only:
            facts |= gpu_facts()
        options.build_dir.mkdir(parents=True, exist_ok=True)
        (options.build_dir / "wgmma.cuh").write_text(wgmma_header())
        with ThreadPoolExecutor() as pool:  # compile side by side, run one after the other
            built = dict(
                zip(options.only, pool.map(lambda p: measure(p, options.build_dir, None), options.only), strict=True)
            )
        if options.build_only:
            return int(any(entry["status"] != "ok" for entry in built.values()))
        benchmarks = {
            program: measure(program, options.build_dir, options.time_limit) if entry["status"] == "ok" else entry
            for program, entry in built.items()
        }
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        options.output.write_text(
            to_text({"schema_version": SCHEMA_VERSION, **facts, "date": date, "benchmarks": benchmarks})
        )
    except (UsageError, OSError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    return int(any(entry["status"] != "ok" for entry in benchmarks.values()))


if __name__ == "__main__":
    sys.exit(main())
