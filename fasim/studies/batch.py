"""Many simulations at once, spread over threads: the compiled engine runs without Python's global lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from fasim.problem import Problem
from fasim.results.run import Run

Progress = Callable[[int, int], None]

Item = TypeVar("Item")
Result = TypeVar("Result")

#: A schedule file is executed to be loaded, and leaves its modules in ``sys.modules``.
_LOADING = Lock()


@dataclass(frozen=True)
class Job:
    """One simulation, by names."""

    schedule: str
    problem: Problem
    arch: str
    overrides: tuple[str, ...] = ()
    knobs: tuple[tuple[str, object], ...] = ()
    clock_mhz: float | None = None
    traced: bool = False  # record SM 0
    engine: str = "compiled"

    def run(self) -> Run:
        """Simulate. Raises what :func:`fasim.studies.simulate.simulate` raises."""
        from fasim.arch import load_arch
        from fasim.program.library import load_schedule
        from fasim.studies.simulate import TraceSpec, simulate

        chip, knobs = load_arch(self.arch, self.overrides), dict(self.knobs)
        trace = TraceSpec() if self.traced else None
        with _LOADING:
            schedule = load_schedule(self.schedule)
        return simulate(
            schedule, self.problem, chip, knobs=knobs, clock_mhz=self.clock_mhz, engine=self.engine, trace=trace
        )


def run_all(jobs: Sequence[Job], threads: int | None = None, progress: Progress | None = None) -> list[Run]:
    """The runs of ``jobs`` in their order, ``threads`` at a time (None: one per CPU).

    ``progress`` is called with the number of finished jobs and of all. Raises what a job raises.
    """
    return spread(Job.run, jobs, threads, progress)


def spread(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """``work`` of each item, in their order; arguments and errors as for :func:`run_all`."""
    count = min(threads or os.cpu_count() or 1, len(items))
    if count <= 1:
        return _collect(map(work, items), len(items), progress)
    pool = ThreadPoolExecutor(count)
    try:
        return _collect(pool.map(work, items), len(items), progress)
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(results: Iterable[Result], total: int, progress: Progress | None) -> list[Result]:
    done: list[Result] = []
    for result in results:
        done.append(result)
        if progress is not None:
            progress(len(done), total)
    return done
