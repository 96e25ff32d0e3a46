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
# # A first run
#
# How fast is FlashAttention-3 on an H100, what limits it, and what does each of its warps do? No GPU is needed: the
# simulator runs the *schedule* (roles, buffers, barriers, order of work) on the *architecture* (rates, latencies and
# capacities, each with its source) for a whole grid. The very first run compiles the engine, once.

# %%
import json
import tempfile
from pathlib import Path

from IPython.display import Image, display

import fasim
from fasim import Problem, Run, TraceSpec, load_arch, plot_timeline, simulate

arch = load_arch("h100")
print(f"fasim {fasim.__version__}, {arch.name} {arch.digest[:12]}")

# %% [markdown]
# ## Three things go in
#
# A schedule, by name or as a file; a problem; an architecture. Fields of the problem that are not given have defaults:
# batch 4, 4096 queries and keys, 16 heads of dimension 128, BF16, no mask, forward.

# %%
problem = Problem()
run = simulate("fa3", problem, arch, trace=TraceSpec(sms=(0,), cycles=(0, 60_000)))
print(problem.describe())

# %% [markdown]
# ## The answer
#
# About 81 % of the dense peak, and the tensor core is the limit. Cycles and clock are two predictions: cycles come from
# the simulation, the clock is the one the architecture file documents for this kind of load. The convention of the FLOP
# count is that of the FlashAttention papers.
#
# The second table says what each role did with its time. A consumer is a warpgroup that multiplies and computes the
# softmax; the producer is the warp that starts copies. It mostly waits for an empty buffer, as it should.

# %%
display(run)

# %% [markdown]
# ## One SM over time
#
# Four iterations in steady state. In the row `tensor`, a digit tells which warpgroup owns the MMA that runs. While one
# warpgroup computes its softmax (`#`), the tensor core works for the other.

# %%
run.timeline()

# %%
with tempfile.TemporaryDirectory() as folder:
    picture = Path(folder) / "fa3.png"
    plot_timeline([("fa3 on h100", run)], picture)
    display(Image(filename=picture, width=1000))

# %% [markdown]
# ## Plain data
#
# Tables are for pandas: `to_frame()` is a row with results, shape and knobs of the run, so that runs can be put under
# each other; there are also `"utilisation"`, `"stalls"` (of each role's time, in per cent) and `"trace"` (every slice).
#
# Everything but the trace has a stable JSON form, too, and a run can be loaded back from it. The same input gives the
# same bytes. On the command line: `fasim run fa3 --arch h100 --json fa3.json`.

# %%
run.to_frame("stalls").round(1)

# %%
text = run.to_json()
print(*list(json.loads(text)), sep=", ")

# %% [markdown]
# ## What was said, checked

# %%
assert Run.from_dict(json.loads(text)) == run
assert all(abs(sum(shares.values()) - 100) < 1e-6 for shares in run.stalls.values())
assert run.bottleneck == "tensor"
assert 78 < run.peak_percent < 84
