"""Make the figures and tables of README and docs.

``python docs/make.py`` takes about ten minutes. Writes docs/img/*.png,
docs/story.md and docs/accuracy.md, and replaces what stands between the marks
``<!-- accuracy -->`` in README.md and ``<!-- limits -->`` in docs/explain.md.
Nothing in there is typed by hand. Part ``numbers`` fills the tables of docs/schedules/*.md and validation/DEVIATIONS.md
whose headings name a command (docs/tables.py).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from limits import limits
from residuals import residuals
from story import story
from tables import numbers

from fasim.arch import load_arch
from fasim.problem import Problem
from fasim.results.validation import Summary, Validation
from fasim.studies.simulate import TraceSpec, simulate
from fasim.studies.validate.counters import TRAFFIC, UNITS, compare_counters
from fasim.studies.validate.phases import PHASES, compare_phases
from fasim.studies.validate.timing import validate
from fasim.views.counters_report import TRAFFIC_TITLES, error_text, value_text
from fasim.views.plot import plot_timeline
from fasim.views.validation_plot import plot_validation

ROOT = Path(__file__).parents[1]
DATA = ROOT / "validation" / "data"
PARTS = ("pictures", "story", "limits", "numbers", "residuals", "accuracy")


def pictures() -> None:
    """Overlap on and off, the README picture, with what hardware says; and the Triton page's timeline."""
    arch, problem = load_arch("h200"), Problem(batch=4, seqlen_q=4096, heads_q=16, head_dim=128)
    runs = []
    for label, knobs in (("overlap", {}), ("no overlap", {"overlap": "off"})):
        run = simulate("fa3", problem, arch, knobs=knobs, trace=TraceSpec(sms=(0,), cycles=(0, 80_000)))
        runs.append((f"{label}: {run.tflops:.0f} TFLOP/s", run))
    plot_timeline(runs, ROOT / "docs" / "img" / "overlap.png")
    shape = {"seqlen_q": str(problem.seqlen_q), "head_dim": str(problem.head_dim), "causal": "0"}
    (effect,) = (
        effect
        for effect in validate(DATA / "h200_fa3_ablations.csv", cells=shape, effects=True).effects or ()
        if effect.variant == "d128_nooverlap_pp"
    )
    simulated, measured = 100 * effect.predicted, 100 * effect.measured
    caption = f"""*FlashAttention-3's two warpgroups on one SM of an H200. Above, a warpgroup multiplies the next block
of keys while it computes the softmax of the last; below, one after the other. Without overlap the kernel takes
{simulated:.1f} % more cycles in the simulation and {measured:.1f} % on hardware (4 sequences of 4096 tokens,
`d128_nooverlap_pp` of `validation/data/h200_fa3_ablations.csv`).*"""
    insert(ROOT / "README.md", "picture", caption)
    run = simulate("triton", problem, load_arch("h200"), trace=TraceSpec(sms=(0,), cycles=(0, 40_000)))
    plot_timeline([("triton on h200", run)], ROOT / "docs" / "img" / "triton.png")


def percent(value: float) -> str:
    """A fraction as signed per cent."""
    return f"{100 * value:+.1f}"


def summary_row(name: str, summary: Summary) -> str:
    """A line of a table of errors."""
    return f"| {name} | {summary.n} | {100 * summary.mape:.1f} | {100 * summary.max:.1f} | {percent(summary.bias)} |"


HEAD = "| | rows | MAPE % | max % | bias % |\n|---|---|---|---|---|"


def overview(result: Validation) -> str:
    """The README's table: kernels of 30 us and more, by kernel, data type and head dim."""
    lines = [HEAD]
    keys = dict.fromkeys((r.columns["kernel"], r.columns["dtype"]) for r in result.rows if r.error is not None)
    for kernel, dtype in keys:
        rows = [r for r in result.rows if (r.columns["kernel"], r.columns["dtype"]) == (kernel, dtype) and not r.short]
        if (total := Summary.of(rows)) is None:
            continue
        lines.append(summary_row(f"**{kernel} {dtype}**", total))
        for d in sorted({int(r.columns["head_dim"]) for r in rows}):
            if part := Summary.of(r for r in rows if int(r.columns["head_dim"]) == d):
                lines.append(summary_row(f"{kernel} {dtype} d{d}", part))
    return "\n".join(lines)


def insert(path: Path, mark: str, text: str) -> None:
    """Replace what stands between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    found = re.sub(
        rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)",
        lambda match: f"{match[1]}\n{text}\n\n{match[2]}",
        path.read_text(),
        flags=re.DOTALL,
    )
    path.write_text(found)


def rows_table(result: Validation) -> str:
    """Every predicted row with its error, and every row without a prediction with the reason."""
    lines = ["| kernel | dtype | shape | measured cycles | predicted | error % |", "|---|---|---|---|---|---|"]
    for row in result.rows:
        c = row.columns
        shape = f"B{c['batch']} S{c['seqlen_q']}x{c['seqlen_k']} H{c['heads_q']}/{c['heads_kv']} d{c['head_dim']}"
        shape += " causal" if c["causal"] == "1" else ""
        if row.error is None:
            lines.append(f"| {c['kernel']} | {c['dtype']} | {shape} | {c['cycles']} | {row.reason} | |")
        else:
            cells = f"{row.measured_cycles:.0f} | {row.predicted_cycles:.0f} | {percent(row.error)}"
            lines.append(f"| {c['kernel']} | {c['dtype']} | {shape} | {cells} |")
    return "\n".join(lines)


def effects_row(result: Validation) -> str:
    """A line for all effects of one switch, whose errors are in points, not in per cent of a time."""
    errors = [effect.predicted - effect.measured for effect in result.effects or ()]
    return summary_row("**fa3, effect of one switch, in points**", Summary.of_errors(errors))


def effects_table(result: Validation) -> str:
    """Every FA3 ablation: what one changed switch costs, measured and predicted."""
    lines = ["| variant | tokens | measured % | predicted % |", "|---|---|---|---|"]
    effects = result.effects or ()
    for effect in effects:
        cells = f"{percent(effect.measured)} | {percent(effect.predicted)}"
        lines.append(f"| {effect.variant} | {effect.row.columns['seqlen_q']} | {cells} |")
    mean = sum(abs(e.predicted - e.measured) for e in effects) / len(effects)
    large = [e for e in effects if abs(e.measured) > 0.03]
    right = sum(e.sign_right for e in large)
    lines.append("")
    lines.append(
        f"Mean absolute error of the effects: {100 * mean:.1f} points. "
        f"Sign right in {right} of {len(large)} effects above 3 %."
    )
    return "\n".join(lines)


def counters_table() -> str:
    """Utilisation and traffic of whole launches against Nsight Compute."""
    result = compare_counters(DATA / "h200_counters.csv")
    names = (*UNITS, *TRAFFIC)
    titles = [f"{TRAFFIC_TITLES[name]} MB" if name in TRAFFIC else name for name in names]
    lines = ["| launch | " + " | ".join(titles) + " |", "|---|" + "---|" * len(titles)]
    for launch in result.launches:
        pairs = [(name, value_text(name, launch.simulated[name]), launch.measured.get(name)) for name in names]
        cells = [f"{text} ({value_text(name, value)})" if value is not None else "" for name, text, value in pairs]
        lines.append(f"| {launch.name} | " + " | ".join(cells) + " |")
    means = result.mean_absolute()
    cells = [error_text(name, means[name]).lstrip("+") for name in names]
    lines.append("| mean absolute difference | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def phases_table(stamps: str, kernels: str) -> str:
    """Medians of the phases of an iteration, simulated (measured)."""
    result = compare_phases(DATA / stamps, DATA / kernels)
    shown = [phase for phase in PHASES if any(phase in variant.rows() for variant in result.variants)]
    lines = ["| variant | " + " | ".join(shown) + " |", "|---|" + "---|" * len(shown)]
    for variant in result.variants:
        cells = [
            f"{simulated:.0f} ({measured:.0f}, {percent(error)} %)"
            for measured, simulated, error in variant.rows().values()
        ]
        lines.append(f"| {variant.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def accuracy() -> None:
    """docs/accuracy.md and the README's table."""
    timing = validate(DATA / "h200_timing.csv")
    ablations = validate(DATA / "h200_fa3_ablations.csv", effects=True)
    triton = validate(DATA / "h200_triton.csv", kernels=["triton"])
    front = "\n".join([overview(timing), overview(triton).removeprefix(HEAD + "\n"), effects_row(ablations)])
    plot_validation(timing.to_dict(), ROOT / "docs" / "img" / "accuracy.png")
    text = f"""# Accuracy

Made by `python docs/make.py`; do not edit. Measured on one NVIDIA H200 SXM (`validation/data/README.md`), in SM
cycles at the SM clock measured in the same interval. One arch file, no factor per shape.
Error is predicted / measured - 1.
Known differences and their causes: `validation/DEVIATIONS.md`.

## Kernels of 30 us and more

{front}

The last row is of another kind: how far the simulated change by one switch of FA3 is from the measured change.

![Predicted against measured cycles, and the error by length](img/accuracy.png)

## What was fitted

No Hopper parameter was fitted to timings of whole kernels: the machine model is data sheets and microbenchmarks
(`docs/calibrate.md`). Schedules add what compiled code and counters say: instruction counts, their order, registers.
One cost of a schedule was fitted to timings that are compared here, Triton's `cold` (below): it is no test of Triton's
rows without a mask at head dim 128 from 512 to 4096 tokens.

Some costs of a work tile are *residuals*: what cycle stamps and stall samples of whole tiles leave over when
everything else is simulated. They were measured in the kernels that the tables above compare, so short sequences, where
a tile has few iterations, are less of a test than long ones. FA4's on Hopper are taken over from FA3's. The first loads
of a launch (`launch.first_load_ns` of `arch_models/h100.toml`) are one of them, the others stand in builds
(`docs/builds.md`). The second table is made with all of them at zero, by `python docs/make.py residuals`.

{residuals()}

## Blackwell

The documented clocks of B200 and B300 under attention (`clock.sustained_mhz` of their files) lean on FlashAttention-4's
own published throughput: 1613 to 1630 TFLOP/s at a tensor activity of 87.7 % make 1517 to 1533 MHz, 1880 TFLOP/s at
99.9 % make 1550. A time or a rate of FA4 on these chips that agrees is therefore no independent test. The test is
cycles per block of 256 queries x 128 keys, which counters give without a clock: 2335 in BF16 and 2349 in FP8 on the
B200, 2050 and 1855 on the B300 (`docs/schedules/fa4.md`, first table).

## FA3 with one switch changed

{effects_table(ablations)}

## Utilisation: simulated (Nsight Compute)

Whole launches, per cent of peak over all SMs and cycles (counters of active cycles are scaled to elapsed ones). L2 read
is what L2 serves, reads passed on between its partitions included; SM read is what arrives in SMs.
`smem` has the operands of MMAs, loads and stores and what TMA writes.

{counters_table()}

## Inside the kernels: phases of an iteration, simulated (measured, error)

Medians in cycles at 4 sequences of 4096 tokens: start to start, issue of QK and PV, start to S, S to the next start,
and from a start of warpgroup 0 to the next one of warpgroup 1. Writing the stamps changed the measured kernels by -2
to +5 %. FlashAttention-3:

{phases_table("h200_fa3_phases.csv", "h200_fa3_ablations.csv")}

The companion Triton kernel (`validation/triton_phases.py`), which waits for QK where it has issued it:

{phases_table("h200_triton_phases.csv", "h200_triton_phases_kernels.csv")}

## Every row

{rows_table(timing)}
"""
    (ROOT / "docs" / "accuracy.md").write_text(text)
    insert(ROOT / "README.md", "accuracy", front)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    wanted = parser.parse_args().what or list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))} (choices: {', '.join(PARTS)})")
    (ROOT / "docs" / "img").mkdir(exist_ok=True)
    if "pictures" in wanted:
        pictures()
    if "story" in wanted:
        story()
    if "limits" in wanted:
        limits()
    if "numbers" in wanted:
        numbers()
    if "residuals" in wanted and "accuracy" not in wanted:
        print(residuals())
    if "accuracy" in wanted:
        accuracy()
