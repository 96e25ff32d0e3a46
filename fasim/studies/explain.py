"""Why a run takes as long as it does: losses from peak to achieved, and what a faster resource would gain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fasim.analysis.losses import SPLIT_STEP, STEPS, Loss, losses, machines
from fasim.analysis.whatif import RESOURCES, faster, has
from fasim.arch import load_arch
from fasim.problem import Problem
from fasim.run import Run
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
    """A run, its useful per cent of peak and its losses (together 100), and gains, the largest first."""

    run: Run
    useful_percent: float
    losses: tuple[Loss, ...]
    gains: tuple[Gain, ...]

    @property
    def limits(self) -> tuple[Gain, Gain]:
        """The resource whose speed matters most, and the next one."""
        return self.gains[0], self.gains[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``run`` as Run.to_dict, ``useful_percent``, ``losses[]``, ``gains[]``, ``limits``."""
        return {
            "schema_version": 1,
            "run": self.run.to_dict(),
            "useful_percent": self.useful_percent,
            "losses": [vars(loss) for loss in self.losses],
            "gains": [vars(gain) for gain in self.gains],
            "limits": [gain.resource for gain in self.limits],
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
    longer = [_twice_the_keys(without[step]) for step in (SPLIT_STEP - 1, SPLIT_STEP)]
    tenth = [_with(job, faster(arch, name, TENTH)) for name in names]
    endless = [_with(job, faster(arch, name)) for name in names] if infinite else []
    before, after, run, *others = run_all([*longer, job, *without, *tenth, *endless], processes, progress)
    useful, found = losses(run, arch, others[: len(STEPS)], (before, after))
    percents = [100 * (run.cycles / other.cycles - 1) for other in others[len(STEPS) :]]
    gains = [
        Gain(name, RESOURCES[name].meaning, percents[i], percents[len(names) + i] if infinite else None)
        for i, name in enumerate(names)
    ]
    return Explanation(run, useful, found, tuple(sorted(gains, key=lambda gain: -gain.tenth_percent)))


def _twice_the_keys(job: Job) -> Job:
    problem = job.problem
    return replace(job, problem=Problem(**{**vars(problem), "seqlen_k": 2 * problem.seqlen_k}))


def _with(job: Job, overrides: tuple[str, ...]) -> Job:
    return replace(job, overrides=(*job.overrides, *overrides))
