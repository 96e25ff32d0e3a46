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
# # Calibrate against your GPU
#
# An architecture file is only as good as its numbers. Most of those of the H100 and H200 come from microbenchmarks that
# run on any Hopper GPU with `nvcc`, in half a minute:
#
#     python validation/microbench/run.py -o results.json
#
# This notebook takes the results of one H200 that come with the repository. Put the path of yours in their place.

# %%
import csv
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table

import fasim
from fasim import Microbench, Problem, calibrate, load_arch, render_calibration, simulate

places = (Path.cwd(), *Path.cwd().parents)
data = next(place / "validation" / "data" for place in places if (place / "validation" / "data").is_dir())
show = Console(width=130).print
results = Microbench.read(data / "h200_microbench.json")
result = calibrate(data / "h200_microbench.json", "h200")
h200 = load_arch("h200")
print(f"fasim {fasim.__version__}, h200 {h200.digest[:12]}; measured on {results.chip}, driver {results.driver}")

# %% [markdown]
# ## One number
#
# How long does a copy by TMA take that finds its bytes in L2? The benchmark times copies of 512 bytes to 32 KiB from
# arming the barrier to the end of the wait. A line through them has two numbers in it: the slope is the rate at which
# an SM takes data, the intercept the latency, once what the wait itself costs is taken off.

# %%
size, cycles = (results.column("tma.tma_latency", c, copy="tensor", **{"from": "l2"}) for c in ("bytes", "cycles"))
change = next(change for change in result.changes if change.rule.key == "sm.tma.latency_cycles")
slope, intercept = np.polyfit(size, cycles, 1)
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(size / 1024, cycles, "o", color="#0072B2")
axes.plot(size / 1024, intercept + slope * size, color="#222222", linewidth=0.8)
axes.set(xlabel="KiB", ylabel="cycles", title="One copy from L2, start to finish", ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)
plt.show()
found = change.estimate
print(f"{change.rule.key}: {found.value:.1f} cycles, residual {found.residual:.1f}; in the file {change.new:g}")

# %% [markdown]
# ## All of them
#
# `fasim calibrate results.json --arch h200 -o my_h200.toml` does this for every number that a benchmark determines.
# Each has one rule: a formula over the results and the step it is rounded to. A star would mark what changes: with the
# checked-in results nothing does, since they are where the checked-in file comes from. `in base` are the numbers of
# the SM, which H200 and H100 share; the file of the H200 states only what differs.

# %%
show(render_calibration(result))

# %% [markdown]
# ## Another GPU
#
# Say that your card has slower memory: here 70 % of the measured bandwidth. The new file derives from the H100 as
# before, and says in a comment where the number is from.

# %%
content = json.loads((data / "h200_microbench.json").read_text())
stream = content["benchmarks"]["memory"]["tables"]["stream"]
column = stream["columns"].index("throughput")
for row in stream["rows"]:
    row[column] *= 0.7
folder = tempfile.TemporaryDirectory()
slow_results, slow_file = Path(folder.name) / "results.json", Path(folder.name) / "slow_h200.toml"
slow_results.write_text(json.dumps(content))
slow_file.write_text(calibrate(slow_results, "h200").text)
print(*(line for line in slow_file.read_text().splitlines() if line.startswith("achieved")))

# %% [markdown]
# It is an architecture like any other. Decoding reads all of K and V for one query, so it feels the memory; a forward
# pass over 4096 tokens hardly does.

# %%
slow = load_arch(slow_file)
problems = {
    "decode": Problem(batch=32, seqlen_q=1, seqlen_k=8192, heads_q=32, heads_kv=8, head_dim=128),
    "forward": Problem(batch=4, seqlen_q=4096, heads_q=16, head_dim=128),
}
ratios = {}
table = Table("problem", "H200, us", "slower memory, us", "ratio")
for name, problem in problems.items():
    splits = {"splits": 0} if name == "decode" else {}
    before, after = (simulate("fa3", problem, arch, knobs=splits, clock_mhz=1700) for arch in (h200, slow))
    ratios[name] = after.time_us / before.time_us
    table.add_row(name, f"{before.time_us:.0f}", f"{after.time_us:.0f}", f"{ratios[name]:.2f}")
show(table)

# %% [markdown]
# ## Does it predict?
#
# The microbenchmarks know nothing of attention, so whole kernels are the test. `fasim validate` compares whole files;
# here are FlashAttention-3's rows of 4096 tokens, in cycles.

# %%
with (data / "h200_timing.csv").open() as stream:
    wanted = {"kernel": "fa3", "dtype": "bf16", "seqlen_q": "4096", "batch": "4", "set": "standard"}
    rows = [row for row in csv.DictReader(stream) if all(row[key] == text for key, text in wanted.items())]
errors = []
table = Table("head dim", "causal", "measured", "predicted", "error %")
for row in rows:
    heads, dim, causal = int(row["heads_q"]), int(row["head_dim"]), row["causal"] == "1"
    problem = Problem(batch=4, seqlen_q=4096, heads_q=heads, head_dim=dim, causal=causal)
    run = simulate("fa3", problem, h200, clock_mhz=float(row["sm_clock_mhz"]))
    errors.append(run.cycles / float(row["cycles"]) - 1)
    cells = (f"{float(row['cycles']):,.0f}", f"{run.cycles:,.0f}", f"{100 * errors[-1]:+.1f}")
    table.add_row(str(dim), "yes" if causal else "", *cells)
show(table)

# %% [markdown]
# Two numbers are measured as a wide range only: what an FMUL and an FFMA of a softmax take from a running wgmma. The
# files have the means (docs/calibrate.md).

# %% [markdown]
# ## What was said, checked

# %%
assert result.text == Path(h200.source).read_text()
assert all(change.new == change.old for change in result.changes)
assert "measured" in slow_file.read_text() and slow.hbm.achieved_bytes_per_second < h200.hbm.achieved_bytes_per_second
assert ratios["decode"] > 1.2 and ratios["forward"] < 1.05
assert len(errors) == 6 and max(map(abs, errors)) < 0.1
folder.cleanup()
