"""fasim: a discrete-event simulator of attention kernels on NVIDIA GPUs.

Everything that a program, a notebook or a schedule file of your own needs is a name of this package::

    import fasim

    run = fasim.simulate("fa3", fasim.Problem(seqlen_q=8192), "h100", knobs={"pingpong": "off"})
    print(run.cycles, run.bottleneck)

* What is computed, and on what: :class:`Problem` and its :class:`Mask` (:data:`FULL`, :data:`CAUSAL`), :class:`Arch`,
  :func:`load_arch`, :func:`list_archs`.
* Schedules: :func:`load_schedule`, :func:`list_schedules`; to write one, :class:`Kernel`, :func:`schedule` and
  :mod:`kernels`, what attention kernels have in common.
* What compilers made of them: a :class:`Build`, :func:`load_build`, :func:`list_builds`.
* One run: :func:`simulate` returns a :class:`Run`, with a :class:`TraceSpec` also what each role did when.
* Questions about runs: :func:`compare`, :func:`bounds`, :func:`explain`; many at once: :class:`Job`, :func:`run_all`.
* Is it right? :func:`check` (races, deadlock, values), :func:`validate` (against measured times), :func:`calibrate`.
* Views: ``render_*`` return what ``rich`` prints, ``plot_*`` and ``write_*`` write a file.
* :mod:`numerics`: the number formats, exponentials and softmax of attention kernels on NumPy arrays.
* Errors: a :class:`FasimError` is a :class:`ConfigError` (bad input) or a :class:`ModelError` (it cannot run), or
  a :class:`ToleranceError`.

A name is imported when it is first used, so that ``fasim --help`` need not wait for NumPy and Numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fasim.results.shown import show_with

if TYPE_CHECKING:
    from fasim import kernels as kernels
    from fasim import numerics as numerics
    from fasim.analysis.bounds import Bounds as Bounds
    from fasim.analysis.bounds import bounds as bounds
    from fasim.analysis.compare import Comparison as Comparison
    from fasim.analysis.compare import compare as compare
    from fasim.analysis.compare import load_run as load_run
    from fasim.arch import Arch as Arch
    from fasim.arch import list_archs as list_archs
    from fasim.arch import load_arch as load_arch
    from fasim.checker import Numerics as Numerics
    from fasim.checker.check import check as check
    from fasim.errors import BudgetError as BudgetError
    from fasim.errors import ConfigError as ConfigError
    from fasim.errors import DeadlockError as DeadlockError
    from fasim.errors import FasimError as FasimError
    from fasim.errors import ModelError as ModelError
    from fasim.errors import ToleranceError as ToleranceError
    from fasim.problem import CAUSAL as CAUSAL
    from fasim.problem import FULL as FULL
    from fasim.problem import Mask as Mask
    from fasim.problem import Problem as Problem
    from fasim.program.build_files import list_builds as list_builds
    from fasim.program.build_files import load_build as load_build
    from fasim.program.builds import Build as Build
    from fasim.program.language import Kernel as Kernel
    from fasim.program.library import Schedule as Schedule
    from fasim.program.library import list_schedules as list_schedules
    from fasim.program.library import load_schedule as load_schedule
    from fasim.program.library import schedule as schedule
    from fasim.results.run import Run as Run
    from fasim.results.run import Trace as Trace
    from fasim.results.validation import Validation as Validation
    from fasim.studies.batch import Job as Job
    from fasim.studies.batch import run_all as run_all
    from fasim.studies.calibrate.microbench import Microbench as Microbench
    from fasim.studies.calibrate.study import Calibration as Calibration
    from fasim.studies.calibrate.study import calibrate as calibrate
    from fasim.studies.explain import Explanation as Explanation
    from fasim.studies.explain import explain as explain
    from fasim.studies.simulate import TraceSpec as TraceSpec
    from fasim.studies.simulate import simulate as simulate
    from fasim.studies.validate.timing import validate as validate
    from fasim.views.bounds_report import render_bounds as render_bounds
    from fasim.views.calibrate_report import render_calibration as render_calibration
    from fasim.views.check_report import render_check as render_check
    from fasim.views.compare_report import render_comparison as render_comparison
    from fasim.views.explain_report import render_explanation as render_explanation
    from fasim.views.html import write_html as write_html
    from fasim.views.perfetto import write_trace as write_trace
    from fasim.views.plot import plot_timeline as plot_timeline
    from fasim.views.report import render_report as render_report
    from fasim.views.roofline import plot_roofline as plot_roofline
    from fasim.views.timeline import render_timeline as render_timeline
    from fasim.views.validate_report import render_validation as render_validation
    from fasim.views.validation_plot import plot_validation as plot_validation

__version__ = "0.1.0"

#: The public names by the module that defines them; tests/test_public_names.py holds the imports above to it.
_NAMES: dict[str, tuple[str, ...]] = {
    "fasim.analysis.bounds": ("Bounds", "bounds"),
    "fasim.analysis.compare": ("Comparison", "compare", "load_run"),
    "fasim.arch": ("Arch", "list_archs", "load_arch"),
    "fasim.checker": ("Numerics",),
    "fasim.checker.check": ("check",),
    "fasim.errors": ("BudgetError", "ConfigError", "DeadlockError", "FasimError", "ModelError", "ToleranceError"),
    "fasim.problem": ("CAUSAL", "FULL", "Mask", "Problem"),
    "fasim.program.build_files": ("list_builds", "load_build"),
    "fasim.program.builds": ("Build",),
    "fasim.program.language": ("Kernel",),
    "fasim.program.library": ("Schedule", "list_schedules", "load_schedule", "schedule"),
    "fasim.results.run": ("Run", "Trace"),
    "fasim.results.validation": ("Validation",),
    "fasim.studies.batch": ("Job", "run_all"),
    "fasim.studies.calibrate.microbench": ("Microbench",),
    "fasim.studies.calibrate.study": ("Calibration", "calibrate"),
    "fasim.studies.explain": ("Explanation", "explain"),
    "fasim.studies.simulate": ("TraceSpec", "simulate"),
    "fasim.studies.validate.timing": ("validate",),
    "fasim.views.bounds_report": ("render_bounds",),
    "fasim.views.calibrate_report": ("render_calibration",),
    "fasim.views.check_report": ("render_check",),
    "fasim.views.compare_report": ("render_comparison",),
    "fasim.views.explain_report": ("render_explanation",),
    "fasim.views.html": ("write_html",),
    "fasim.views.perfetto": ("write_trace",),
    "fasim.views.plot": ("plot_timeline",),
    "fasim.views.report": ("render_report",),
    "fasim.views.roofline": ("plot_roofline",),
    "fasim.views.timeline": ("render_timeline",),
    "fasim.views.validate_report": ("render_validation",),
    "fasim.views.validation_plot": ("plot_validation",),
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names}

_ROOMS = ("kernels", "numerics")

__all__ = sorted([*_MODULE, *_ROOMS])

if not TYPE_CHECKING:  # a type checker shall complain of a name that does not exist

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"fasim.{name}")
        if name not in _MODULE:
            raise AttributeError(f"module 'fasim' has no attribute '{name}'")
        return getattr(importlib.import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _view(name: str) -> Any:
    """A view of a run that is imported when it is called."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("fasim.views.notebook"), name)(*args, **options)

    return call


for _name in ("run_timeline", "run_frame", "run_html"):
    show_with(_name, _view(_name))
