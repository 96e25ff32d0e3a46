"""What released every slice, on hand-made kernels; after ``<-`` stands the slice recorded as the cause.

Both engines run each of them and must record the same; the times are explained in ``test_engine_timelines.py``.
"""

from __future__ import annotations

import numpy as np
from programs import TOY_MHZ, kernel, log, outcome, toy_arch

from fasim.arch import load_arch
from fasim.engine import compiled, reference
from fasim.engine import image as im
from fasim.engine.common import TraceWindow
from fasim.lowering.lower import lower
from fasim.problem import Problem
from fasim.program.language import Kernel
from fasim.studies.simulate import TraceSpec, simulate


def test_a_load_that_lands_and_a_stage_that_is_released():
    k = kernel(toy_arch(), trips=2)
    ring = k.ring(k.tensor("K", 1, 1024, "shared"), 1024, 1, consumers=1)
    with k.role("producer", warps=1, registers=24) as p, p.tiles(), p.loop("trips"):
        p.load(ring)
    with k.role("consumer", warps=4, registers=24) as c, c.tiles(), c.loop("trips"):
        c.wait(ring)
        c.delay("use", 30)
        c.release(ring)
    assert log(k, causes=True) == [
        "100-105 producer: wait K empty (issue)",
        "100-299 consumer: wait K (full) <- 105-113 tma: load K",
        "105-109 producer: load K (issue)",
        "105-113 tma: load K <- 100-105 producer: wait K empty (issue)",  # the issue, not what it waited for
        "109-339 producer: wait K empty (empty) <- 299-329 consumer: use (dependency)",
        "299-329 consumer: use (dependency)",
        "329-461 consumer: wait K (full) <- 339-347 tma: load K",
        "339-343 producer: load K (issue)",
        "339-347 tma: load K <- 109-339 producer: wait K empty (empty)",
        "461-491 consumer: use (dependency)",
    ]


def test_the_last_to_arrive_releases_everybody():
    k = kernel(toy_arch())
    meet = k.barrier("meet", 3, named=True)
    with k.role("wg", warpgroups=3, registers=24) as c, c.tiles():
        with c.only(1):
            c.delay("late", 40)
        with c.only(2):
            c.delay("later", 60)
        c.sync(meet, label="meet")
    assert log(k, causes=True) == [
        "100-166 wg0: meet (barrier) <- 100-160 wg2: later (dependency)",
        "100-140 wg1: late (dependency)",
        "100-160 wg2: later (dependency)",
        "140-166 wg1: meet (barrier) <- 100-160 wg2: later (dependency)",
    ]


def test_an_arrival_from_another_sm():
    k = kernel(toy_arch("chip.sm_count=2", "launch.cta_dispatch_ns=0"), tiles=2, cluster=2)
    go = k.barrier("go", 2)
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        w.delay("start", 4)
        w.arrive(go, scope="cluster")
        w.wait_barrier(go, label="go")
    assert log(k, causes=True) == [
        "100-104 SM0 w: start (dependency)",
        "100-104 SM1 w: start (dependency)",
        "104-129 SM0 w: go (barrier) <- 100-104 SM1 w: start (dependency)",
        "104-129 SM1 w: go (barrier) <- 100-104 SM0 w: start (dependency)",
    ]


def test_a_full_queue_and_the_end_of_a_group_of_mma():
    k = kernel(toy_arch())  # two in flight for each warpgroup
    with k.role("wg", warpgroups=2, registers=24) as c, c.tiles():
        c.delay("start", 4)
        c.mma("QK", m=64, n=128, k=16, count=3)
        c.wait_mma()
    assert log(k, causes=True) == [
        "100-104 wg0: start (dependency)",
        "100-104 wg1: start (dependency)",
        "104-112 wg0: QK (issue)",
        "104-112 wg1: QK (issue)",
        "104-168 tensor: QK <- 100-104 wg0: start (dependency)",
        "112-120 wg0: QK (issue)",
        "112-120 wg1: QK (issue)",
        "120-178 wg0: QK (issue) <- 104-168 tensor: QK",
        "120-242 wg1: QK (issue) <- 168-232 tensor: QK",
        "168-232 tensor: QK <- 100-104 wg1: start (dependency)",
        "178-186 wg0: QK (issue)",
        "186-434 wg0: wait MMA (dependency) <- 360-424 tensor: QK",
        "232-296 tensor: QK <- 104-112 wg0: QK (issue)",
        "242-250 wg1: QK (issue)",
        "250-498 wg1: wait MMA (dependency) <- 424-488 tensor: QK",
        "296-360 tensor: QK <- 104-112 wg1: QK (issue)",
        "360-424 tensor: QK <- 120-178 wg0: QK (issue)",
        "424-488 tensor: QK <- 120-242 wg1: QK (issue)",
    ]


def test_a_commit_arrives_for_its_mma_or_for_its_role_where_that_is_done():
    k = kernel(toy_arch())
    ready = k.barrier("ready", 1)
    with k.role("mma", warps=1, registers=24) as m, m.tiles():
        m.delay("start", 4)
        m.mma("QK", m=64, n=128, k=16, count=1, done=ready)
        m.delay("longer", 200)
        m.mma("nothing", m=64, n=128, k=16, count=0, done=ready)
    with k.role("softmax", warps=4, registers=24) as s, s.tiles():
        s.wait_barrier(ready, reason="dependency", label="wait S")
        s.wait_barrier(ready, reason="dependency", label="wait O")
    assert log(k, causes=True) == [
        "100-104 mma: start (dependency)",
        "100-178 softmax: wait S (dependency) <- 104-168 tensor: QK",
        "104-112 mma: QK (issue)",
        "104-168 tensor: QK <- 100-104 mma: start (dependency)",
        "112-312 mma: longer (dependency)",
        "178-322 softmax: wait O (dependency) <- 112-312 mma: longer (dependency)",
    ]


def test_a_pair_of_ctas_sees_its_mma_on_its_own_sm():
    k = kernel(toy_arch("chip.sm_count=2", "launch.cta_dispatch_ns=0"), tiles=2, cluster=2)
    done = k.barrier("done", 2)
    with k.role("mma", warps=1, registers=24) as m, m.tiles():
        m.delay("start", 4)
        m.mma("QK", m=128, n=128, k=16, count=1, two_cta=True, done=done)
        m.wait_barrier(done, label="both")
    assert log(k, causes=True) == [
        "100-104 SM0 mma: start (dependency)",
        "100-104 SM1 mma: start (dependency)",
        "104-112 SM0 mma: QK (issue)",
        "104-168 SM0 tensor: QK <- 100-104 SM0 mma: start (dependency)",
        "104-112 SM1 mma: QK (issue)",
        "104-168 SM1 tensor: QK <- 100-104 SM0 mma: start (dependency)",
        "112-242 SM0 mma: both (barrier) <- 168-232 SM0 tensor: QK",
        "112-242 SM1 mma: both (barrier) <- 168-232 SM1 tensor: QK",
        "168-232 SM0 tensor: QK <- 100-104 SM1 mma: start (dependency)",
        "168-232 SM1 tensor: QK <- 100-104 SM1 mma: start (dependency)",
    ]


def test_work_queues_for_a_pipe_behind_who_has_it():
    k = kernel(toy_arch())
    with k.role("wg", warpgroups=2, registers=24) as c, c.tiles():
        c.vector("exp", {"ex2": 16})
    with k.role("other", warpgroups=1, registers=24) as c, c.tiles():
        c.vector("max", {"fmnmx": 8})  # on another pipe, but the chunks at 100 had the issue slots first
    assert log(k, causes=True) == [
        "100-164 wg0: exp (work)",
        "100-164 wg1: exp (pipe) <- 100-164 wg0: exp (work)",
        "100-108 other: max (pipe) <- 164-228 wg1: exp (work)",  # reserved at 100 with everything that chunk uses
        "108-124 other: max (work)",
        "164-228 wg0: exp (pipe) <- 164-228 wg1: exp (work)",
        "164-228 wg1: exp (work)",
        "228-292 wg0: exp (work)",
        "228-292 wg1: exp (pipe) <- 228-292 wg0: exp (work)",
        "292-356 wg1: exp (work)",
    ]


def test_own_copies_and_the_turn_at_the_tma():
    k = kernel(toy_arch())
    x = k.tensor("X", 1, 1024, "shared")
    with k.role("w", warps=1, count=2, registers=24) as w, w.tiles():
        w.delay("start", 4)
        w.copy("load X", x, 1024, "load")
        w.wait_copies("load")
        w.copy("store X", x, 1024, "store")
        w.delay("meanwhile", 10)
        w.wait_copies("store")
    assert log(k, causes=True) == [
        "100-104 w0: start (dependency)",
        "100-104 w1: start (dependency)",
        "104-108 w0: load X (issue)",
        "104-112 w1: load X (issue) <- 104-108 w0: load X (issue)",  # the TMA takes one after the other
        "104-112 tma: load X <- 100-104 w0: start (dependency)",
        "108-288 w0: wait loads (memory) <- 104-112 tma: load X",
        "112-292 w1: wait loads (memory) <- 112-120 tma: load X",
        "112-120 tma: load X <- 100-104 w1: start (dependency)",
        "288-292 w0: store X (issue)",
        "292-302 w0: meanwhile (dependency)",
        "292-296 w1: store X (issue)",
        "296-306 w1: meanwhile (dependency)",
        "302-384 w0: wait stores (memory) <- 288-292 w0: store X (issue)",  # a store has no track of its own
        "306-400 w1: wait stores (memory) <- 292-296 w1: store X (issue)",
    ]


def test_a_tile_that_is_drawn():
    k = kernel(toy_arch(), tiles=2, mode="dynamic")
    with k.role("drawer", warps=1, registers=24) as d:
        d.delay("setup", 20, "launch")
        with d.tiles(draws=True):
            d.delay("look up", 30, "issue")
    with k.role("worker", warps=1, registers=24) as w, w.tiles():
        w.delay("work", 40)
    assert log(k, causes=True)[1] == "100-126 worker: next tile (full) <- 100-120 drawer: setup (launch)"


def handing_over() -> Kernel:
    k = kernel(toy_arch())
    go = k.barrier("go", 1)
    with k.role("a", warps=1, registers=24) as a, a.tiles():
        a.delay("first", 30)
        a.delay("second", 30)
        a.arrive(go)
    with k.role("b", warps=1, registers=24) as b, b.tiles():
        b.wait_barrier(go, label="go")
    return k


def test_a_cause_that_is_not_kept_is_none():
    """A full buffer: of the two slices before the arrival only the first is kept, and it did not release anybody."""
    image = lower(handing_over(), TOY_MHZ)
    assert log(handing_over(), causes=True)[1] == "100-170 b: go (barrier) <- 130-160 a: second (dependency)"
    for first, last, limit in ((0, 2000, 1), (165, 2000, 100)):
        window = TraceWindow((0,), (first * im.TICKS, last * im.TICKS), limit)
        kept = outcome(compiled, image, window)
        assert isinstance(kept, dict)
        assert kept == outcome(reference, image, window)
        assert [row[im.T_CAUSE] for row in kept["trace"]] == [im.NO_CAUSE]


def test_causes_stay_with_their_launch():
    """The rows of a second kernel are counted behind those of the first."""
    problem = Problem(batch=1, seqlen_q=256, heads_q=1, head_dim=64)
    run = simulate("naive", problem, load_arch("h100", ("chip.sm_count=4",)), trace=TraceSpec())
    trace = run.trace
    assert trace is not None and len(run.meta["kernels"]) > 1
    later = np.flatnonzero(trace.cause >= 0)
    cause = trace.cause[later]
    ends = np.cumsum(run.meta["kernel_cycles"]) * trace.ticks_per_cycle
    launch = [np.searchsorted(ends, trace.start[rows], side="right") for rows in (later, cause)]
    assert set(launch[0].tolist()) == set(range(len(ends)))
    assert np.array_equal(*launch)
    assert np.all(trace.start[cause] < trace.end[later])
