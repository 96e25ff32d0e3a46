# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write your own schedule
#
# A schedule is a Python file with one function marked `@schedule`. It records a program: roles, buffers, barriers and
# tile-level operations, in the order a warp issues them. Loops are recorded once. Nothing is timed there: how long an
# instruction takes is the architecture's business.
#
# This notebook writes a small attention kernel for Hopper, runs it, changes it, and breaks it.

# %%
import tempfile
from pathlib import Path

from rich.console import Console

import fasim
from fasim import (
    DeadlockError,
    ModelError,
    Problem,
    TraceSpec,
    compare,
    load_arch,
    render_check,
    render_comparison,
    render_report,
    render_timeline,
    simulate,
)

show = Console(width=110).print
arch = load_arch("h100")
problem = Problem(batch=1, seqlen_q=4096, heads_q=16, head_dim=128)
print(f"fasim {fasim.__version__}, {arch.name} {arch.digest[:12]}")

# %% [markdown]
# ## The kernel
#
# * `fasim.kernels` is the library that the shipped schedules are written with. `BlockInfo` says which blocks of keys a
#   tile of queries visits and which of them need a mask, so a causal problem works without a line of its own here.
# * A **ring** is a staged buffer in shared memory with a *full* and an *empty* barrier per stage. `load` waits for an
#   empty stage and starts the copy that fills it; the consumer calls `wait`, and `release` when it has read the stage.
# * `gemm` only issues, and derives the instructions from its operands: a ring stands for the stage waited for last.
#   `finish` waits for the result.
# * `vector` takes instructions per thread. The latencies named are those that nothing else of the same warp hides. What
#   the instructions do to values is said by **effects**, so that `fasim check` can compute attention with the program.
# * A **tile** is a CTA's share of the grid. The columns of `k.tiles` say, per tile, where its data begin and how often
#   its loops run.
#
# The fields of `Knobs` are its knobs; their annotations are what `fasim list knobs` prints.

# %%
SOURCE = '''
"""A small attention kernel for Hopper: rings for K and V, QK, softmax and PV one after the other."""

from dataclasses import dataclass
from typing import Annotated

from fasim import Arch, Kernel, Problem, kernels, schedule

effects = kernels.effects

WARPGROUPS = 1


@dataclass(frozen=True)
class Knobs:
    tile_n: Annotated[int, "keys per block"] = 128
    stages: Annotated[int, "buffers each of K and V"] = 2


@schedule(architectures=("hopper",), dtypes=("bf16", "fp16"))
def small(problem: Problem, arch: Arch, knobs: Knobs) -> Kernel:
    """QK, softmax and PV one after the other."""
    d, dtype, m, n = problem.head_dim, problem.dtype, 64 * WARPGROUPS, knobs.tile_n
    k = Kernel("small", problem, arch, vars(knobs))

    # The grid: a CTA for every m query rows of a head, the KV blocks that it visits, and where its data begin.
    cut = kernels.BlockInfo(problem, m, n)
    tiles = kernels.in_order(cut)
    blocks = cut.kv_blocks(tiles)
    k.tiles = {**blocks.columns(), "q": kernels.q_lines(tiles), "kv": kernels.kv_lines(cut, tiles, blocks.last)}

    # Tensors in memory, and the rings of buffers in shared memory that copies of them fill.
    rows, block, lines = kernels.Shape(m, d, dtype), kernels.Shape(n, d, dtype), cut.kv_pairs * cut.n_blocks
    q_rows, kv_rows = kernels.query_layout(cut, d, tiles), kernels.kv_layout(cut, d)
    q = k.ring(k.tensor("Q", k.tile_count, rows.bytes, "q", layout=q_rows), rows, 1, consumers=WARPGROUPS)
    keys, values = (
        k.ring(k.tensor(name, lines, block.bytes, "kv", -1, kv_rows), block, knobs.stages, consumers=WARPGROUPS)
        for name in ("K", "V")
    )
    o = k.tensor("O", k.tile_count, rows.bytes, "q", layout=q_rows)

    with k.role("producer", warps=1, registers=40) as p, p.tiles():
        p.load(q)
        for trips, _ in kernels.kv_loops(k.tiles):
            with p.loop(trips):
                p.load(keys)
                p.load(values)

    scores, probabilities = kernels.register_tile("S", 64, n), kernels.register_tile("P", 64, n, dtype)
    output = kernels.register_tile("O", 64, d)
    with k.role("consumer", warpgroups=WARPGROUPS, registers=208) as c, c.tiles():
        c.wait(q)
        for trips, masked in kernels.kv_loops(k.tiles):
            with c.loop(trips):
                c.wait(keys)
                s = c.gemm("QK", q, keys, scores, transposed=True)
                c.finish(s)
                c.release(keys)
                # Per thread: n/2 scores of two rows. Maximum, exponentials, sum, P in 16 bit, O rescaled.
                e = n / 2
                if masked:
                    c.vector("mask", {"fsel": e, "alu": e}, effects=(effects.Mask(),))
                row_max = (effects.RowMax(),)
                c.vector("row max", {"fmnmx": e, "shfl": 4}, latency={"shfl": 2, "alu": 2}, effects=row_max)
                exp = {"ffma": e, "ex2": e + 2, "fadd": e, "f2fp": e / 2, "fmul": d / 2}
                p_and_sum = effects.Probabilities(), effects.RowSum(), effects.Round("S", "P", dtype)
                c.vector("exp", exp, effects=(*p_and_sum, effects.Rescale("O")))
                c.wait(values)
                c.finish(c.gemm("PV", probabilities, values, output, add=True))
                c.release(values)
        c.release(q)
        divide = effects.Normalise("O"), effects.Round("O", "O", dtype)
        done = *divide, effects.Store("lse", "O", array="LSE")
        c.vector("scale O", {"mufu": 2, "fmul": d / 2, "f2fp": d / 4}, latency={"fma": 1}, effects=done)
        c.copy("store O", o, o.line_bytes // WARPGROUPS, "store", "threads", effects=(effects.Store("O"),))
    return k
'''
folder = tempfile.TemporaryDirectory()


def write(name: str, source: str) -> str:
    """Write a schedule file into the temporary folder and return its path."""
    path = Path(folder.name) / f"{name}.py"
    path.write_text(source)
    return str(path)


def edit(source: str, old: str, new: str) -> str:
    """Replace the only occurrence of ``old``."""
    assert source.count(old) == 1, old
    return source.replace(old, new)


small = write("small", SOURCE)

# %% [markdown]
# ## Run it
#
# The path of a file works wherever a schedule's name does, also on the command line: `fasim run small.py --arch h100`.

# %%
trace = TraceSpec(sms=(0,), cycles=(0, 40_000))
first = simulate(small, problem, arch, trace=trace)
show(render_report(first))
show(render_timeline(first.trace, width=110))

# %% [markdown]
# The warpgroup does one thing at a time, so the tensor core idles during every softmax. But the report names another
# limit: L2. All of K and V is copied for only 64 rows of queries, and about 90 % of what L2 can deliver is taken.
#
# ## Is it right?
#
# `check` executes the very program that is timed on small random matrices, compares the result with attention in
# float64, and looks for races: a wait or a release that is missing, even where this run's timing hides it.

# %%
result = fasim.check(small, Problem(batch=1, seqlen_q=300, seqlen_k=700, heads_q=2, causal=True), arch)
show(render_check(result))
assert result["passed"]

# %% [markdown]
# ## A knob
#
# With one stage instead of two, a CTA needs less shared memory and two of them fit on an SM. One computes its softmax
# while the other multiplies. It helps a little, then L2 is full.

# %%
single = simulate(small, problem, arch, knobs={"stages": 1})
print(f"CTAs per SM: {first.meta['ctas_per_sm']} -> {single.meta['ctas_per_sm']}")
print(f"L2 busy: {first.utilisation['l2']:.0f} % -> {single.utilisation['l2']:.0f} %")
print(f"cycles: {first.cycles:,.0f} -> {single.cycles:,.0f}")

# %% [markdown]
# ## A change to the code
#
# Better: two warpgroups share each block of K and V. The source has one constant for that. Twice the rows per copy
# means half of the traffic, and the second warpgroup fills the gaps of the first. Time falls by about a quarter, and no
# unit is at its limit any more: what is left is latency, which is what ping-pong and overlap in `fa3` are about.

# %%
two = write("two", edit(SOURCE, "WARPGROUPS = 1", "WARPGROUPS = 2"))
second = simulate(two, problem, arch, trace=trace)
show(render_comparison(compare([("one", first), ("two", second), ("fa3", simulate("fa3", problem, arch))])))
show(render_timeline(second.trace, width=110))

# %% [markdown]
# ## A mistake
#
# Forget to release V, and the kernel is refused before anything runs: the producer waits for a barrier at which nothing
# arrives.

# %%
forgotten = write("forgotten", edit(SOURCE, "                c.release(values)\n", ""))
try:
    simulate(forgotten, problem, arch)
except ModelError as error:
    print(error)

# %% [markdown]
# Release it once per tile instead of once per block (one indentation too few), and every rule is kept, but the program
# stops. Nothing is left to do and roles have not finished: a deadlock. The message says who waits for what, and since
# when. The producer wants an empty stage of V, the consumer wants the next V.

# %%
late = write("late", edit(SOURCE, "                c.release(values)\n", "            c.release(values)\n"))
try:
    simulate(late, problem, arch)
except DeadlockError as error:
    message = str(error)
    print(message)

# %% [markdown]
# ## What was said, checked

# %%
folder.cleanup()
assert first.bottleneck == "l2"
assert single.meta["ctas_per_sm"] == 2 and single.cycles < first.cycles
assert 0.18 < 1 - second.cycles / first.cycles < 0.32
assert "producer: waits for" in message and "V.empty" in message
