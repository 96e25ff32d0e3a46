"""Operation x architecture -> demand, on the round numbers of the toy chip."""

from __future__ import annotations

import pytest
from programs import kernel, toy_arch

from fasim.arch import load_arch
from fasim.arch.instructions import INSTRUCTIONS
from fasim.engine import image as im
from fasim.errors import ConfigError
from fasim.lowering import cost
from fasim.lowering.lower import lower
from fasim.program.ops import Mma, Vector


def demand(mix, arch=None, warps=4, share=0.0, **options):
    op = Vector("op", mix, **options)
    return cost.vector_demand(op, arch or toy_arch(), warps, share)


def cycles_on(values):
    """Non-zero demand by pipe, in cycles."""
    return {name: ticks / im.TICKS for name, ticks in zip(im.PIPES, values.tolist(), strict=True) if ticks}


# --- vector work -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "pipe", "interval"),
    [("ffma", "fma", 1), ("imad", "fma", 2), ("fmnmx", "alu", 2), ("ex2", "mufu", 8), ("shfl", "lsu", 4)],
)
def test_interval_is_the_sub_cores_share_of_lanes(name, pipe, interval):
    assert cost.interval(toy_arch(), name) == interval
    assert cycles_on(demand({name: 3}).alone) == {"issue": 3, pipe: 3 * interval}


@pytest.mark.parametrize("arch", ["a100", "h100", "b200"])
def test_every_instruction_class_has_an_interval(arch):
    chip = load_arch(arch)
    for name in INSTRUCTIONS:
        if (name != "ffma2" or arch == "b200") and (name != "f2fp8" or arch != "a100"):
            assert cost.interval(chip, name) > 0


def test_warps_of_a_sub_core_add_up_and_a_lone_warp_leaves_sub_cores_idle():
    for warps, factor in ((1, 1), (4, 1), (8, 2), (12, 3)):
        assert cycles_on(demand({"ex2": 2}, warps=warps).alone) == {"issue": 2 * factor, "mufu": 16 * factor}
    assert cycles_on(demand({"ex2": 2}, warps=4, **{}).alone) == cycles_on(
        cost.vector_demand(Vector("op", {"ex2": 2}, warps=4), toy_arch(), 12, 0.0).alone
    )  # the operation's own width counts


def test_unknown_instruction():
    with pytest.raises(ConfigError, match="operation 'op': unknown instruction class 'fused'"):
        demand({"fused": 1})


def test_beside_an_mma():
    changes = {"alu_cycles": 4, "mufu_cycles": 10, "shuffle_cycles": 15}
    changes |= {
        "alu_port_cycles": 3,
        "fsel_port_cycles": 2,
        "mufu_port_cycles": 5,
        "ffma_port_cycles": 1,
        "fmul_port_cycles": 0.5,
        "fadd_port_cycles": 2,
    }
    arch = toy_arch(*(f"sm.interference.{key}={value}" for key, value in changes.items()))
    d = demand({"fmnmx": 2, "f2fp": 1, "ex2": 3, "ffma": 4, "fmul": 2, "fadd": 1, "shfl": 1, "fsel": 1}, arch)
    assert cycles_on(d.alone) == {"issue": 15, "alu": 8, "mufu": 24, "fma": 7, "lsu": 4}
    port = 3 * 3 + 2 + 3 * 5 + 4 * 1 + 2 * 0.5 + 2
    assert cycles_on(d.beside) == {"issue": 15, "alu": 16, "mufu": 30, "fma": 7, "lsu": 15, "port": port}


def test_exponentials_of_others_wait_while_the_port_sets_the_pace():
    changes = {"ffma_port_cycles": 4, "alu_port_cycles": 4, "fsel_port_cycles": 0.5}
    changes |= {"ex2_wait_cycles": 1, "ex2_wait_ffma_cycles": 2}
    arch = toy_arch(*(f"sm.interference.{key}={value}" for key, value in changes.items()))

    def mufu(**mix: float) -> float:
        return cycles_on(demand(mix, arch).beside).get("mufu", 0)

    assert mufu(ffma=10) == 20 and mufu(fmnmx=10) == 10
    assert mufu(fsel=10) == 5  # no longer than its port is busy
    assert mufu(ffma=10, ex2=2) == 16 + 20
    assert mufu(ffma=10, ex2=4) == 40  # no longer than the port is busy
    assert mufu(ffma=10, ex2=6) == 48  # exponentials set the pace: others find gaps


def test_a_chain_of_maxima_is_paced_by_its_latency():
    arch = toy_arch("sm.alu.latency_cycles=5", "sm.issue.stall_cycles=0.25", "sm.interference.alu_port_cycles=4")
    for chain, stall in ((0, (2.5, 2.5)), (4, (2.5, 2.5)), (10, (50 - 20, 50 - 40))):
        assert demand({"fmnmx": 10}, arch, chain=chain).stall == tuple(round(s * im.TICKS) for s in stall)


def test_slowing_is_in_proportion_to_the_pipes_interval():
    arch = toy_arch("sm.alu.convert_ops_per_cycle=32", "sm.interference.alu_cycles=4")
    assert cycles_on(demand({"f2fp": 1}, arch).beside)["alu"] == 8  # 4 x 4/2


def test_delay_of_the_mma_by_instruction_class():
    values = {"ffma_delay_cycles": 1, "fmul_delay_cycles": 0.5, "fadd_delay_cycles": 2, "alu_delay_cycles": 0.25}
    arch = toy_arch(*(f"sm.interference.{key}={value}" for key, value in (values | {"fmul_stop_cycles": 3}).items()))
    run = demand({"ffma": 3, "fmul": 2, "fadd": 2, "fmnmx": 4, "misc": 5}, arch)
    assert (run.mma_delay, run.mma_stop) == (9 * im.TICKS, 0)
    between = demand({"fmul": 2, "ex2": 7}, arch)  # nothing absorbs FMUL that go out between exponentials
    assert (between.mma_delay, between.mma_stop) == (0, 6 * im.TICKS)
    assert demand({"ffma": 3}, load_arch("b200")).mma_delay == 0  # no interference on Blackwell


def test_stall_is_per_instruction():
    arch = toy_arch("sm.issue.stall_cycles=0.25")
    assert demand({"ffma": 4, "ex2": 4, "misc": 9}, arch).stall == (2 * im.TICKS, 2 * im.TICKS)
    assert demand({"ffma": 8}, arch, warps=8).stall == (2 * im.TICKS, 2 * im.TICKS)  # a warp's own


def test_shared_memory_gets_what_the_mma_leaves():
    d = demand({"lds": 1}, share=0.75, smem_bytes=1280)
    assert cycles_on(d.alone)["smem"] == 10
    assert cycles_on(d.beside)["smem"] == 40


def test_tensor_memory():
    sm = load_arch("b200").sm
    d = demand({}, load_arch("b200"), tmem_load_bytes=65536, tmem_store_bytes=32768)
    assert cycles_on(d.alone)["tmem"] == pytest.approx(
        65536 / sm.tmem.load_bytes_per_cycle + 32768 / sm.tmem.store_bytes_per_cycle, abs=1 / im.TICKS
    )


def test_synchronous_mma_is_stopped_by_its_own_vector_work():
    d = demand({"ffma": 8, "fmnmx": 2}, mma_sync_flops=2048 * 40)
    assert cycles_on(d.alone) == {"issue": 10, "fma": 8, "alu": 4, "port": 48, "tensor": 40}


def test_exposed_latencies_add():
    arch = toy_arch("sm.interference.shuffle_latency_cycles=100")
    alone, beside = demand({}, arch, latency={"shfl": 2, "ex2": 1, "smem": 0.5}).latency
    assert (alone, beside) == ((2 * 24 + 20 + 15) * im.TICKS, (2 * 100 + 20 + 15) * im.TICKS)


# --- MMA -----------------------------------------------------------------------------------------------------
def mma(**options):
    values = {"m": 64, "n": 128, "k": 16, "count": 1, **options}
    return Mma("mma", **values)


@pytest.mark.parametrize("n", [8, 16, 32, 64, 128, 192, 256])
def test_wgmma_law(n):
    """max(N/2, 16 + N/4) cycles for m64nNk16 with both operands in shared memory, N/2 with A in registers."""
    arch = toy_arch()
    assert cost.mma_demand(mma(n=n), arch).tensor == max(n / 2, 16 + n / 4)
    assert cost.mma_demand(mma(n=n, a="register"), arch).tensor == n / 2


def test_rate_goes_by_dtype_and_overhead_by_instruction():
    arch = load_arch("h100", ("sm.tensor.async_mma.overhead_cycles=2",))
    assert cost.mma_demand(mma(), arch).tensor == 66
    assert cost.mma_demand(mma(k=32, dtype="fp8"), arch).tensor == 66  # twice the rate at twice the k


def test_a_pair_of_ctas_halves_math_and_operands():
    arch = load_arch("b200")
    one = cost.mma_demand(mma(m=128, n=256), arch)
    pair = cost.mma_demand(mma(m=256, n=256, two_cta=True), arch)
    assert pair.tensor == one.tensor  # each SM does its 128 rows
    assert pair.smem == one.smem - 256 * 16 * 2 / 2 / arch.sm.smem.bytes_per_cycle  # and reads half of B


def test_port_share():
    arch = toy_arch()
    assert cost.mma_port_share([], arch) == 0
    assert cost.mma_port_share([mma(a="register")], arch) == 0.5  # 4096 bytes of 64 x 128
    assert cost.mma_port_share([mma(n=8, count=100)], arch) == 0.9  # something is left for the others


def test_absorption_is_linear_in_between_and_constant_outside():
    arch = toy_arch("sm.interference={mma_n = [64, 128], absorbed_per_cycle = [0.0, 0.2]}")
    values = [cost.mma_absorption(mma(n=n), arch) for n in (32, 64, 96, 128, 256)]
    assert values == pytest.approx([0, 0, 0.1, 0.2, 0.2])
    assert cost.mma_absorption(mma(), load_arch("b200")) == 0


# --- chunks --------------------------------------------------------------------------------------------------
def test_chunks_are_equal_and_about_64_cycles():
    assert [cost.chunk_count(cycles * im.TICKS, 64.0) for cycles in (0, 1, 64, 65, 128, 1000)] == [1, 1, 1, 2, 2, 16]
    k = kernel(toy_arch())
    with k.role("w", warpgroups=1, registers=24) as w, w.tiles():
        w.vector("exp", {"ex2": 100, "ffma": 200})
    image = lower(k, 1000.0)
    (work,) = image.code[image.code[:, im.K_KIND] == im.WORK]
    assert work[im.W_CHUNKS] == 13  # 800 cycles of MUFU
    chunk = image.demand[work[im.W_DEMAND], 0]
    assert 13 * chunk[im.P_MUFU] == pytest.approx(800 * im.TICKS, abs=13 / 2)
    assert 13 * chunk[im.P_FMA] == pytest.approx(200 * im.TICKS, abs=13 / 2)


def test_ticks_are_to_the_nearest():
    assert [cost.ticks(c) for c in (0, 1, 4.4, 10.7)] == [0, 64, 282, 685]
