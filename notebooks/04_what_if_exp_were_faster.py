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
# # What if exp were faster?
#
# Per cycle, an SM of the B200 multiplies twice as much as one of the H100, but computes as many exponentials: 16.
# FlashAttention-4 therefore computes some of them as a polynomial on the FMA pipe (*emulation*). The B300 has twice the
# exponentials in hardware. What did each answer bring, and can the second be predicted by changing one number of the
# B200?

# %%
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

import fasim
from fasim import Problem, load_arch, simulate

show = Console(width=110).print
what_if = ("sm.mufu.ops_per_cycle=32",)
chips = {"B200": load_arch("b200"), "B200, EX2 x 2": load_arch("b200", what_if), "B300": load_arch("b300")}
print(f"fasim {fasim.__version__},", ", ".join(f"{name} {chip.digest[:12]}" for name, chip in chips.items()))

# %% [markdown]
# An override changes one value of the architecture, as `--set` does on the command line. The digest is that of the
# file; a run keeps the list of overrides beside it.

# %%
problem = Problem(batch=4, seqlen_q=4096, heads_q=16, head_dim=128)
runs = {
    (chip, emulation): simulate("fa4", problem, arch, knobs={"exp2_emulation": emulation})
    for chip, arch in chips.items()
    for emulation in (False, True)
}
table = Table("chip", "emulation", "cycles", "% of peak", "tensor", "mufu", "fma")
for (chip, emulation), run in runs.items():
    busy = (f"{run.utilisation[unit]:.0f}" for unit in ("tensor", "mufu", "fma"))
    table.add_row(chip, "on" if emulation else "off", f"{run.cycles:,.0f}", f"{run.peak_percent:.0f}", *busy)
show(problem.describe(), table)

# %% [markdown]
# On the B200 emulation saves about 6 % of the cycles. Where exponentials are fast it *costs* cycles, which is why the
# real kernel switches it off on the B300.
#
# The changed B200 is close to a B300, but not equal. The rest is another instruction: on the B300 the row maximum comes
# with the load from tensor memory. It is a knob of the schedule, so the two effects can be told apart: about three
# quarters of the gain are the exponentials, and both together are the whole of it.

# %%
base = runs["B200", True].cycles
target = runs["B300", False].cycles
faster = runs["B200, EX2 x 2", False].cycles
both = simulate(
    "fa4", problem, chips["B200, EX2 x 2"], knobs={"exp2_emulation": False, "hardware_row_max": True}
).cycles
print(f"B200                        {base:10,.0f} cycles")
print(f"twice the exponentials      {faster:10,.0f} cycles, {100 * (faster / base - 1):+.1f} %")
print(f"and the row maximum         {both:10,.0f} cycles, {100 * (both / base - 1):+.1f} %")
print(f"B300                        {target:10,.0f} cycles, {100 * (target / base - 1):+.1f} %")

# %% [markdown]
# ## How much to emulate
#
# `emulation_frequency` is the period of the pattern: in each period, a fixed number of elements is emulated. A short
# period emulates much, a long one little. Too little leaves the exponential unit busy, too much makes the softmax
# longer by all those FMA instructions. On the B200 the best of the values below is 10, the one in FlashAttention-4's
# own table. Where exponentials are fast, none of them is as good as no emulation.

# %%
frequencies = (4, 6, 8, 10, 12, 24)
curves = {
    chip: [
        simulate("fa4", problem, chips[chip], knobs={"exp2_emulation": True, "emulation_frequency": f})
        for f in frequencies
    ]
    for chip in ("B200", "B200, EX2 x 2")
}

# %%
figure, axes = plt.subplots(figsize=(8, 4))
for (chip, curve), colour in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
    axes.plot(frequencies, [run.peak_percent for run in curve], "o-", color=colour, label=f"{chip}, emulation on")
    axes.axhline(runs[chip, False].peak_percent, color=colour, linestyle="--", label=f"{chip}, off")
axes.set(xlabel="emulation_frequency (emulated less to the right)", ylabel="% of the tensor peak")
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## What was said, checked

# %%
best = min(zip(frequencies, curves["B200"], strict=True), key=lambda point: point[1].cycles)[0]
assert best == 10
assert 0.02 < runs["B200", False].cycles / base - 1 < 0.10
assert runs["B300", True].cycles > target
assert min(run.cycles for run in curves["B200, EX2 x 2"]) > faster
assert 0.65 < (base - faster) / (base - target) < 0.85
assert abs(both / target - 1) < 0.01
