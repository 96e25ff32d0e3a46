"""Options that several commands share, and what they are made into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

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

Direction = Annotated[str | None, typer.Option(help="fwd or bwd.")]
Batch = Annotated[int | None, typer.Option(help="Sequences.")]
Seqlen = Annotated[int | None, typer.Option(help="Query tokens per sequence.")]
SeqlenK = Annotated[int | None, typer.Option(help="Key tokens; as many as queries unless given.")]
Heads = Annotated[int | None, typer.Option(help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads; as many as query heads unless given.")]
HeadDim = Annotated[int | None, typer.Option(help="Head dimension of Q and K.")]
HeadDimV = Annotated[int | None, typer.Option(help="Head dimension of V; that of Q unless given.")]
Causal = Annotated[bool | None, typer.Option("--causal/--no-causal", help="Mask the future.")]
Dtype = Annotated[str | None, typer.Option(help="bf16, fp16, fp8 or fp4.")]


def make_problem(**shape: Any) -> Problem:
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
