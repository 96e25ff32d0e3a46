"""The story of FlashAttention as simulated: writes docs/story.md and its pictures. Called by docs/make.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fasim import Problem, Run, TraceSpec, load_arch, plot_timeline, simulate

ROOT = Path(__file__).parents[1]
UNITS = ("tensor", "mufu", "fma", "alu", "issue", "smem", "l2", "hbm")


@dataclass(frozen=True)
class Chapter:
    """One version on the chip it was written for. ``before``: (label, knobs) of runs to compare with."""

    schedule: str
    arch: str
    title: str
    text: str
    dtype: str = "bf16"
    picture: bool = True
    variants: tuple[tuple[str, dict[str, object]], ...] = ()


CHAPTERS = (
    Chapter(
        "naive",
        "a100",
        "Naive: three kernels",
        "GEMM, softmax, GEMM. The score matrix goes to HBM and back twice, 8 N² bytes a head, so with d = "
        "128 there are "
        "only d/2 = 64 FLOP to a byte, far below what any of these chips needs to keep its tensor cores busy.",
        picture=False,
    ),
    Chapter(
        "fa1",
        "a100",
        "FlashAttention-1: the matrix stays on chip",
        "Scores never leave the SM. The unit it found idle is on-chip memory. But the loop runs over keys outside and "
        "queries inside, so the output is read, rescaled and written once per block of keys, and the four warps split "
        "the keys, so every 16-row step adds four partial outputs through shared memory between two barriers.",
    ),
    Chapter(
        "fa2",
        "a100",
        "FlashAttention-2: queries outside, warps own rows",
        "The output stays in registers and warps no longer talk to each other. A warp's softmax and its MMAs "
        "still take "
        "turns; the tensor core is filled by the other CTA of the SM. On the A100 this is most of the peak.",
    ),
    Chapter(
        "fa2",
        "h100",
        "The same kernel on Hopper",
        "mma.sync reaches only two thirds of Hopper's tensor rate, and instructions of the FMA, ALU and MUFU "
        "pipes stop "
        "it: matrix and vector work hardly overlap. More than half of the chip is idle.",
    ),
    Chapter(
        "fa3",
        "h100",
        "FlashAttention-3: asynchrony",
        "wgmma runs while warps do other things and TMA copies without them. Two warpgroups hand the tensor core back "
        "and forth, and each issues the next QK before the last PV. What was idle, the tensor core during softmax, "
        "works. Ping-pong is worth most where nothing else hides the softmax: 8 % on an H200, where two warpgroups "
        "without it fall into step; here they find the rhythm by themselves.",
        variants=(
            ("no overlap", {"overlap": "off"}),
            ("no overlap, no ping-pong", {"overlap": "off", "pingpong": "off"}),
        ),
    ),
    Chapter(
        "fa4",
        "b200",
        "FlashAttention-4: the exponential is the limit",
        "Blackwell doubles the tensor core and leaves exponentials as they were: 16 a cycle. So part of them "
        "is computed "
        "as a polynomial on FMA units that had little to do, the output is rescaled only when a row's "
        "maximum has grown "
        "enough to matter, accumulators live in tensor memory, and two SMs share one MMA.",
        variants=(
            ("no polynomial exp2", {"exp2_emulation": "off"}),
            ("rescale always", {"conditional_rescale": "off"}),
            ("one CTA per MMA", {"two_cta": "off"}),
        ),
    ),
    Chapter(
        "fa4",
        "b300",
        "B300: twice the exponentials",
        "The next chip answers in hardware: 32 exponentials a cycle. The polynomial is switched off and the "
        "tensor core "
        "is the limit again.",
    ),
)


@dataclass(frozen=True)
class Fact:
    """What a paper is remembered by. Shapes as in its figures: 16384 or 32768 tokens, heads x head dim = 2048."""

    claim: str
    published: str
    schedule: str
    arch: str
    seqlen: int
    head_dim: int
    dtype: str = "fp16"
    tokens: int = 16384
    knobs: tuple[tuple[str, object], ...] = ()
    against: tuple[str, tuple[tuple[str, object], ...]] | None = None  # schedule and knobs: a ratio, not a rate

    def run(self, schedule: str, knobs: tuple[tuple[str, object], ...]) -> Run:
        """``schedule`` on the fact's problem."""
        problem = Problem(
            batch=max(1, self.tokens // self.seqlen),
            seqlen_q=self.seqlen,
            heads_q=2048 // self.head_dim,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )
        return simulate(schedule, problem, load_arch(self.arch), knobs=dict(knobs))

    def line(self) -> str:
        """A line of the table."""
        run = self.run(self.schedule, self.knobs)
        share = 100 * run.tflops / load_arch(self.arch).chip.datasheet_tflops[self.dtype]
        said = f"{run.tflops:.0f} TFLOP/s, {share:.0f} % of the data sheet's peak"
        if self.against is not None:
            said = f"{run.tflops / self.run(*self.against).tflops:.2f}"
        shape = f"{self.arch}, S{self.seqlen} d{self.head_dim} {self.dtype}"
        return f"| {self.claim} | {shape} | {self.published} | {said} |"


FIRST_RELEASE = (("build", "2024"),)
FACTS = (
    Fact("FA1 / FA2", "about half", "fa1", "a100", 4096, 64, against=("fa2", ())),
    Fact("FA2 on its chip, short", "50 %", "fa2", "a100", 512, 64),
    Fact("FA2 on its chip, long", "73 %", "fa2", "a100", 16384, 128),
    Fact("FA2 on Hopper", "35 %", "fa2", "h100", 16384, 128),
    Fact("FA3", "about 650 TFLOP/s", "fa3", "h100", 16384, 128, knobs=FIRST_RELEASE),
    Fact("FA3 at its best", "75 %", "fa3", "h100", 16384, 256, knobs=FIRST_RELEASE),
    Fact("FA3 FP8", "about 1200 TFLOP/s", "fa3", "h100", 16896, 256, dtype="fp8", tokens=16896),
    Fact("FA4 at its best", "1605 TFLOP/s, 71 %", "fa4", "b200", 32768, 128, dtype="bf16", tokens=32768),
    Fact(
        "FA4 / Triton without warp specialisation",
        "2.1 to 2.7",
        "fa4",
        "b200",
        16384,
        128,
        dtype="bf16",
        tokens=32768,
        against=("triton", (("warp_specialize", "off"),)),
    ),
)


def facts() -> str:
    """What the papers are remembered by, and what is simulated."""
    head = "| | run | published | simulated |\n|---|---|---|---|\n"
    text = (
        "Without a clock given, at the one each chip is documented to hold. That of the B200 leans on "
        "FlashAttention-4's own throughput, so its row is no independent test; cycles per block are "
        "([`schedules/fa4.md`](schedules/fa4.md)).\n\n"
    )
    return "## What is remembered\n\n" + text + head + "\n".join(fact.line() for fact in FACTS) + "\n"


def row(label: str, run: Run) -> str:
    """A line of the table of runs."""
    cells = " | ".join(f"{run.utilisation[unit]:.0f}" for unit in UNITS)
    return f"| {label} | {run.cycles:,.0f} | {run.tflops:.0f} | {run.peak_percent:.0f} | {run.bottleneck} | {cells} |"


def story() -> None:
    """Simulate every chapter and write docs/story.md."""
    head = "| run | cycles | TFLOP/s | % of peak | limit | " + " | ".join(UNITS) + " |\n"
    head += "|---|" + "---|" * (4 + len(UNITS))
    parts = [
        "# The idle unit moves\n",
        "Made by `python docs/make.py story`; do not edit. Forward, B4 S4096 H16 d128, BF16, at the clock each chip "
        "holds under the load; utilisation is per cent of the whole run. Every run is one command: "
        "`fasim run SCHEDULE --arch ARCH --knob k=v`.\n",
    ]
    for chapter in CHAPTERS:
        arch = load_arch(chapter.arch)
        problem = Problem(batch=4, seqlen_q=4096, heads_q=16, head_dim=128, dtype=chapter.dtype)
        trace = TraceSpec(sms=(0,), cycles=(0, 60_000)) if chapter.picture else None
        run = simulate(chapter.schedule, problem, arch, trace=trace)
        lines = [head, row(f"{chapter.schedule} on {chapter.arch}", run)]
        for label, knobs in chapter.variants:
            lines.append(row(label, simulate(chapter.schedule, problem, arch, knobs=knobs)))
        parts.append(f"## {chapter.title}\n\n{chapter.text}\n\n" + "\n".join(lines) + "\n")
        if chapter.picture:
            name = f"story_{chapter.schedule}_{chapter.arch}.png"
            plot_timeline([(f"{chapter.schedule} on {chapter.arch}", run)], ROOT / "docs" / "img" / name)
            parts.append(f"![{chapter.schedule} on {chapter.arch}, one SM](img/{name})\n")
    parts.append(facts())
    (ROOT / "docs" / "story.md").write_text("\n".join(parts))
