"""FlashAttention-4's forward kernels for Hopper: the structure of FA3, written in the CuTe DSL.

One warp loads; two or three consumer warpgroups of 64 rows issue QK of a block and PV of the last back to back (up to
head dim 128 in turn, by named barriers), then compute the softmax of the block. Other than in FA3: a CTA per tile,
blocks of 128 keys at head dim 128 with or without a mask, no clusters, the mask in every block of a causal tile, the
maxima of both rows before all exponentials, O through the space of Q.

Source: flash_attn/cute/flash_fwd_sm90.py, interface.py of Dao-AILab/flash-attention at 0251105a. Numbers: builds/fa4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fasim.arch import Arch
from fasim.kernels.blocks import BlockInfo
from fasim.kernels.epilogue import store_by_first
from fasim.kernels.forward import Forward, operands, staging
from fasim.kernels.grid import in_order, kv_heads_in_l2, longest_first, peeled
from fasim.kernels.warpgroup import Consumer, Producer, kv_blocks
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.language import Group, Kernel, Ring
from fasim.program.library import schedule


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks."""

    pack_gqa: Annotated[bool | None, "heads of a group share a query tile; default: where there are groups"] = None


@schedule(architectures=("hopper",), dtypes=("bf16", "fp16"))
def fa4(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> Kernel:
    """FlashAttention-4 forward: the structure of FA3 on Hopper, tensor memory and emulated exp2 on Blackwell."""
    packed = problem.group > 1 if knobs.pack_gqa is None else knobs.pack_gqa
    row, causal = build.tile(problem), problem.causal
    cut = BlockInfo(problem, row.tile_m, row.tile_n, packed)
    f = Forward(
        problem, arch, build, cut, row.stages, overlap=True, turns=problem.head_dim <= 128,
        p_in_registers=row.p_in_registers, rescale_early=problem.head_dim_v > 128,
    )  # fmt: skip
    chosen = dict(tile_m=f.m, tile_n=f.n, scheduler="lpt" if causal else "single", pack_gqa=packed, build=build.name)
    k = Kernel("fa4", problem, arch, chosen, max_ctas_per_sm=1, launch_registers=f.registers["launch"])
    tiles = in_order(cut)
    if causal:
        heads = problem.group // cut.packed_heads
        tiles = longest_first(cut, kv_heads_in_l2(problem, build.cost("l2_section")) * heads)
    peeled(k, cut, tiles, mask_all=causal)
    mem = operands(k, f, tiles, rows=f.m)
    staging(k, f, over=mem.q)
    turn = k.turns("turn", f.warpgroups)
    staged = k.barrier("O.staged", f.warpgroups, named=True)

    with k.role("producer", warps=1, registers=f.registers["producer"]) as role:
        p = Producer(k, role, f)
        with role.tiles(draws=True):
            role.delay("tile set-up", build.cost("setup"), "issue")
            role.load(mem.k)
            role.load(mem.q)
            for _ in p.blocks():
                role.load(mem.k)
                role.load(mem.v)
            role.load(mem.v)

    with k.role("consumer", warpgroups=f.warpgroups, registers=f.registers["consumer"]) as role:
        c = Consumer(k, role, f, turn)
        with role.tiles():
            c.set_up_tile()  # beside the producer's
            c.wait(mem.q)
            overlapped(c, mem.q, mem.k, mem.v)
            store_by_first(role, f, staged, mem.o)
    return k


def overlapped(c: Consumer, q: Ring, keys: Ring, values: Ring) -> None:
    """QK of this block, PV of the last, softmax; all warps poll for K before they wait for their turn."""
    c.wait(keys)
    c.finish(c.qk(q, keys), "QK", free=keys)
    c.softmax(masked=True, first=True)
    for masked in kv_blocks(c.kernel, c.role):
        c.wait(keys)
        with c.turn():
            s = c.qk(q, keys, rescale=True)
            c.wait(values)
            o = c.pv(values)
        c.finish(s, "QK")

        def at_wait_pv(o: Group = o) -> None:  # where the compiler waits for PV: among the exponentials
            c.release(keys)
            c.finish(o, "PV", free=values)

        c.softmax(masked, at_wait_pv=at_wait_pv)
        c.branch()
    c.release(q)
    c.rescale_late()
    c.wait(values)
    c.finish(c.pv(values), "PV", free=values)
