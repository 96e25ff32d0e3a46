"""Measure speed and memory and write docs/performance.md: ``python benchmarks/report.py`` (five minutes).

Times are CPU seconds, user and system, and the fastest of some short measurements with pauses between them: with one
thread on an idle machine that is wall-clock time. Other load, or a machine that lowers its clock under sustained load,
still makes them longer: the longest ones most, which are measured least often.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numba
from cases import BOTH, CASES, PAUSE_SECONDS, TWICE

import fasim

ROOT = Path(__file__).parents[1]
MAX_MEGABYTES = 1024
MIN_RATE = 10e6  # events per second
MIN_RATIO = 30.0  # reference engine to compiled
MAX_GROWTH = 0.1  # deviation of time per event when the work doubles
RUN = ("run", "fa3", "--arch", "h200")

HEAD = f"""# Performance

Made by `python benchmarks/report.py`; nothing here is typed by hand.

fasim {fasim.__version__}, Python {platform.python_version()}, Numba {numba.__version__}, one thread of {{processor}}
({{cpus}} CPUs, load average {{load}} at the start). FA3 forward, BF16, head dimension 128, on the H200 model (132 SMs).
Seconds are CPU seconds, user and system: wall-clock seconds of one thread on an idle machine. Except for the first
command, `validate` and the reference engine, which are measured once, they are the fastest of three or five
measurements with pauses of {PAUSE_SECONDS:.0f} s: a machine that lowers its clock under sustained load takes up to
twice as long.
"""


def processor() -> str:
    """Name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def spent() -> float:
    """CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def command(*arguments: str, cache: str | None = None) -> float:
    """CPU seconds that a whole ``fasim`` command takes, with the interpreter's start and all processes."""
    environment = dict(os.environ)
    if cache is not None:
        environment.pop("NUMBA_CACHE_DIR", None)
        environment["XDG_CACHE_HOME"] = cache
    time.sleep(PAUSE_SECONDS)
    start = spent()
    subprocess.run(
        [sys.executable, "-m", "fasim", *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return spent() - start


def table(header: str, rows: Iterable[tuple[object, ...]]) -> str:
    """A Markdown table; ``header`` separates its columns by bars."""
    count = header.count("|") + 1
    lines = [f"| {header} |", "|" + "---|" * count]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]) + "\n"


def verdict(met: bool) -> str:
    """Whether a target was met."""
    return "met" if met else "**missed**"


def commands() -> str:
    """First and later commands."""
    with tempfile.TemporaryDirectory() as empty:
        first = command(*RUN, cache=empty)
    later = min(command(*RUN) for _ in range(5))
    why = min(command("explain", *RUN[1:]) for _ in range(3))
    data = "validation/data/h200_timing.csv"
    study = command("validate", "--data", data)
    rows = len((ROOT / data).read_text().splitlines()) - 1
    return table(
        "command | seconds | target | ",
        (
            (
                f"`fasim {' '.join(RUN)}`, the first: compiles",
                f"{first:.1f}",
                15,
                verdict(first <= 15),
            ),
            ("the same, later", f"{later:.2f}", 1.5, verdict(later <= 1.5)),
            (f"`fasim explain {' '.join(RUN[1:])}`", f"{why:.1f}", 10, verdict(why < 10)),
            (f"`fasim validate --data {data}`, {rows} rows", f"{study:.0f}", 120, verdict(study < 120)),
        ),
    )


def cases() -> str:
    """Time and memory of single simulations."""
    rows = []
    for case in CASES:
        cost = case.measure()
        met = cost.seconds <= case.seconds and cost.megabytes < MAX_MEGABYTES and cost.rate >= MIN_RATE
        rows.append(
            (
                case.title,
                f"{cost.seconds:.2f}",
                case.seconds,
                f"{cost.events / 1e6:.1f}",
                f"{cost.rate / 1e6:.0f}",
                f"{cost.megabytes:.0f}",
                verdict(met),
            )
        )
    return table("problem | seconds | target | million events | million/s | peak MB | ", rows)


def growth() -> str:
    """Time per event when the work doubles."""
    base = CASES[0].measure()
    rows = []
    for case in TWICE:
        cost = case.measure()
        change = base.rate / cost.rate - 1
        rows.append(
            (
                case.title,
                f"{cost.events / base.events:.2f}",
                f"{cost.seconds / base.seconds:.2f}",
                f"{round(100 * change):+d} %",
                verdict(change <= MAX_GROWTH),
            )
        )
    return table(f"against {CASES[0].title} | events, times | seconds, times | time per event | ", rows)


def engines() -> str:
    """Both engines on one run."""
    compiled, reference = (case.measure(repeats=1 if case.engine == "reference" else 5) for case in BOTH)
    ratio = reference.seconds / compiled.seconds
    return (
        f"The reference engine (SimPy) needs {reference.seconds:.1f} s for B1 S2048 H16, the compiled one "
        f"{compiled.seconds:.3f} s: {ratio:.0f} times less (target {MIN_RATIO:.0f}: {verdict(ratio >= MIN_RATIO)}).\n"
    )


def main() -> None:
    """Measure everything and write the page."""
    load = os.getloadavg()[0]
    head = HEAD.format(processor=processor(), cpus=os.cpu_count(), load=f"{load:.1f}")
    parts = [
        head,
        "## Commands\n",
        commands(),
        "## Single simulations\n",
        "Time inside `simulate()`; peak resident memory of the process, of which Python and Numba are most.\n"
        f"Targets besides the time: {MAX_MEGABYTES} MB, {MIN_RATE / 1e6:.0f} million events per second.\n"
        "Where the clock that follows from the result is more than 2 % off the assumed one, `simulate()` runs the\n"
        "problem again; the seconds are then those of both runs, the events those of the last. B1 S65536 H8 is such\n"
        "a problem.\n",
        cases(),
        "## Growth\n",
        f"Time follows the work; target: at most {100 * MAX_GROWTH:.0f} % more per event.\n",
        growth(),
        "## Engines\n",
        engines(),
    ]
    (ROOT / "docs" / "performance.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
