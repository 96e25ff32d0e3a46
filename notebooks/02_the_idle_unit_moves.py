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
# # The idle unit moves
#
# FlashAttention has been rewritten for each GPU generation, each time around a unit that stood idle. Every version
# below runs on the chip it was written for, and the table says how busy each unit was.

# %%
from rich.console import Console
from rich.table import Table

import fasim
from fasim import Problem, load_arch, simulate

show = Console(width=110).print
archs = {name: load_arch(name) for name in ("a100", "h100", "b200", "b300")}
print(f"fasim {fasim.__version__},", ", ".join(f"{name} {arch.digest[:12]}" for name, arch in archs.items()))

# %%
problem = Problem(batch=4, seqlen_q=4096, heads_q=16, head_dim=128)
steps = (
    ("naive", "a100"),
    ("fa1", "a100"),
    ("fa2", "a100"),
    ("fa2", "h100"),
    ("fa3", "h100"),
    ("fa4", "b200"),
    ("fa4", "b300"),
)
runs = {step: simulate(step[0], problem, archs[step[1]]) for step in steps}

# %%
units = ("tensor", "mufu", "fma", "alu", "issue", "smem", "l2", "hbm")
table = Table("schedule", "arch", "TFLOP/s", "% of peak", *units, title="Busy, % of the whole run")
for (schedule, name), run in runs.items():
    busy = (f"{run.utilisation[unit]:.0f}" for unit in units)
    table.add_row(schedule, name, f"{run.tflops:.0f}", f"{run.peak_percent:.0f}", *busy)
show(problem.describe(), table)

# %% [markdown]
# ## How to read it
#
# * **naive**, three kernels: the scores go to HBM and back, twice. HBM and the instruction issue are busy, the tensor
#   core is not.
# * **FA1** keeps the scores on the SM, and HBM traffic all but vanishes. The output is still read, rescaled and written
#   once per block of keys, and warps exchange partial sums through shared memory.
# * **FA2** on the A100 keeps the output in registers: 67 % of the peak.
# * **The same FA2 on the H100** reaches only 40 %. Its synchronous MMAs run at two thirds of the new rate, and a warp
#   that multiplies cannot do anything else. The idle unit is now the tensor core during the softmax.
# * **FA3** answers with asynchronous MMAs and two warpgroups that take turns: almost twice as fast on the same chip.
# * **FA4** on the B200: the tensor core has doubled, the exponential unit (MUFU) has not. A part of the exponentials
#   becomes polynomials on the FMA pipe, which had little to do.
# * **B300** doubles the exponentials in hardware, and the tensor core is the limit again.
#
# The longer version, with pictures, is `docs/story.md`.

# %% [markdown]
# ## What was said, checked

# %%
peak = {step: run.peak_percent for step, run in runs.items()}
assert peak["naive", "a100"] < peak["fa1", "a100"] < peak["fa2", "a100"]
assert runs["fa1", "a100"].utilisation["hbm"] < 0.25 * runs["naive", "a100"].utilisation["hbm"]
assert abs(peak["fa2", "a100"] - 68) < 4
assert abs(peak["fa2", "h100"] - 40) < 4
assert runs["fa2", "h100"].cycles > 1.9 * runs["fa3", "h100"].cycles
assert runs["fa4", "b300"].utilisation["mufu"] < runs["fa4", "b200"].utilisation["mufu"]
assert max(units, key=lambda unit: runs["fa4", "b300"].utilisation[unit]) == "tensor"
