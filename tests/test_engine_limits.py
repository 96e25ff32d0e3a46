"""What a program must not do is refused, by both engines alike, and does not leak from one CTA into the next."""

from __future__ import annotations

import pytest
from programs import TOY_MHZ, both, kernel, log, outcome, toy_arch

from fasim.engine import compiled, reference
from fasim.errors import ModelError
from fasim.lowering.lower import lower
from fasim.program.language import Kernel


def test_a_copy_beyond_its_tensor():
    k = kernel(toy_arch(), tiles=3)
    tensor = k.tensor("X", 1, 512, "own", 1)
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        w.copy("load X", tensor, 512, "load")
    image = lower(k, TOY_MHZ)
    message = "operation 'load X': copies beyond the lines of its tensor (start column, step or lines)"
    assert outcome(reference, image) == outcome(compiled, image) == message


def test_roles_more_than_eight_tiles_apart():
    k = kernel(toy_arch(), tiles=20, mode="dynamic")
    with k.role("fast", warps=1, registers=24) as fast, fast.tiles(draws=True):
        fast.delay("work", 1)
    with k.role("slow", warps=1, registers=24) as slow, slow.tiles():
        slow.delay("work", 1000)
    with pytest.raises(ModelError, match="more than 8 work tiles apart"):
        compiled.run(lower(k, TOY_MHZ))


def multicast(tiles: int) -> Kernel:
    """Pairs of CTAs that fill one stage of each other; one CTA after the other in the same slot."""
    k = kernel(toy_arch("chip.sm_count=2", "launch.cta_dispatch_ns=0"), tiles=tiles, trips=2, cluster=2)
    ring = k.ring(k.tensor("X", 2, 512, "shared"), 1024, 1, consumers=1, multicast=True)
    with k.role("p", warps=1, registers=24) as p, p.tiles(), p.loop("trips"):
        p.load(ring)
    with k.role("c", warps=4, registers=24) as c, c.tiles(), c.loop("trips"):
        c.wait(ring)
        c.delay("use", 30)
        c.release(ring)
    return k


def test_arrivals_of_an_ended_cluster_do_not_reach_its_successor():
    """The remote release of the last stage is still under way when the CTAs end."""
    assert [line for line in log(multicast(4)) if "(empty)" in line] == [
        "109-364 SM0 p: wait X empty (empty)",
        "109-364 SM1 p: wait X empty (empty)",
        "591-780 SM0 p: wait X empty (empty)",  # as long but for the 60 of the L2 miss
        "591-780 SM1 p: wait X empty (empty)",
    ]


def test_stores_leave_an_sm_one_after_the_other():
    k = kernel(toy_arch())
    tensor = k.tensor("O", 8, 32768, "own", 1)
    with k.role("w", warps=1, registers=24) as w, w.tiles():
        for _ in range(8):
            w.copy("store", tensor, 32768, "store")
        w.wait_copies("store")
    egress = toy_arch().sm.tma.store_bytes_per_cycle
    assert both(k).ticks / 64 > 8 * 32768 / egress


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda r, k: r.wait_mma(8), "pending 8 is outside 0 to 7"),
        (lambda r, k: r.mma("none", m=64, n=64, k=16, count=-1), "an MMA group of -1 instructions"),
        (lambda r, k: r.copy("load X", k.tensors[0], 512, "load"), "operation 'load X': outside the loop over tiles"),
    ],
)
def test_verify_refuses(record, message):
    k = kernel(toy_arch())
    k.tensor("X", 1, 512, "own")
    with k.role("w", warpgroups=1, registers=24) as w:
        record(w, k)
        with w.tiles():
            w.delay("work", 1)
    with pytest.raises(ModelError) as error:
        lower(k, TOY_MHZ)
    assert message in str(error.value)
