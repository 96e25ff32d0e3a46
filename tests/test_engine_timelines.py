"""What every instruction does, to the cycle, on hand-made kernels. Both engines run each of them (``log``, ``both``).

The numbers are those of ``toy.toml``: CTAs start at 100, 110, ... and a load of 1024 bytes takes 4 at L2,
16 at HBM plus 60 for the miss, then 8 into the SM, and 100 on the way.
"""

from __future__ import annotations

import pytest
from programs import TOY_MHZ, both, cycles, kernel, log, toy_arch

from fasim.arch import Arch
from fasim.engine import compiled, reference
from fasim.engine.memory import COUNTERS, new_memory, next_launch
from fasim.errors import DeadlockError
from fasim.lowering.lower import lower
from fasim.program.language import Kernel, Ring
from fasim.results.reasons import REASONS


def ring_kernel(k: Kernel, ring: Ring) -> Kernel:
    """A producer and a consumer that uses every stage for 30 cycles."""
    with k.role("producer", warps=1, registers=24) as p, p.tiles(), p.loop("trips"):
        p.load(ring)
    with k.role("consumer", warps=4, registers=24) as c, c.tiles(), c.loop("trips"):
        c.wait(ring)
        c.delay("use", 30)
        c.release(ring)
    return k


def workers(k: Kernel, draws: bool = True) -> Kernel:
    """One warp that works 100 cycles for every trip of a tile."""
    with k.role("w", warps=1, registers=24) as w, w.tiles(draws=draws), w.loop("trips"):
        w.delay("work", 100)
    return k


# --- rings and turns ---------------------------------------------------------------------------------
def test_ring_of_one_stage():
    k = kernel(toy_arch(), trips=2)
    ring = k.ring(k.tensor("K", 1, 1024, "shared"), 1024, 1, consumers=1)
    assert log(ring_kernel(k, ring)) == [
        "100-105 producer: wait K empty (issue)",  # the first round passes: only the poll
        "100-299 consumer: wait K (full)",  # 105 + 16 HBM + 60 miss + 8 + 100 = 289, + 10 to wake
        "105-109 producer: load K (issue)",
        "105-113 tma: load K",
        "109-339 producer: wait K empty (empty)",  # released at 329, + 10 to wake
        "299-329 consumer: use (dependency)",
        "329-461 consumer: wait K (full)",  # a hit: 339 + 4 + 8 + 100 + 10
        "339-343 producer: load K (issue)",
        "339-347 tma: load K",
        "461-491 consumer: use (dependency)",
    ]


def test_ring_of_two_stages_runs_ahead():
    k = kernel(toy_arch(), trips=3)
    ring = k.ring(k.tensor("K", 1, 1024, "shared"), 1024, 2, consumers=1)
    assert log(ring_kernel(k, ring), units=False) == [
        "100-105 producer: wait K empty (issue)",
        "100-299 consumer: wait K (full)",
        "105-109 producer: load K (issue)",
        "109-114 producer: wait K empty (issue)",  # the second stage is free as well
        "114-118 producer: load K (issue)",  # the line is on its way: the hit waits for it, done at 289
        "118-339 producer: wait K empty (empty)",  # the first stage again
        "299-329 consumer: use (dependency)",
        "329-334 consumer: wait K (issue)",  # full already: only the poll
        "334-364 consumer: use (dependency)",
        "339-343 producer: load K (issue)",
        "364-461 consumer: wait K (full)",
        "461-491 consumer: use (dependency)",
    ]


def test_wait_that_is_not_polled_is_free():
    k = kernel(toy_arch())
    bar = k.barrier("ready", 1)
    ring = k.ring(k.tensor("K", 1, 1024, "shared"), 1024, 1, consumers=1)
    with k.role("producer", warps=1, registers=24) as p, p.tiles():
        p.load(ring)
        p.delay("until the data is there", 400, "launch")
        p.arrive(bar)
    with k.role("consumer", warps=4, registers=24) as c, c.tiles():
        c.wait_barrier(bar)
        c.wait(ring, polled=False)
        c.delay("use", 30)
        c.release(ring)
    assert log(k, units=False)[-2:] == [
        "109-509 producer: until the data is there (launch)",
        "519-549 consumer: use (dependency)",
    ]


def test_turns_pass_round_and_the_first_instance_begins():
    k = kernel(toy_arch())
    turn = k.turns("turn", 2)
    with k.role("wg", warpgroups=2, registers=24) as c, c.tiles(), c.loop(2):
        c.wait_barrier(turn, "own", label="turn")
        c.delay("mine", 20)
        c.arrive(turn, "next")
        c.delay("rest", 10)
    assert log(k) == [
        "100-120 wg0: mine (dependency)",
        "100-126 wg1: turn (barrier)",  # a named barrier wakes in 6
        "120-130 wg0: rest (dependency)",
        "126-146 wg1: mine (dependency)",
        "130-152 wg0: turn (barrier)",
        "146-156 wg1: rest (dependency)",
        "152-172 wg0: mine (dependency)",
        "156-178 wg1: turn (barrier)",
        "172-182 wg0: rest (dependency)",
        "178-198 wg1: mine (dependency)",
        "198-208 wg1: rest (dependency)",
    ]


def test_sync_waits_for_the_last_to_arrive():
    k = kernel(toy_arch())
    meet = k.barrier("meet", 2, named=True)
    with k.role("wg", warpgroups=2, registers=24) as c, c.tiles():
        with c.only(1):
            c.delay("late", 40)
        c.sync(meet, label="meet")
    assert log(k) == ["100-146 wg0: meet (barrier)", "100-140 wg1: late (dependency)"]  # the last one passes at once


# --- MMA and vector work -------------------------------------------------------------------------------
def test_a_full_mma_queue_blocks_at_issue():
    k = kernel(toy_arch())  # two in flight, 64 cycles each, 10 from the last multiply-add to the waiter
    with k.role("wg", warpgroups=1, registers=24) as c, c.tiles():
        c.mma("QK", m=64, n=128, k=16, count=4)
        c.wait_mma()
    assert log(k) == [
        "100-108 wg: QK (issue)",
        "100-164 tensor: QK",
        "108-116 wg: QK (issue)",
        "116-174 wg: QK (issue)",  # blocked until the first has drained
        "164-228 tensor: QK",
        "174-182 wg: QK (issue)",
        "182-238 wg: QK (issue)",
        "228-292 tensor: QK",
        "238-246 wg: QK (issue)",
        "246-366 wg: wait MMA (dependency)",  # 356 + 10
        "292-356 tensor: QK",
    ]


def test_waiting_for_all_but_the_newest_group():
    k = kernel(toy_arch())
    with k.role("wg", warpgroups=1, registers=24) as c, c.tiles():
        c.wait_mma()  # nothing committed: free
        c.mma("QK", m=64, n=128, k=16, count=1)
        c.mma("PV", m=64, n=128, k=16, count=1)
        c.wait_mma(1, "wait QK")
        c.wait_mma(0, "wait PV")
    assert log(k, units=False)[2:] == [
        "116-174 wg: wait QK (dependency)",
        "174-238 wg: wait PV (dependency)",
    ]


def test_operand_reads_bound_a_narrow_mma():
    k = kernel(toy_arch())  # m64n32k16: 16 cycles of math, (64 + 32) x 32 bytes / 128 = 24 of operands
    with k.role("wg", warpgroups=1, registers=24) as c, c.tiles():
        c.mma("SS", m=64, n=32, k=16, count=1)
        c.wait_mma()
        c.mma("RS", m=64, n=32, k=16, count=1, a="register")
    assert [line for line in log(k) if "tensor" in line] == ["100-124 tensor: SS", "134-150 tensor: RS"]


def test_commit_arrives_at_a_barrier():
    k = kernel(toy_arch())
    done = k.barrier("done", 1)
    with k.role("mma", warps=1, registers=24) as m, m.tiles():
        m.mma("QK", m=64, n=128, k=16, count=1, done=done)
    with k.role("softmax", warps=4, registers=24) as s, s.tiles():
        s.wait_barrier(done, reason="dependency", label="wait S")
        s.vector("exp", {"ex2": 2})
    assert log(k) == [
        "100-108 mma: QK (issue)",
        "100-174 softmax: wait S (dependency)",  # 164 + 10 completion, waking up included
        "100-164 tensor: QK",
        "174-190 softmax: exp (work)",
    ]


def test_a_pair_of_ctas_shares_one_mma():
    k = kernel(toy_arch("chip.sm_count=2", "launch.cta_dispatch_ns=0"), tiles=2, cluster=2)
    done = k.barrier("done", 2)
    with k.role("mma", warps=1, registers=24) as m, m.tiles():
        m.mma("QK", m=128, n=128, k=16, count=1, two_cta=True, done=done)
        m.wait_barrier(done, label="both")
    assert log(k) == [
        "100-108 SM0 mma: QK (issue)",
        "100-164 SM0 tensor: QK",
        "100-108 SM1 mma: QK (issue)",
        "100-164 SM1 tensor: QK",  # SM0's MMA occupies both tensor cores,
        "108-238 SM0 mma: both (barrier)",
        "108-238 SM1 mma: both (barrier)",
        "164-228 SM0 tensor: QK",  # then SM1's
        "164-228 SM1 tensor: QK",
    ]


def test_two_roles_alternate_on_a_pipe_chunk_by_chunk():
    k = kernel(toy_arch())  # 16 EX2 of 8 cycles: two chunks of 64
    with k.role("wg", warpgroups=2, registers=24) as c, c.tiles():
        c.vector("exp", {"ex2": 16})
    assert log(k) == [
        "100-164 wg0: exp (work)",
        "100-164 wg1: exp (pipe)",
        "164-228 wg0: exp (pipe)",
        "164-228 wg1: exp (work)",
        "228-292 wg0: exp (work)",
        "228-292 wg1: exp (pipe)",
        "292-356 wg1: exp (work)",
    ]


def test_different_pipes_do_not_collide():
    k = kernel(toy_arch())
    with k.role("a", warpgroups=1, registers=24) as a, a.tiles():
        a.vector("exp", {"ex2": 8})
    with k.role("b", warpgroups=1, registers=24) as b, b.tiles():
        b.vector("max", {"fmnmx": 8}, latency={"shfl": 1})
    # issue slots are shared: b's eight come after a's eight and end at 116, together with its ALU work
    assert log(k) == ["100-164 a: exp (work)", "100-116 b: max (work)", "116-140 b: max (dependency)"]


def interfering(**values: object) -> Arch:
    return toy_arch(*(f"sm.interference.{key}={value}" for key, value in values.items()))


def test_mma_and_vector_work_slow_each_other_down():
    k = kernel(interfering(alu_cycles=4, alu_port_cycles=4, ffma_port_cycles=1, ffma_delay_cycles=0.5))
    with k.role("wg", warpgroups=1, registers=24) as c, c.tiles():
        c.mma("QK", m=64, n=128, k=16, count=1)
        c.vector("max", {"fmnmx": 8})
        c.vector("scale", {"ffma": 8})
        c.mma("PV", m=64, n=128, k=16, count=1)
        c.wait_mma()
        c.vector("max", {"fmnmx": 8})
    assert log(k) == [
        "100-108 wg: QK (issue)",
        "100-164 tensor: QK",
        "108-140 wg: max (work)",  # 4 cycles an instruction
        "140-148 wg: scale (work)",
        "148-156 wg: PV (issue)",
        "156-242 wg: wait MMA (dependency)",
        "164-232 tensor: PV",  # 64 + 8 x 0.5
        "242-258 wg: max (work)",  # alone: 2 cycles
    ]


@pytest.mark.parametrize(
    ("absorbed", "ahead", "before", "after", "extra"),
    [
        (0, 0, 0, 0, 4),
        (0.125, 0, 0, 0, 3),  # 8 cycles of work absorb one
        (0.125, 0, 0, 24, 0),
        (0.125, 0, 16, 0, 3),  # nothing is absorbed in advance,
        (0.125, 80, 16, 0, 0),  # but for what can be ahead: 24 + 8 cycles make 4
        (0.125, 16, 16, 0, 1),
    ],
)
def test_a_running_mma_absorbs_delay(absorbed, ahead, before, after, extra):
    k = kernel(interfering(ffma_delay_cycles=0.5, absorbed_per_cycle=[absorbed], absorbed_ahead_cycles=ahead))
    with k.role("wg", warpgroups=1, registers=24) as c, c.tiles():
        c.mma("QK", m=64, n=128, k=16, count=1)  # goes on at 108
        c.delay("before", before)
        c.vector("scale", {"ffma": 8})  # 4 cycles owed, 8 cycles of work
        c.delay("after", after)
        c.mma("PV", m=64, n=128, k=16, count=1)
    assert log(k)[-1] == f"164-{228 + extra} tensor: PV"


def test_nothing_absorbs_fmul_between_exponentials():
    k = kernel(interfering(fmul_stop_cycles=0.5, absorbed_per_cycle=[1], absorbed_ahead_cycles=20))
    with k.role("wg", warpgroups=1, registers=24) as c, c.tiles():
        c.mma("QK", m=64, n=128, k=16, count=1)
        c.vector("exp, rescale", {"ex2": 1, "fmul": 8})
        c.mma("PV", m=64, n=128, k=16, count=1)
        c.wait_mma()
        c.vector("exp, rescale", {"ex2": 1, "fmul": 8})  # beside none
        c.mma("PV", m=64, n=128, k=16, count=1)
    assert log(k) == [
        "100-108 wg: QK (issue)",
        "100-164 tensor: QK",
        "108-117 wg: exp, rescale (work)",
        "117-125 wg: PV (issue)",
        "125-242 wg: wait MMA (dependency)",
        "164-232 tensor: PV",  # 64 + 8 x 0.5
        "242-251 wg: exp, rescale (work)",
        "251-259 wg: PV (issue)",
        "251-315 tensor: PV",
    ]


def test_result_latencies_stall_a_role_but_not_its_pipes():
    k = kernel(toy_arch("sm.issue.stall_cycles=0.5"))
    with k.role("wg", warpgroups=2, registers=24) as c, c.tiles():
        c.vector("exp", {"ex2": 16})  # two chunks of 8 instructions
    assert log(k) == [
        "100-164 wg0: exp (work)",
        "100-164 wg1: exp (pipe)",
        "164-168 wg0: exp (dependency)",
        "164-228 wg1: exp (work)",
        "168-228 wg0: exp (pipe)",
        "228-292 wg0: exp (work)",
        "228-232 wg1: exp (dependency)",
        "232-292 wg1: exp (pipe)",
        "292-296 wg0: exp (dependency)",
        "292-356 wg1: exp (work)",
        "356-360 wg1: exp (dependency)",
    ]


def test_mma_sync_shares_the_tensor_core_with_its_own_fma():
    k = kernel(toy_arch())
    with k.role("w", warpgroups=1, registers=24) as w, w.tiles():
        w.vector("hmma", {"ffma": 8}, mma_sync_flops=2048 * 40)
    assert log(k) == ["100-148 w: hmma (work)"]  # every FFMA stops the stream for a cycle


# --- memory --------------------------------------------------------------------------------------------
def test_l2_hit_miss_and_store():
    k = kernel(toy_arch())
    x = k.tensor("X", 1, 1024, "shared")
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        for _ in range(2):
            w.copy("load X", x, 1024, "load")
            w.wait_copies("load")
        w.copy("store X", x, 1024, "store")
        w.wait_copies("store")
    assert log(k) == [
        "100-104 w: load X (issue)",
        "100-108 tma: load X",
        "104-284 w: wait loads (memory)",  # 100 + 16 + 60 + 8 + 100
        "284-288 w: load X (issue)",
        "284-292 tma: load X",
        "288-396 w: wait loads (memory)",  # 284 + 4 + 8 + 100
        "396-400 w: store X (issue)",
        "400-492 w: wait stores (memory)",  # 396 + 16 at 64 B/cycle + 80: the source has been read
    ]
    assert counters(k) == dict(zip(COUNTERS, (2048, 1024, 1024, 0, 0, 2048, 1, 1), strict=True))


def counters(k: Kernel) -> dict[str, int]:
    return dict(zip(COUNTERS, both(k).memory.tolist(), strict=True))


def test_copies_by_threads_take_their_own_issue_and_latency():
    k = kernel(toy_arch())
    x = k.tensor("X", 1, 4096, "shared")
    with k.role("w", warps=4, registers=24) as w, w.tiles():
        w.copy("cp.async X", x, 4096, "load", "threads")  # two instructions of 4 cycles for each warp
        w.wait_copies("load")
    assert log(k, units=False) == [
        "100-108 w: cp.async X (issue)",
        "108-376 w: wait loads (memory)",  # 100 + 64 HBM + 60 + 32 into the SM + 90 L2 + 30
    ]


def test_reduce_takes_the_slower_l2_path_and_no_hbm():
    k = kernel(toy_arch(), trips=2)
    x = k.tensor("X", 2, 1024, "shared", 1)
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        w.copy("reduce X", x, 1024, "reduce")
        w.copy("load X", x, 1024, "load")  # another line; L2 is free at 116
        w.wait_copies("load")
    assert log(k, units=False)[-1] == "108-288 w: wait loads (memory)"  # 104 + 16 + 60 + 8 + 100


def test_a_dirty_line_goes_to_hbm_when_it_is_displaced():
    k = kernel(toy_arch("l2.capacity_bytes=2048"))
    x, y = k.tensor("X", 2, 1024, "shared", 1), k.tensor("Y", 2, 1024, "shared", 1)
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        for _ in range(2):
            w.copy("store X", x, 1024, "store")
        w.wait_copies("store")
        for _ in range(2):
            w.copy("load Y", y, 1024, "load")
        w.wait_copies("load")
    assert log(k, units=False)[2:] == [
        "108-212 w: wait stores (memory)",  # 100 + 2 x 16 out of the SM + 80; HBM is not used
        "212-216 w: load Y (issue)",
        "216-220 w: load Y (issue)",
        "220-428 w: wait loads (memory)",  # 212 + 16 + 16 for X0, + 16 + 60 + 8 + 100; X1 after it
    ]
    assert counters(k)["hbm_write_bytes"] == 2048


def test_a_store_waits_until_hbm_has_taken_what_it_displaces():
    k = kernel(toy_arch("l2.capacity_bytes=2048", "hbm.achieved_bytes_per_second=8e9"))
    x = k.tensor("X", 4, 1024, "shared", 1)
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        for _ in range(4):
            w.copy("store X", x, 1024, "store")
        w.wait_copies("store")
    # X0 is displaced at 108, X1 at 112: 2 x 128 at HBM, 80
    assert log(k, units=False)[-1] == "116-444 w: wait stores (memory)"
    assert counters(k)["hbm_write_bytes"] == 2048  # the last two stay


def test_the_next_launch_writes_what_the_last_one_left():
    for engine in (reference, compiled):
        memory, written = None, []
        for kind in ("store", "load"):
            k = kernel(toy_arch("l2.capacity_bytes=1024"))
            x, y = k.tensor("X", 1, 1024, "shared"), k.tensor("Y", 1, 1024, "shared")
            with k.role("w", warps=1, registers=24) as w, w.tiles():
                w.copy(kind, x if kind == "store" else y, 1024, kind)
                w.wait_copies(kind)
            image = lower(k, TOY_MHZ)
            memory = memory or new_memory(2, image.machine, image.slowest_line)
            raw = engine.run(image, memory=memory)
            written.append(dict(zip(COUNTERS, raw.memory.tolist(), strict=True))["hbm_write_bytes"])
            next_launch(memory)
        assert written == [0, 1024]


def loads_of(*lines: int, sms: int, capacity: int, partitions: int) -> dict[str, int]:
    """Counters of a work tile for each of ``lines``, in this order, by ``sms`` SMs in turn."""
    chip = (f"chip.sm_count={sms}", f"l2.capacity_bytes={capacity}", f"l2.partitions={partitions}")
    k = kernel(toy_arch(*chip), tiles=len(lines))
    k.tiles["own"][:] = lines
    x = k.tensor("X", max(lines) + 1, 1024, "own")
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        w.copy("load X", x, 1024, "load")
        w.wait_copies("load")
    return counters(k)


def test_each_side_fetches_once_what_belongs_to_the_other_partition():
    count = loads_of(0, 0, 0, 0, sms=4, capacity=2048, partitions=2)
    assert count["l2_far_bytes"] == 2 * 512
    assert count["sm_read_bytes"] == count["l2_read_bytes"] == 4096
    assert loads_of(0, 0, 0, 0, sms=4, capacity=2048, partitions=1)["l2_far_bytes"] == 0


def test_coalescers_merge_loads_while_the_first_waits_for_l2():
    def count(dispatch_ns: int) -> dict[str, int]:
        k = kernel(toy_arch("chip.sm_count=4", f"launch.cta_dispatch_ns={dispatch_ns}", "l2.coalescers=2"), tiles=4)
        x = k.tensor("X", 1, 1024, "shared")
        with k.role("w", warps=1, registers=24) as w, w.tiles():
            w.copy("load X", x, 1024, "load")
            w.wait_copies("load")
        return counters(k)

    # L2 serves SM 0 from 100 to 104 and SM 1, of another GPC, to 108; SM 2 asks at 102, SM 3 at 103
    close = count(1)
    assert close["l2_read_bytes"] == 2048
    assert close["sm_read_bytes"] == 4096
    assert close["hits"] == close["misses"] == 1
    assert count(4)["l2_read_bytes"] == 4096  # SM 2 asks at 108, when L2 has served SM 0


def test_a_copy_for_several_sms_of_a_side_takes_room():
    lines = (0, 0, 0, 0, 1, 2, 0)  # read by all, then by the third SM once more
    assert loads_of(*lines, sms=4, capacity=3072, partitions=1)["misses"] == 3
    assert loads_of(*lines, sms=4, capacity=3072, partitions=2)["misses"] == 4
    assert loads_of(*lines, sms=4, capacity=4096, partitions=2)["misses"] == 3
    assert loads_of(*lines, sms=1, capacity=3072, partitions=2)["misses"] == 3  # one reader needs no copy


def test_l2_forgets_the_least_recently_used_line():
    k = kernel(toy_arch("l2.capacity_bytes=2048"), tiles=5)
    k.tiles["own"][:] = [0, 1, 0, 2, 1]  # 2 evicts 1, not 0
    x = k.tensor("X", 3, 1024, "own")
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        w.copy("load X", x, 1024, "load")
        w.wait_copies("load")
    assert counters(k)["hits"] == 1
    k.tiles["own"][:] = [0, 1, 0, 2, 0]
    assert counters(k)["hits"] == 2


def test_chips_memory_serves_sms_in_their_order():
    k = kernel(toy_arch("chip.sm_count=2", "launch.cta_dispatch_ns=0"), tiles=2)
    x = k.tensor("X", 2, 1024, "own")
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        w.copy("load X", x, 1024, "load")
        w.wait_copies("load")
    assert log(k, units=False)[2:] == [
        "104-284 SM0 w: wait loads (memory)",
        "104-300 SM1 w: wait loads (memory)",  # 16 more behind SM0 at HBM
    ]


def test_a_copy_is_there_when_its_slowest_line_is():
    k = kernel(toy_arch(f"hbm.slowest_line_cycles={[0, 10, 20, 30, 40, 50, 60, 70, 80, 90]}"), trips=6)
    x = k.tensor("X", 6, 1024, "shared", 1)
    with k.role("w", warps=1, registers=24) as w, w.tiles(), w.loop("trips"):
        w.copy("load X", x, 1024, "load")
        w.wait_copies("load")
    waits = [line for line in log(k, units=False) if "wait" in line]
    assert waits == [  # 180 + what the line draws
        "104-284 w: wait loads (memory)",
        "288-468 w: wait loads (memory)",
        "472-672 w: wait loads (memory)",
        "676-856 w: wait loads (memory)",
        "860-1130 w: wait loads (memory)",
        "1134-1374 w: wait loads (memory)",
    ]


def test_a_line_on_its_way_is_not_fetched_twice():
    k = kernel(toy_arch("chip.sm_count=2", "launch.cta_dispatch_ns=0"), tiles=2)
    x = k.tensor("X", 1, 1024, "shared")
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        w.copy("load X", x, 1024, "load")
        w.wait_copies("load")
    assert log(k, units=False)[2:] == [
        "104-284 SM0 w: wait loads (memory)",
        "104-288 SM1 w: wait loads (memory)",  # L2 sends it to one after the other
    ]
    assert counters(k)["hbm_read_bytes"] == 1024


def test_cluster_multicast_fills_and_waits_for_both():
    k = kernel(toy_arch("chip.sm_count=2"), tiles=2, cluster=2, trips=2)
    ring = k.ring(k.tensor("K", 2, 1024, "own"), 1024, 1, consumers=1, multicast=True)
    ring_kernel(k, ring)
    assert log(k, sm=1) == log(k, sm=0)
    assert log(k, sm=0) == [
        "100-105 producer: wait K empty (issue)",
        "100-315 consumer: wait K (full)",  # 105 + 8 HBM each + 8 + 60 + 4 + 100 + 20 multicast + 10
        "105-109 producer: load K (issue)",
        "105-109 tma: load K",  # 512 bytes from either CTA into both
        "109-370 producer: wait K empty (empty)",  # 345 + 15 from the other CTA + 10
        "109-113 tma: load K",
        "315-345 consumer: use (dependency)",
        "345-508 consumer: wait K (full)",
        "370-374 producer: load K (issue)",
        "370-374 tma: load K",
        "374-378 tma: load K",
        "508-538 consumer: use (dependency)",
    ]


@pytest.mark.parametrize(("scope", "passes"), [("leader", (0,)), ("cluster", (0, 1)), ("cta", (1,))])
def test_arrive_reaches_the_ctas_of_its_scope(scope, passes):
    k = kernel(toy_arch("chip.sm_count=2"), tiles=2, cluster=2)
    k.tiles["second"] = k.tiles["own"].copy()  # one trip in the cluster's second CTA only
    bar = k.barrier("bar", 1)
    with k.role("sender", warps=1, registers=24) as s, s.tiles(), s.loop("second"):
        s.delay("send", 50)
        s.arrive(bar, scope=scope)
    with k.role("receiver", warps=1, registers=24) as r, r.tiles():
        r.wait_barrier(bar)
    image = lower(k, TOY_MHZ)
    if passes == (0, 1):
        assert cycles(k) == 175  # 100 + 50 + 15 to the other CTA + 10 to wake
        return
    with pytest.raises(DeadlockError) as stuck:
        both(k)
    with pytest.raises(DeadlockError) as again:
        compiled.run(image)
    (left,) = {0, 1} - set(passes)
    assert str(stuck.value) == str(again.value)
    assert str(stuck.value).endswith(
        f"\n  SM {left} receiver: waits for phase 1 of barrier 'bar' (0 complete) since cycle 100"
        "\n  who waits for whom: receiver waits for 'bar' of sender, which has ended"
    )


# --- work tiles and CTAs ---------------------------------------------------------------------------------
def test_one_tile_per_cta_and_the_turnover_between_them():
    k = workers(kernel(toy_arch("chip.sm_count=2"), tiles=5, trips=(3, 1, 1, 1, 1)), draws=False)
    assert [line for line in log(k) if "SM1" in line] == [
        "110-210 SM1 w: work (dependency)",
        "260-360 SM1 w: work (dependency)",  # 50 to turn over
        "410-510 SM1 w: work (dependency)",  # SM0 is still at the first
    ]
    assert cycles(k) == 550  # SM0: 100-400, then the fifth tile from 450


def test_static_tiles_ignore_who_is_free():
    k = workers(kernel(toy_arch("chip.sm_count=2"), tiles=5, trips=(3, 1, 1, 1, 1), mode="static"))
    assert [line.split()[0] for line in log(k) if "SM1" in line] == ["110-210", "210-310"]  # tiles 1 and 3
    assert cycles(k) == 600  # tiles 0, 2 and 4, without turnover


def test_dynamic_tiles_go_to_who_is_free():
    k = workers(kernel(toy_arch("chip.sm_count=2"), tiles=5, trips=(3, 1, 1, 1, 1), mode="dynamic"))
    assert [line.split()[0] for line in log(k) if "SM1" in line] == ["110-210", "210-310", "310-410"]
    assert cycles(k) == 500


def test_dynamic_tile_reaches_roles_that_wait_for_it():
    k = kernel(toy_arch(), tiles=2, mode="dynamic")
    with k.role("drawer", warps=1, registers=24) as d:
        d.delay("setup", 20, "launch")
        with d.tiles(draws=True):
            d.delay("look up", 30, "issue")
    with k.role("worker", warps=1, registers=24) as w, w.tiles():
        w.delay("work", 40)
    assert log(k) == [
        "100-120 drawer: setup (launch)",
        "100-126 worker: next tile (full)",  # drawn at 120, + 6 to wake
        "120-150 drawer: look up (issue)",
        "126-166 worker: work (dependency)",
        "150-180 drawer: look up (issue)",
        "166-206 worker: work (dependency)",  # drawn at 150
    ]


def test_two_ctas_share_an_sm():
    k = kernel(toy_arch(), tiles=3, max_ctas_per_sm=2)
    with k.role("w", warpgroups=1, registers=24) as w, w.tiles():
        w.vector("exp", {"ex2": 8})
    assert log(k) == [
        "100-164 slot0 w: exp (work)",
        "110-164 slot1 w: exp (pipe)",
        "164-228 slot1 w: exp (work)",
        "214-228 slot0 w: exp (pipe)",  # the third CTA, 50 after the first ended
        "228-292 slot0 w: exp (work)",
    ]


def test_every_tick_is_accounted_for():
    k = workers(kernel(toy_arch("chip.sm_count=2"), tiles=3), draws=False)
    raw = both(k)
    assert raw.ticks == 350 * 64  # SM0: 100-200 and 250-350, SM1: 110-210
    spent = dict(zip(REASONS, (raw.stalls[0] // 64).tolist(), strict=True))
    assert spent == {**dict.fromkeys(REASONS, 0), "dependency": 300, "launch": 100 + 110 + 50, "tail": 140}
    assert (raw.full_from, raw.full_until) == (110 * 64, 210 * 64)


def test_loops_nest_and_zero_trips_skip():
    k = kernel(toy_arch(), trips=0)
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        with w.loop("trips"):
            w.delay("never", 1000)
        with w.loop(2), w.loop(3):
            w.delay("inner", 1)
    raw = both(k)
    assert raw.ticks == 106 * 64
    assert raw.trace[:, 8].tolist() == [1, 2, 3, 5, 6, 7]  # iterations count entries of any loop of the tile


# --- deadlock --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", [reference, compiled])
def test_deadlock_names_role_barrier_phase_and_time(engine):
    k = kernel(toy_arch("chip.sm_count=3"), tiles=3, trips=2)
    ring = k.ring(k.tensor("K", 1, 1024, "shared"), 1024, 1, consumers=2)  # but only one consumer releases
    ring_kernel(k, ring)
    with pytest.raises(DeadlockError) as caught:
        engine.run(lower(k, TOY_MHZ))
    assert str(caught.value) == (
        "deadlock: nothing is left to do but these roles have not finished\n"
        "  SM 0 producer: waits for phase 1 of barrier 'K.empty' (0 complete) since cycle 109\n"
        "  SM 0 consumer: waits for phase 2 of barrier 'K.full' (1 complete) since cycle 329\n"
        "  who waits for whom: producer waits for 'K.empty' of consumer; consumer waits for 'K.full' of producer\n"
        "  and the same on 2 more SM groups"
    )


@pytest.mark.parametrize("engine", [reference, compiled])
def test_deadlock_without_a_role_that_draws(engine):
    k = workers(kernel(toy_arch(), mode="dynamic"), draws=False)
    with pytest.raises(DeadlockError, match=r"SM 0 w: waits for the tile scheduler since cycle 100$"):
        engine.run(lower(k, TOY_MHZ))
