"""Two or more runs side by side: which is faster, which unit moved, and where the cycles went.

The first run is the base. Of a role, time is counted in cycles of its average CTA slot (its share of the whole run), so
the differences of a role's reasons add up to the difference of the runs' cycles.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fasim.errors import ConfigError
from fasim.results.run import Run

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Change:
    """How a run differs from the base.

    Per cents are relative to the base, positive is more (``time_percent`` 3.0: 3 % slower). ``points`` is the
    difference of whole-run utilisation in percentage points by unit, ``work_percent`` that of the unit's busy
    cycles (None where the base has none): a unit whose utilisation rises at equal work merely waits less.
    ``role_cycles[role][reason]`` holds cycles more than in the base, for the roles that both have.
    ``settings`` maps what was set differently to its value (base, here; None where it does not exist).
    """

    label: str
    cycles_percent: float
    time_percent: float
    tflops_percent: float
    points: dict[str, float]
    work_percent: dict[str, float | None]
    role_cycles: dict[str, dict[str, float]]
    settings: dict[str, tuple[Any, Any]]

    @property
    def moved(self) -> str:
        """The unit whose utilisation changed most."""
        return max(self.points, key=lambda unit: abs(self.points[unit]))


@dataclass(frozen=True)
class Comparison:
    """Labelled runs, the base first, and the changes of the others."""

    runs: tuple[tuple[str, Run], ...]
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``runs[]`` as ``Run.to_dict`` with ``label``, and ``changes[]`` with the fields of Change."""
        return {
            "schema_version": SCHEMA_VERSION,
            "runs": [{"label": label, **run.to_dict()} for label, run in self.runs],
            "changes": [{**asdict(change), "moved": change.moved} for change in self.changes],
        }

    @property
    def same_problem(self) -> bool:
        """Whether all runs compute the same kind of attention on queries of the same length."""
        return not any({"seqlen_q", "head_dim", "dtype", "direction"} & set(change.settings) for change in self.changes)

    def slower_than(self, percent: float) -> list[Change]:
        """Changes that take more time than the base by more than ``percent``."""
        return [change for change in self.changes if change.time_percent > percent]


def compare(runs: Sequence[tuple[str, Run]]) -> Comparison:
    """Compare (label, run) pairs with the first of them. Raises ConfigError for fewer than two."""
    if len(runs) < 2:
        raise ConfigError("compare: give at least two runs")
    (_, base), *others = runs
    return Comparison(tuple(runs), tuple(_change(label, base, run) for label, run in others))


def load_run(path: str | Path) -> Run:
    """A run saved by ``fasim run --json``. Raises ConfigError when it cannot be read or is something else."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return Run.from_dict(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a run saved by 'fasim run --json': {error}") from None


def busy_cycles(run: Run) -> dict[str, float]:
    """Cycles each unit works at its peak rate, averaged over SMs (L2 and HBM: of the chip)."""
    return {unit: run.cycles * percent / 100 for unit, percent in run.utilisation.items()}


def role_cycles(run: Run) -> dict[str, dict[str, float]]:
    """Cycles of every role by reason; each role's add up to the cycles of its kernel."""
    cycles = dict(zip(run.meta.get("kernels", ()), run.meta.get("kernel_cycles", ()), strict=True))

    def whole(role: str) -> float:
        return float(cycles.get(role.partition(".")[0], run.cycles)) if len(cycles) > 1 else run.cycles

    return {
        role: {reason: whole(role) * percent / 100 for reason, percent in shares.items()}
        for role, shares in run.stalls.items()
    }


def settings(run: Run) -> dict[str, Any]:
    """What a run was made of: schedule, arch, clock, overrides, and each field of the problem and knob.

    A clock that was not given follows from the run, so it is none of its settings.
    """
    meta = run.meta
    found: dict[str, Any] = {
        name: meta[name] for name in ("schedule", "arch", "fasim_version", "arch_digest") if name in meta
    }
    found["clock_mhz"] = run.clock_mhz if meta.get("clock_reason") == "given" else None
    found["set"] = " ".join(map(str, meta.get("overrides", ())))
    for group in ("problem", "knobs"):
        found |= meta.get(group, {})
    return found


def _change(label: str, base: Run, run: Run) -> Change:
    before, after = busy_cycles(base), busy_cycles(run)
    units = [unit for unit in base.utilisation if unit in run.utilisation]
    old, new = role_cycles(base), role_cycles(run)
    was, now = settings(base), settings(run)
    return Change(
        label=label,
        cycles_percent=_percent(base.cycles, run.cycles),
        time_percent=_percent(base.time_us, run.time_us),
        tflops_percent=_percent(base.tflops, run.tflops),
        points={unit: run.utilisation[unit] - base.utilisation[unit] for unit in units},
        work_percent={unit: _percent(before[unit], after[unit]) if before[unit] else None for unit in units},
        role_cycles={
            role: {reason: new[role][reason] - cycles for reason, cycles in reasons.items()}
            for role, reasons in old.items()
            if role in new
        },
        settings={
            name: (was.get(name), now.get(name))
            for name in dict.fromkeys((*was, *now))
            if was.get(name) != now.get(name)
        },
    )


def _percent(base: float, value: float) -> float:
    return 100 * (value / base - 1)
