"""Why a run takes as long as it does: critical path, losses from peak to achieved, gains by faster resources."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fasim.analysis.critical_path import CriticalPath, critical_path
from fasim.analysis.losses import SPLIT_STEP, STEPS, Loss, losses, machines
from fasim.analysis.whatif import RESOURCES, faster, has
from fasim.arch import Arch, load_arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.run import Run, Trace
from fasim.studies.batch import Job, Progress, run_all

#: What "faster" means in an elasticity.
TENTH = 1.1


@dataclass(frozen=True)
class Gain:
    """How much faster the run gets, in per cent, with a resource 10 % faster and (None: not asked) infinitely fast."""

    resource: str
    meaning: str
    tenth_percent: float
    infinite_percent: float | None


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
        """The resource whose speed matters most, and the next one."""
        return self.gains[0], self.gains[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``run`` as Run.to_dict, and the fields; ``limits`` names the first two of ``gains``."""
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
    job: Job, *, infinite: bool = False, processes: int | None = None, progress: Progress | None = None
) -> Explanation:
    """Simulate ``job`` and everything that explains it, in parallel; ``infinite``: with infinitely fast resources too.

    ``processes`` and ``progress`` as in :func:`fasim.studies.batch.run_all`. Raises what a simulation raises.
    """
    arch = load_arch(job.arch, job.overrides)
    names = [name for name in RESOURCES if has(arch, name)]
    without = [_with(job, overrides) for overrides in machines(arch, job.problem.dtype)]
    longer = [_more_keys(without[step]) for step in (SPLIT_STEP - 1, SPLIT_STEP)]
    tenth = [_with(job, faster(arch, name, TENTH)) for name in names]
    endless = [_with(job, faster(arch, name)) for name in names] if infinite else []
    before, after, run, *others = run_all(
        [*longer, replace(job, traced=True), *without, *tenth, *endless], processes, progress
    )
    useful, found = losses(run, arch, others[: len(STEPS)], (before, after))
    percents = [100 * (run.cycles / other.cycles - 1) for other in others[len(STEPS) :]]
    gains = [
        Gain(name, RESOURCES[name].meaning, percents[i], percents[len(names) + i] if infinite else None)
        for i, name in enumerate(names)
    ]
    gains.sort(key=lambda gain: -gain.tenth_percent)
    assert run.trace is not None
    return Explanation(run, useful, found, tuple(gains), *_paths(run.trace, arch))


def _paths(trace: Trace, arch: Arch) -> tuple[CriticalPath | None, CriticalPath]:
    whole = critical_path(trace, arch, steady=False)
    try:
        return critical_path(trace, arch), whole
    except ConfigError:
        return None, whole


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
