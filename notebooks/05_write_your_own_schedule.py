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
# * A **ring** is a staged buffer in shared memory with a *full* and an *empty* barrier per stage. `load` waits for an
#   empty stage and starts the copy that fills it; the consumer calls `wait`, and `release` when it has read the stage.
# * `mma` only issues. `wait_mma` waits for the result.
# * `vector` takes instructions per thread. The latencies named are those that nothing else of the same warp hides.
# * A **tile** is a CTA's share of the grid. The columns of `k.tiles` say, per tile, where its data begin and how often
#   its loops run.
#
# The fields of `Knobs` are its knobs; their annotations are what `fasim list knobs` prints.

# %%
SOURCE = '''
"""A small attention kernel for Hopper: one warpgroup, rings for K and V, everything in turn."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fasim import Arch, ConfigError, Kernel, Problem, schedule

WARPGROUPS = 1


@dataclass(frozen=True)
class Knobs:
    tile_n: Annotated[int, "keys per block"] = 128
    stages: Annotated[int, "buffers each of K and V"] = 2


@schedule(architectures=("hopper",), dtypes=("bf16", "fp16"))
def small(problem: Problem, arch: Arch, knobs: Knobs) -> Kernel:
    """One warpgroup, QK, softmax and PV one after the other."""
    if problem.causal:
        raise ConfigError("small: has no mask")
    d, m, n, stages = problem.head_dim, 64 * WARPGROUPS, knobs.tile_n, knobs.stages
    k = Kernel("small", problem, arch, {"tile_n": n, "stages": stages})

    # The grid: one tile of m query rows of one head per CTA, and where its keys begin.
    head, _ = (a.ravel() for a in np.mgrid[0 : problem.batch * problem.heads_q, 0 : problem.q_tiles(m)])
    blocks = problem.kv_tiles(n)
    tiles = len(head)
    k.tiles = {"q": np.arange(tiles), "kv": head // problem.group * blocks, "blocks": np.full(tiles, blocks)}

    # Tensors in memory, and the buffers in shared memory that copies of them fill.
    heads_kv = problem.batch * problem.heads_kv
    box = -(-d // 64)  # a TMA box is 64 elements wide
    q = k.ring(k.tensor("Q", tiles, 2 * m * d, "q"), 2 * m * d, 1, consumers=WARPGROUPS, boxes=box)
    stage = {"consumers": WARPGROUPS, "boxes": box}
    keys = k.ring(k.tensor("K", heads_kv * blocks, 2 * n * d, "kv", 1), 2 * n * d, stages, **stage)
    values = k.ring(k.tensor("V", heads_kv * blocks, 2 * n * d, "kv", 1), 2 * n * d, stages, **stage)
    o = k.tensor("O", tiles, 2 * m * d, "q")

    with k.role("producer", warps=1, registers=40) as p, p.tiles():
        p.load(q)
        with p.loop("blocks"):
            p.load(keys)
            p.load(values)

    with k.role("consumer", warpgroups=WARPGROUPS, registers=208) as c, c.tiles():
        c.wait(q)
        with c.loop("blocks"):
            c.wait(keys)
            c.mma("QK", m=64, n=n, k=16, count=d // 16)
            c.wait_mma(0, "wait QK")
            c.release(keys)
            # Per thread: n/2 scores of two rows. Maximum, exponentials, sum, P in 16 bit, O rescaled.
            e = n / 2
            c.vector("row max", {"fmnmx": e, "shfl": 4}, latency={"shfl": 2, "alu": 2})
            c.vector("exp", {"ffma": e, "ex2": e + 2, "fadd": e, "f2fp": e / 2, "fmul": d / 2})
            c.wait(values)
            c.mma("PV", m=64, n=d, k=16, count=n // 16, a="register")
            c.wait_mma(0, "wait PV")
            c.release(values)
        c.release(q)
        c.vector("scale O", {"mufu": 2, "fmul": d / 2, "f2fp": d / 4}, latency={"fma": 1})
        c.copy("store O", o, o.line_bytes // WARPGROUPS, "store", "threads")
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
forgotten = write("forgotten", edit(SOURCE, "            c.release(values)\n", ""))
try:
    simulate(forgotten, problem, arch)
except ModelError as error:
    print(error)

# %% [markdown]
# Release it once per tile instead of once per block (one indentation too few), and every rule is kept, but the program
# stops. Nothing is left to do and roles have not finished: a deadlock. The message says who waits for what, and since
# when. The producer wants an empty stage of V, the consumer wants the next V.

# %%
late = write("late", edit(SOURCE, "            c.release(values)\n", "        c.release(values)\n"))
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
