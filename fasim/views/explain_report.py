"""Why a run takes as long as it does, in words and tables.

How to read it: *From peak to achieved* splits the run's cycles into useful work at the chip's peak and losses; together
they are 100 %. A loss is what the removal of its cause saves once the causes above it are gone; a negative one means
that the removal made others collide. *Faster by a tenth* says what each resource would gain alone. The *critical path*
is what the end of an iteration waited for, followed backwards: "tensor: QK of consumer0" is time in which that MMA ran,
"consumer0: exp, bound by MUFU" vector work of that role and the pipe it needs most, "mma: wait P.ready" the wake-up
after somebody else's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from fasim.analysis.critical_path import CriticalPath, HandOver
from fasim.analysis.losses import Loss
from fasim.analysis.whatif import VECTOR, Gain, limits
from fasim.results.run import Run
from fasim.views.common import provenance, table

if TYPE_CHECKING:
    from fasim.studies.explain import Explanation

#: A gain below this many per cent is not worth a sentence.
_NOTICEABLE = 0.2

#: Pipes of the image in words.
_PIPES = {
    "issue": "issue slots",
    "fma": "FMA",
    "alu": "ALU",
    "mufu": "MUFU",
    "lsu": "LSU",
    "smem": "SMEM",
    "tmem": "TMEM",
    "port": "operand port",
    "tensor": "tensor core",
}


def render_explanation(found: Explanation) -> RenderableType:
    """Losses, gains, the critical path (of an iteration where the work has several), and the answer in words."""
    path = render_path(found.iteration or found.whole, found.run.meta["op_pipes"])
    answer = Text(verdict(found.run, found.losses, found.gains), style="bold")
    losses = render_losses(found.run, found.useful_percent, found.losses)
    return Group(losses, Text(), render_gains(found.gains), Text(), path, Text(), answer)


def render_losses(run: Run, useful_percent: float, losses: Sequence[Loss]) -> RenderableType:
    """Head line and loss table of ``run``."""
    head = Text()
    head.append(" · ".join(provenance(run)) + "\n", style="cyan")
    head.append(f"{run.cycles:,.0f} cycles, {run.tflops:.0f} TFLOP/s, {run.peak_percent:.1f} % of peak", style="bold")
    rows = table("", "% of time", "", left=(0, 2), gap=2)
    rows.add_row("useful", f"{useful_percent:.1f}", "unmasked FLOPs at the dense peak of all SMs", style="green")
    for loss in losses:
        rows.add_row(loss.name, f"{loss.percent:z.1f}", loss.how)
    return Group(head, Text(), Text("From peak to achieved", style="bold"), rows)


def render_path(path: CriticalPath, pipes: Mapping[str, str], rows: int = 8) -> RenderableType:
    """The critical path: its largest ``rows`` steps, and the hand-overs that cost most in words.

    ``pipes``: the pipe that limits an operation, ``Run.meta["op_pipes"]``.
    """
    if path.iterations:
        share = 100 * path.loop_carried_cycles / path.interval_cycles
        title = f"Critical path of an iteration of {path.interval_cycles:,.0f} cycles"
        loop = f"Without queueing for units an iteration takes {path.loop_carried_cycles:,.0f} cycles ({share:.0f} %)."
    else:
        title, loop = f"Critical path of the run on one SM, {path.cycles:,.0f} cycles", ""
    count = max(path.iterations, 1)
    shown = table("%", "cycles", "what", left=(0, 2), gap=2)
    for step in path.steps[:rows]:
        shown.add_row(f"{step.percent:.1f}", f"{step.cycles / count:,.0f}", _limited(step.label, pipes))
    rest = path.steps[rows:]
    if rest:
        shown.add_row(f"{sum(s.percent for s in rest):.1f}", f"{sum(s.cycles for s in rest) / count:,.0f}", "the rest")
    parts: list[RenderableType] = [Text(title, style="bold"), shown]
    parts += [Text(sentence(hand_over, pipes)) for hand_over in path.hand_overs[:3]]
    return Group(*parts, *([Text(loop)] if loop else []))


def sentence(hand_over: HandOver, pipes: Mapping[str, str]) -> str:
    """A hand-over in words: "mma at 'wait P' waits for softmax0: exp, P, bound by MUFU (27 times, 861 cycles each)"."""
    verb = "queues for a pipe behind" if hand_over.reason == "pipe" else "waits for"
    times = "once" if hand_over.times == 1 else f"{hand_over.times} times"
    each = f"{hand_over.cycles / hand_over.times:,.0f} cycles{' each' if hand_over.times > 1 else ''}"
    return f"{hand_over.waiter} at '{hand_over.what}' {verb} {_limited(hand_over.cause, pipes)} ({times}, {each})."


def _limited(label: str, pipes: Mapping[str, str]) -> str:
    """A label of a step, with the pipe that limits its operation."""
    pipe = pipes.get(label.partition(": ")[2])
    return label if pipe is None else f"{label}, bound by {_PIPES[pipe]}"


def render_gains(gains: Sequence[Gain]) -> RenderableType:
    """Table of gains by 10 % and, where asked for, by infinitely fast resources."""
    endless = any(gain.infinite_percent is not None for gain in gains)
    heads = ("resource", "gain %", *(["infinite"] if endless else []), "what it is")
    rows = table(*heads, left=(0, len(heads) - 1), gap=2)
    for gain in gains:
        infinite = [] if gain.infinite_percent is None else [f"{gain.infinite_percent:+z.1f}"]
        rows.add_row(gain.resource, f"{gain.tenth_percent:+z.1f}", *infinite, gain.meaning)
    return Group(Text("Faster by a tenth", style="bold"), rows)


def verdict(run: Run, losses: Sequence[Loss], gains: Sequence[Gain]) -> str:
    """The answer in words: the limiting resource, the next one, and the largest losses."""
    first, second = limits(gains)
    worst = min(gains, key=lambda gain: gain.tenth_percent)
    busiest = max(run.utilisation, key=lambda unit: run.utilisation[unit])
    if first.tenth_percent >= _NOTICEABLE:
        lines = [f"Limit: {_gain_text(first, gains)} faster by a tenth of it."]
    else:
        lines = ["Limit: none; no resource alone gains anything."]
    if second.tenth_percent >= _NOTICEABLE:
        lines.append(f"Next: {_gain_text(second, gains)}.")
    if -worst.tenth_percent > max(second.tenth_percent, _NOTICEABLE):
        lines.append(
            f"A faster {worst.resource} loses {-worst.tenth_percent:.1f} %, because roles collide that were out of "
            "each other's way: smaller gains than that depend on such chance."
        )
    top = sorted(losses, key=lambda loss: -loss.percent)[:2]
    lines.append("Largest losses: " + ", ".join(f"{loss.name} {loss.percent:.1f} %" for loss in top) + ".")
    lines.append(f"Busiest unit: {busiest}, {run.utilisation[busiest]:.1f} %.")
    return " ".join(lines)


def _gain_text(gain: Gain, gains: Sequence[Gain]) -> str:
    text = f"{gain.resource} ({gain.meaning}), {gain.tenth_percent:.1f} %"
    if gain.resource in VECTOR:
        together = next(other for other in gains if other.resource == "vector")
        text += f" ({together.tenth_percent:.1f} % with all vector units)"
    return text
