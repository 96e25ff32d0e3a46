"""Options that several commands share, and what they are made into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from fasim.cli.console import note, parse_assignments
from fasim.errors import FasimError

if TYPE_CHECKING:
    from fasim.arch import Arch
    from fasim.problem import Problem


def _complete(load: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        with suppress(FasimError):
            return [name for name in load() if name.startswith(incomplete)]
        return []

    return complete


def _archs() -> Iterable[str]:
    from fasim.arch import list_archs

    return list_archs()


def _schedules() -> Iterable[str]:
    from fasim.program.library import list_schedules

    return list_schedules()


complete_arch = _complete(_archs)
complete_schedule = _complete(_schedules)

ScheduleArgument = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="A name or a .py file.", autocompletion=complete_schedule)
]
ArchOption = Annotated[
    str, typer.Option("--arch", "-a", help="Architecture: a name or a .toml file.", autocompletion=complete_arch)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a number of the architecture (repeatable)."),
]
IdealOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ideal",
        metavar="RESOURCE",
        help="What if it were infinitely fast? mufu, fma, alu, smem, tma, l2, hbm, barriers, issue, latency, ... "
        "(repeatable).",
    ),
]
KnobOption = Annotated[
    list[str] | None, typer.Option("--knob", metavar="KNOB=VALUE", help="Set a knob of the schedule (repeatable).")
]
BuildOption = Annotated[
    str | None,
    typer.Option("--build", metavar="NAME|FILE", help="What a compiler made of it; see `fasim list builds`."),
]
ClockOption = Annotated[
    float | None,
    typer.Option("--clock", metavar="MHZ", help="SM clock; what the chip holds under this load unless given."),
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
]
EngineOption = Annotated[Literal["compiled", "reference"], typer.Option(help="They agree to the cycle.")]

#: The options of a problem's shape; what is not given keeps the default of Problem.
_SHAPE: dict[str, object] = {
    "direction": Annotated[str | None, typer.Option(help="fwd or bwd.")],
    "batch": Annotated[int | None, typer.Option(help="Sequences.")],
    "seqlen": Annotated[int | None, typer.Option(help="Query tokens per sequence.")],
    "seqlen_k": Annotated[int | None, typer.Option(help="Key tokens; as many as queries unless given.")],
    "heads": Annotated[int | None, typer.Option(help="Query heads.")],
    "kv_heads": Annotated[int | None, typer.Option(help="Key/value heads; as many as query heads unless given.")],
    "head_dim": Annotated[int | None, typer.Option(help="Head dimension of Q and K.")],
    "head_dim_v": Annotated[int | None, typer.Option(help="Head dimension of V; that of Q unless given.")],
    "causal": Annotated[bool | None, typer.Option("--causal/--no-causal", help="Mask the future.")],
    "dtype": Annotated[str | None, typer.Option(help="bf16, fp16, fp8 or fp4.")],
}

#: What a command gets of them, to hand to :func:`make_problem`.
Shape = Mapping[str, Any]
NO_SHAPE: Shape = {}


def shape_options(**defaults: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the shape options in the place of its parameter ``shape``; ``defaults`` in place of None."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_options(**given: Any) -> None:
            command(shape={name: given.pop(name) for name in _SHAPE}, **given)

        hints = get_type_hints(command, include_extras=True)
        parameters = []
        for parameter in signature(command).parameters.values():
            options = _SHAPE if parameter.name == "shape" else {parameter.name: hints[parameter.name]}
            for name, hint in options.items():
                default = defaults.get(name) if options is _SHAPE else parameter.default
                parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate


def make_problem(shape: Shape) -> Problem:
    """The problem of the shape options by their names; what is None keeps the default of Problem.

    Raises ConfigError.
    """
    from fasim.problem import Problem

    fields = {"seqlen": "seqlen_q", "heads": "heads_q", "kv_heads": "heads_kv"}
    return Problem(**{fields.get(name, name): value for name, value in shape.items() if value is not None})


def given_knobs(knob: Sequence[str] | None, build: str | None) -> dict[str, object]:
    """The knobs of the options --knob and --build, values as text. Raises ConfigError."""
    return {**parse_assignments("--knob", knob), **({} if build is None else {"build": build})}


def load_chip(arch: str, overrides: Sequence[str] | None, ideal: Sequence[str] | None) -> Arch:
    """The architecture of the options --arch, --set and --ideal. Raises ConfigError."""
    from fasim.analysis.whatif import faster
    from fasim.arch import load_arch

    chip = load_arch(arch, overrides or ())
    for name in ideal or ():
        chip = load_arch(arch, (*chip.overrides, *faster(chip, name)))
    return chip


def announced(engine: str = "compiled") -> AbstractContextManager[None]:
    """Where an engine runs: says on stderr that the first run takes longer, if this is one."""
    if engine != "compiled":
        return nullcontext()
    from fasim.engine.cache import on_compile

    return on_compile(lambda: note("compiling the engine, once: about ten seconds"))
