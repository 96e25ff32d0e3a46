"""Recording a kernel, what it adds up to, what is refused, and what lowering makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from programs import TOY_MHZ, cycles, kernel, toy_arch

from fasim.arch import load_arch
from fasim.engine import image as im
from fasim.errors import BudgetError, ConfigError, ModelError
from fasim.lowering.lower import lower, lower_all
from fasim.program.language import Kernel, walk
from fasim.program.ops import Arrive, Copy, Delay, Loop, Only, TileLoop, Wait, add_mixes, scale_mix
from fasim.program.rules import cta_registers, ctas_per_sm, verify


def one_role(arch=None, **options):
    k = kernel(arch or toy_arch(), **options)
    with k.role("w", warps=4, registers=64) as w, w.tiles():
        w.delay("work", 10)
    return k


# --- recording -------------------------------------------------------------------------------------------
def test_structure_is_recorded_in_program_order():
    k = kernel(toy_arch())
    with k.role("w", warpgroups=2, registers=64) as w:
        w.delay("before", 1)
        with w.tiles(draws=True):
            with w.loop("trips"), w.loop(3):
                w.delay("inner", 2)
            with w.only(-1):
                w.delay("last", 3)
        w.delay("after", 4)
    (role,) = k.roles
    assert (role.name, role.warps, role.count) == ("w", 4, 2)
    before, tiles, after = role.body
    assert (before.label, after.label) == ("before", "after")
    assert isinstance(tiles, TileLoop) and tiles.draws
    outer, only = tiles.body
    assert isinstance(outer, Loop) and outer.trips == "trips"
    assert outer.body == (Loop("3", 3, (Delay("inner", 2, "dependency"),)),)
    assert only == Only("only", -1, (Delay("last", 3, "dependency"),))
    assert [op.label for op in walk(role.body)] == [
        "before", "tiles", "trips", "3", "inner", "only", "last", "after",
    ]  # fmt: skip


def test_a_phase_marks_what_is_recorded_inside():
    k = kernel(toy_arch())
    with k.role("w", warps=4, registers=64) as w, w.tiles():
        w.delay("work", 1)
        with w.phase("outer"):
            w.delay("work", 2)
            with w.phase("inner"):
                w.delay("more", 3)
            with w.loop(2):
                w.delay("work", 4)
        w.delay("more", 5)
    image = lower(k, TOY_MHZ)
    work = image.code[image.code[:, im.K_KIND] == im.DELAY]
    names = [(image.names[i], image.phases[i]) for i in work[:, im.K_NAME]]
    assert names == [("work", ""), ("work", "outer"), ("more", "inner"), ("work", "outer"), ("more", "")]
    assert cycles(k) == 119  # and costs nothing: 100 + 1 + 2 + 3 + 2 x 4 + 5


def test_a_ring_is_a_buffer_and_two_barriers():
    k = kernel(toy_arch(), tiles=4, cluster=2)
    tensor = k.tensor("K", 4, 2048, "own")
    private = k.ring(tensor, 2048, 3, consumers=2)
    shared = k.ring(k.tensor("V", 4, 2048, "own"), 2048, 2, consumers=2, multicast=True, boxes=2)
    assert k.smem_bytes == (3 + 2) * 2048
    assert (private.full.arrivals, private.empty.arrivals, private.copy_bytes) == (1, 2, 2048)
    assert (shared.full.arrivals, shared.empty.arrivals, shared.copy_bytes) == (2, 4, 1024)  # both CTAs fill and free
    with k.role("p", warps=1, registers=24) as p:
        p.load(shared)
    wait, copy = p.body
    assert isinstance(wait, Wait) and (wait.use.barrier, wait.use.ahead, wait.reason) == ("V.empty", 1, "empty")
    assert isinstance(copy, Copy) and copy.multicast and (copy.bytes, copy.boxes) == (1024, 2)
    with k.role("c", warps=4, registers=24) as c:
        c.wait(shared)
        c.release(shared)
    wait, release = c.body
    assert isinstance(wait, Wait) and (wait.use.barrier, wait.use.ahead, wait.reason) == ("V.full", 0, "full")
    assert isinstance(release, Arrive) and release.scope == "cluster"


def test_aliased_space_counts_once_at_the_larger_size():
    k = kernel(toy_arch())
    k.smem("V", 1000, stages=2)
    k.smem("O", 1500, aliases="V")
    assert k.smem_bytes == 2000
    k.smem("big O", 3000, aliases="V")
    assert k.smem_bytes == 3000


def test_a_role_has_warps_or_warpgroups():
    for sizes in ({}, {"warps": 1, "warpgroups": 1}):
        with (
            pytest.raises(ConfigError, match="role 'w': give either warps or warpgroups"),
            kernel(toy_arch()).role("w", registers=24, **sizes),
        ):
            pass


def test_an_instance_must_fit_the_barrier():
    k = kernel(toy_arch())
    turn, plain = k.turns("turn", 2), k.barrier("plain", 1)
    with k.role("w", warpgroups=2, registers=24) as w:
        for barrier, instance in ((turn, "shared"), (plain, "own")):
            with pytest.raises(ConfigError, match=f"barrier '{barrier.name}': instance '{instance}' does not fit"):
                w.arrive(barrier, instance)


def test_mixes_add_and_scale():
    assert add_mixes({"ffma": 1, "ex2": 2}, {"ex2": 3}) == {"ffma": 1, "ex2": 5}
    assert scale_mix({"ffma": 4, "ex2": 2}, 0.5) == {"ffma": 2, "ex2": 1}


# --- verification ------------------------------------------------------------------------------------------
def refused(k: Kernel, error: type[Exception] = ModelError) -> str:
    with pytest.raises(error) as caught:
        lower(k, TOY_MHZ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_shared_memory_budget():
    k = one_role()
    k.smem("K", 100_000, stages=3)
    assert refused(k, BudgetError) == (
        "toy on toy: shared memory 300000 B exceeds 232448 B per CTA (K 3 x 100000); use a smaller tile or fewer stages"
    )


def test_register_budgets():
    k = kernel(toy_arch())
    with k.role("w", warps=4, registers=300) as w:
        w.delay("work", 1)
    assert refused(k, BudgetError) == "toy on toy: role 'w' needs 300 registers per thread, the limit is 255"
    k = kernel(toy_arch())
    with k.role("w", warpgroups=3, registers=240) as w:
        w.delay("work", 1)
    assert refused(k, BudgetError) == "toy on toy: 92160 registers exceed 65536 per SM (w 384 x 240)"


def test_thread_budget():
    k = kernel(toy_arch("sm.max_threads=256"))
    with k.role("w", warps=4, count=3, registers=24) as w:
        w.delay("work", 1)
    assert refused(k, BudgetError) == "toy on toy: 384 threads exceed 256 per SM"


def test_named_barrier_budget():
    k = one_role(toy_arch("sm.named_barriers=3"))
    k.turns("turn", 3)
    verify(k)
    k.barrier("sync", 2, named=True)
    assert refused(k, BudgetError) == "toy on toy: 4 named barriers exceed 3 per CTA"


def test_tensor_memory_budgets():
    k = one_role()
    k.tmem_columns = 128
    assert refused(k, BudgetError) == "toy: toy has no tensor memory"
    k = one_role(load_arch("b200"))
    k.tmem_columns = 513
    assert refused(k, BudgetError) == "toy on b200: 513 TMEM columns exceed 512"


def test_registers_are_what_a_cta_launches_with_or_holds_later():
    k = kernel(toy_arch())
    with k.role("p", warps=4, registers=24) as p:
        p.delay("", 1)
    with k.role("c", warpgroups=2, registers=236) as c:  # allocated in units of 8: 240
        c.delay("", 1)
    assert cta_registers(k) == 128 * 24 + 256 * 240
    k.launch_registers = 168
    assert cta_registers(k) == max(128 * 24 + 256 * 240, 384 * 168)


@pytest.mark.parametrize(
    ("change", "ctas"),
    [
        ({}, 8),  # 65536 registers / (128 x 64)
        ({"max_ctas_per_sm": 3}, 3),
        ({"smem": 70_000}, 3),  # 233472 / (70000 + 1024)
        ({"override": "sm.max_threads=256"}, 2),
        ({"override": "sm.max_ctas=5"}, 5),
        ({"tmem": 200}, 2),  # 512 columns
    ],
)
def test_ctas_per_sm(change, ctas):
    arch = load_arch("b200") if "tmem" in change else toy_arch(*([change["override"]] if "override" in change else []))
    k = one_role(arch, max_ctas_per_sm=change.get("max_ctas_per_sm"))
    k.tmem_columns = change.get("tmem", 0)
    if "smem" in change:
        k.smem("X", change["smem"])
    assert ctas_per_sm(k) == ctas


def test_tiles_must_fit_the_grid():
    k = one_role()
    k.tiles["own"] = np.arange(2)
    assert refused(k) == "toy: tile table is empty or ragged: {'trips': 1, 'own': 2, 'shared': 1}"
    k.tiles = {}
    assert "tile table is empty" in refused(k)
    assert refused(one_role(tiles=3, cluster=2)) == "toy: 3 work tiles do not divide into clusters of 2"
    odd = toy_arch("chip.sm_count=3")
    assert refused(one_role(odd, tiles=4, cluster=2)) == "toy: 3 SMs do not divide into clusters of 2"


def test_a_wait_needs_an_arrival():
    k = kernel(toy_arch())
    bar = k.barrier("done", 1)
    with k.role("c", warps=4, registers=24) as c:
        c.wait_barrier(bar, label="wait S")
    assert refused(k) == "toy: role 'c', operation 'wait S': waits for 'done', at which nothing arrives"


def test_unknown_names_are_found_before_anything_runs():
    k, other = kernel(toy_arch()), kernel(toy_arch())
    with k.role("c", warps=4, registers=24) as c, c.tiles():
        c.arrive(other.barrier("elsewhere", 1), label="release")
    assert refused(k) == "toy: role 'c', operation 'release': unknown barrier 'elsewhere'"
    k = kernel(toy_arch())
    with k.role("c", warps=4, registers=24) as c, c.tiles(), c.loop("full_blocks"):
        c.delay("", 1)
    assert refused(k) == (
        "toy: role 'c', operation 'full_blocks': the tile table has no column 'full_blocks' (has trips, own, shared)"
    )
    for tensor, text in (
        (other.tensor("K", 1, 16, "own"), "unknown tensor 'K'"),
        (None, "the tile table has no column 'kv' (has trips, own, shared)"),
    ):
        k = kernel(toy_arch())
        with k.role("p", warps=1, registers=24) as p, p.tiles():
            p.copy("load K", tensor or k.tensor("K", 1, 16, "kv"), 16, "load")
        assert refused(k) == f"toy: role 'p', operation 'load K': {text}"


def test_what_a_chip_does_not_have():
    for chip, record, text in (
        ("a100", lambda r, k: r.mma("QK", m=64, n=64, k=16, count=1), "no asynchronous MMA"),
        ("a100", lambda r, k: r.copy("load", k.tensor("K", 1, 16, "own"), 16, "load"), "has no TMA"),
        ("h100", lambda r, k: r.vector("ld", {}, tmem_load_bytes=512), "tensor memory, which h100 does not have"),
        ("h100", lambda r, k: r.vector("add", {"ffma2": 1}), "no instruction of class 'ffma2'"),
        ("h100", lambda r, k: r.mma("QK", m=64, n=64, k=16, count=1, dtype="fp4"), "no tensor rate for dtype 'fp4'"),
    ):
        k = kernel(load_arch(chip))
        with k.role("w", warps=4, registers=24) as w, w.tiles():
            record(w, k)
        assert text in refused(k)


# --- lowering ----------------------------------------------------------------------------------------------
def test_verify_accepts_what_lower_runs():
    k = one_role()
    verify(k)
    image = lower(k, TOY_MHZ)
    kinds = [im.TILE, im.DELAY, im.END_TILE, im.END]
    assert image.code[:, im.K_KIND].tolist() == kinds
    assert image.agents == ("w",)
    assert image.code[0, im.T_EXIT] == 3 and image.code[2, im.T_EXIT] == 0


def test_instances_share_code_but_not_barriers():
    k = kernel(toy_arch())
    turn = k.turns("turn", 3)
    with k.role("wg", warpgroups=3, registers=24) as c, c.tiles():
        c.wait_barrier(turn, "own")
        c.arrive(turn, "next")
    image = lower(k, TOY_MHZ)
    assert image.agents == ("wg0", "wg1", "wg2")
    assert image.barriers == ("turn@0", "turn@1", "turn@2")
    waits = image.code[image.code[:, im.K_KIND] == im.WAIT]
    assert waits[:, im.M_BAR].tolist() == [0, 1, 2]
    assert waits[:, im.B_AHEAD].tolist() == [1, 0, 0]  # primed for the first
    assert image.code[image.code[:, im.K_KIND] == im.ARRIVE][:, im.M_BAR].tolist() == [1, 2, 0]


def test_only_picks_instances():
    k = kernel(toy_arch())
    with k.role("wg", warpgroups=3, registers=24) as c, c.tiles():
        with c.only(-1):
            c.delay("last", 7)
        with c.only(0, others=True):
            c.delay("not the first", 5)
    image = lower(k, TOY_MHZ)
    bodies = [image.code[a:b] for a, b in zip(image.entry, [*image.entry[1:], len(image.code)], strict=True)]
    delays = [body[body[:, im.K_KIND] == im.DELAY][:, im.D_TICKS] // im.TICKS for body in bodies]
    assert [d.tolist() for d in delays] == [[], [5], [7, 5]]


def test_loops_nest_four_deep_at_most():
    k = kernel(toy_arch())
    with k.role("w", warps=4, registers=24) as w, w.tiles(), w.loop(2), w.loop(2), w.loop(2), w.loop(2):
        w.delay("", 1)
    assert cycles(k) == 116
    k = kernel(toy_arch())
    with k.role("w", warps=4, registers=24) as w, w.loop(1), w.loop(1), w.loop(1), w.loop(1), w.loop(1):
        w.delay("", 1)
    assert refused(k) == "role 'w': loops nest deeper than 4"


def test_persistent_grids_are_as_wide_as_the_chip():
    for mode, grid in (("single", 7), ("static", 4), ("dynamic", 4)):
        k = one_role(toy_arch("chip.sm_count=2"), tiles=7, mode=mode, max_ctas_per_sm=2)
        assert lower(k, TOY_MHZ).machine.grid == grid
    assert lower(one_role(toy_arch("chip.sm_count=8"), tiles=3, mode="static"), TOY_MHZ).machine.grid == 3


def test_times_of_the_memory_clock_scale_with_the_sm_clock():
    slow, fast = (lower(one_role(), mhz).machine for mhz in (1000, 2000))
    assert (slow.ramp, fast.ramp) == (100 * 64, 200 * 64)
    assert fast.hbm_rate == 2 * slow.hbm_rate
    assert fast.l2_rate == slow.l2_rate


def test_kernels_in_sequence_share_the_lines_of_a_tensor():
    first, second = one_role(), one_role()
    first.tensor("Q", 3, 16, "own")
    first.tensor("K", 5, 16, "own")
    second.tensor("K", 5, 16, "own")
    one, two = lower_all([first, second], TOY_MHZ)
    assert (one.line_base.tolist(), two.line_base.tolist(), one.lines, two.lines) == ([0, 3], [3], 8, 8)
    second.tensor("Q", 4, 16, "own")
    with pytest.raises(ModelError, match="tensor 'Q' has 4 lines, before 3"):
        lower_all([first, second], TOY_MHZ)
