"""Why a run takes as long as it does: critical path, losses from peak to achieved, gains by faster resources."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fasim.analysis.critical_path import CriticalPath, EventGraph, critical_path
from fasim.analysis.losses import SPLIT_STEP, STEPS, Loss, losses, machines
from fasim.analysis.whatif import RESOURCES, Gain, faster, has, limits
from fasim.arch import load_arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.results.run import Run
from fasim.studies.batch import Job, Progress, run_all

#: What "faster" means in an elasticity.
TENTH = 1.1


@dataclass(frozen=True)
class Explanation:
    """A run, its useful per cent of peak and its losses (together 100), gains (the largest first), critical paths.

    ``iteration`` is the path of an iteration in steady state, None where no work tile has several of them.
    """

    run: Run
    useful_percent: float
    losses: tuple[Loss, ...]
    gains: tuple[Gain, ...]
    iteration: CriticalPath | None
    whole: CriticalPath

    @property
    def limits(self) -> tuple[Gain, Gain]:
        """The resource whose speed matters most, and the next one, see :func:`fasim.analysis.whatif.limits`."""
        return limits(self.gains)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``run`` as Run.to_dict, and the fields; ``limits`` names two of ``gains``."""
        return {
            "schema_version": 1,
            "run": self.run.to_dict(),
            "useful_percent": self.useful_percent,
            "losses": [vars(loss) for loss in self.losses],
            "gains": [vars(gain) for gain in self.gains],
            "limits": [gain.resource for gain in self.limits],
            "iteration": None if self.iteration is None else asdict(self.iteration),
            "whole": asdict(self.whole),
        }


def explain(
    job: Job, *, infinite: bool = False, threads: int | None = None, progress: Progress | None = None
) -> Explanation:
    """Simulate ``job`` and everything that explains it, in parallel; ``infinite``: with infinitely fast resources too.

    ``threads`` and ``progress`` as in :func:`fasim.studies.batch.run_all`. Raises what a simulation raises.
    """
    arch = load_arch(job.arch, job.overrides)
    names = [name for name in RESOURCES if has(arch, name)]
    run = replace(job, traced=True).run()
    # All at the clock of the run: otherwise a machine that does more would be compared at a lower clock.
    base = replace(job, clock_mhz=run.clock_mhz)
    without = [_with(base, overrides) for overrides in machines(arch, job.problem.dtype)]
    longer = [_more_keys(without[step]) for step in (SPLIT_STEP - 1, SPLIT_STEP)]
    tenth = [_with(base, faster(arch, name, TENTH)) for name in names]
    endless = [_with(base, faster(arch, name)) for name in names] if infinite else []
    before, after, reference, *others = run_all([*longer, base, *without, *tenth, *endless], threads, progress)
    useful, found = losses(reference, arch, others[: len(STEPS)], (before, after))
    percents = [100 * (reference.cycles / other.cycles - 1) for other in others[len(STEPS) :]]
    gains = [
        Gain(name, RESOURCES[name].meaning, percents[i], percents[len(names) + i] if infinite else None)
        for i, name in enumerate(names)
    ]
    gains.sort(key=lambda gain: -gain.tenth_percent)
    assert run.trace is not None
    graph = EventGraph(run.trace)
    return Explanation(run, useful, found, tuple(gains), _path_of_iteration(graph), critical_path(graph, steady=False))


def _path_of_iteration(graph: EventGraph) -> CriticalPath | None:
    try:
        return critical_path(graph)
    except ConfigError:
        return None


def _more_keys(job: Job) -> Job:
    """``job`` with twice the keys, and always with several more blocks of them.

    Causal self-attention grows its queries too: many kernels have no other causal mask.
    """
    problem = job.problem
    keys = problem.seqlen_k + max(problem.seqlen_k, 1024)
    queries = keys if problem.causal and problem.seqlen_q == problem.seqlen_k else problem.seqlen_q
    return replace(job, problem=Problem(**{**vars(problem), "seqlen_q": queries, "seqlen_k": keys}))


def _with(job: Job, overrides: tuple[str, ...]) -> Job:
    return replace(job, overrides=(*job.overrides, *overrides))
