"""Many simulations at once, spread over processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

from fasim.errors import ModelError
from fasim.problem import Problem
from fasim.run import Run

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """One simulation, by names, so that it can be sent to another process."""

    schedule: str
    problem: Problem
    arch: str
    overrides: tuple[str, ...] = ()
    knobs: tuple[tuple[str, object], ...] = ()
    clock_mhz: float | None = None
    traced: bool = False  # record SM 0

    def run(self) -> Run:
        """Simulate. Raises what :func:`fasim.simulate.simulate` raises."""
        from fasim.arch import load_arch
        from fasim.simulate import TraceSpec, simulate

        chip, knobs = load_arch(self.arch, self.overrides), dict(self.knobs)
        trace = TraceSpec() if self.traced else None
        return simulate(self.schedule, self.problem, chip, knobs=knobs, clock_mhz=self.clock_mhz, trace=trace)


def run_all(jobs: Sequence[Job], processes: int | None = None, progress: Progress | None = None) -> list[Run]:
    """The runs of ``jobs`` in their order; ``processes`` None is one per CPU, 1 stays in this process.

    ``progress`` is called with the number of finished jobs and of all. Raises what a job raises, and ModelError
    when a process died.
    """
    count = min(processes or os.cpu_count() or 1, len(jobs))
    if count <= 1:
        return _collect(map(Job.run, jobs), len(jobs), progress)
    # Not fork: a progress bar runs in a thread, and fork copies its locks as they are.
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
    try:
        return _collect(pool.map(Job.run, jobs), len(jobs), progress)
    except BrokenProcessPool:
        raise ModelError("a worker process died (out of memory?); fewer processes: --jobs 1") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(runs: Iterable[Run], total: int, progress: Progress | None) -> list[Run]:
    done: list[Run] = []
    for run in runs:
        done.append(run)
        if progress is not None:
            progress(len(done), total)
    return done
