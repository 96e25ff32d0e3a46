"""Execution on values: the observer changes nothing, and what storage, copies and MMA queues do, on small programs."""

from __future__ import annotations

import numpy as np
import pytest
from programs import TOY_MHZ, comparable, everything, toy_arch

from fasim.arch import load_arch
from fasim.checker import Arrays, Log, ValueMachine
from fasim.engine import reference
from fasim.errors import ModelError
from fasim.lowering.lower import lower_program
from fasim.problem import Problem
from fasim.program.effects import (
    ArrayRegion,
    Clear,
    Layout,
    Load,
    Matmul,
    Move,
    Normalise,
    Probabilities,
    Rescale,
    Resume,
    ResumeOutput,
    RowMax,
    RowSum,
    Store,
    Syncthreads,
    row_blocks,
)
from fasim.program.language import Kernel
from fasim.program.library import load_schedule
from fasim.program.tiles import Register, Smem, Tmem

SIZE = 16  # rows and columns of the matrices


def execute(k, **inputs):
    """Global arrays after ``k``, what was found, and whether values had to stop."""
    image, ops = lower_program(k, TOY_MHZ)
    log, arrays = Log(), Arrays(inputs)
    machine = ValueMachine(k, image, ops, arrays, log)
    reference.run(image, observer=machine)
    machine.finish()
    return arrays.data, [finding.message for finding in log.findings], machine.broken


def kernel(arch=None, tiles=1, **options):
    k = Kernel("toy", Problem(), arch or toy_arch(), {}, **{"max_ctas_per_sm": 1, **options})
    k.tiles = {"own": np.arange(tiles, dtype=np.int64)}
    return k


def matrix(seed, rows=SIZE):
    return np.random.default_rng(seed).standard_normal((rows, SIZE), np.float32)


def blocks(k, name, start="own", step=0, rows=SIZE, lines=None):
    lines = lines or k.tile_count
    layout = row_blocks(1, lines * rows, rows, SIZE)
    return k.tensor(name, lines, 4 * rows * SIZE, start, step, layout)


# --- nothing changes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [{}, {"causal": True, "head_dim": 64}, {"seqlen_q": 4, "heads_kv": 1}])
def test_a_run_that_is_observed_is_the_same_run(shape):
    problem = Problem(**{"batch": 1, "seqlen_q": 512, "heads_q": 2, **shape})
    (k,) = load_schedule("fa3").build(problem, load_arch("h100", ("chip.sm_count=2",)), {})
    image, ops = lower_program(k, 1500.0)
    shapes = {"Q": 2 * problem.seqlen_q, "K": problem.heads_kv * problem.seqlen_k}
    arrays = Arrays({name: np.ones((rows, problem.head_dim), np.float32) for name, rows in shapes.items()})
    arrays.data["V"] = arrays.data["K"]
    machine = ValueMachine(k, image, ops, arrays, Log())
    alone = reference.run(image, everything(image))
    observed = reference.run(image, everything(image), None, machine)
    assert comparable(alone) == comparable(observed)
    assert not machine.broken


# --- copies, rings and rows ------------------------------------------------------------------------------
def copy_through_ring(k, *, wait=True, release=True):
    """Every tile's block goes through a ring of two stages, and its halves through two instances of a role."""
    ring = k.ring(blocks(k, "X"), 4 * SIZE * SIZE, 2, consumers=2)
    out = k.tensor("Y", k.tile_count, 4 * SIZE * SIZE, "own", 0, row_blocks(1, k.tile_count * SIZE, SIZE, SIZE))
    with k.role("producer", warps=1, registers=24) as p, p.tiles():
        p.load(ring)
    with k.role("consumer", warps=4, count=2, registers=24) as c, c.tiles():
        if wait:
            c.wait(ring)
        else:
            c.wait(ring, polled=False)
        c.vector("take", {"alu": 4}, effects=(Move(Smem("X"), "x"), Store("x", out.name)))
        if release:
            c.release(ring)
    return k


def test_instances_own_their_rows():
    x = matrix(0, 4 * SIZE)
    data, found, _ = execute(copy_through_ring(kernel(tiles=4, mode="static")), X=x)
    assert found == []
    np.testing.assert_array_equal(data["Y"], x)


def test_a_copy_that_was_not_waited_for_is_a_race_though_it_has_landed():
    data, found, _ = execute(copy_through_ring(kernel(tiles=4, mode="static"), wait=False), X=matrix(0, 4 * SIZE))
    assert len(data["Y"]) == 4 * SIZE
    assert "reads X[0] that producer 'load X'" in found[0]
    assert found[0].endswith("no wait for the copy to land; in this run they are apart by luck")


@pytest.mark.parametrize("wait", [True, False])
def test_copies_by_threads_are_waited_for_by_their_role(wait):
    k = kernel(tiles=3, mode="static")
    x, y = (blocks(k, name) for name in "XY")
    k.smem("X", 4 * SIZE * SIZE)
    with k.role("r", warps=4, registers=24) as r, r.tiles():
        r.copy("load X", x, x.line_bytes, "load", "threads", effects=(Load(Smem("X")),))
        if wait:
            r.wait_copies("load")
        r.vector("take", {"alu": 4}, effects=(Move(Smem("X"), "x"),))
        r.copy("store Y", y, y.line_bytes, "store", "threads", effects=(Store("x"),))
    data, found, broken = execute(k, X=matrix(0, 3 * SIZE))
    if wait:
        assert found == []
        np.testing.assert_array_equal(data["Y"], matrix(0, 3 * SIZE))
    else:
        assert broken
        assert found[0].startswith("r 'take' (cycle ") and found[0].endswith("no wait for the copy to land")


WHOLE = (0, 1)


@pytest.mark.parametrize(
    ("written", "read", "barrier", "found"),
    [
        (None, None, False, 0),  # a warp's own rows
        (WHOLE, None, False, 1),
        (None, WHOLE, False, 1),
        (WHOLE, WHOLE, False, 1),
        (WHOLE, WHOLE, True, 0),
        (None, WHOLE, True, 0),
    ],
)
def test_warps_know_of_each_other_from_the_next_barrier_on(written, read, barrier, found):
    k = kernel(tiles=2, mode="static")
    x, y = (blocks(k, name) for name in "XY")
    k.smem("X", 4 * SIZE * SIZE)
    meet = (Syncthreads(),)
    with k.role("r", warps=4, registers=24) as r, r.tiles():
        r.delay("last tile read", 4, effects=meet)
        r.copy("load X", x, x.line_bytes, "load", "threads", effects=(Load("x"),))
        r.wait_copies("load")
        r.vector("put", {"alu": 4}, effects=(Move("x", Smem("X", share=written)),))
        r.delay("barrier", 4, effects=meet if barrier else ())
        r.vector("take", {"alu": 4}, effects=(Move(Smem("X", share=read), "y"),))
        r.copy("store Y", y, y.line_bytes, "store", "threads", effects=(Store("y"),))
    data, races, _ = execute(k, X=matrix(0, 2 * SIZE))
    assert len(races) == found and all("no barrier of the warps between" in text for text in races)
    np.testing.assert_array_equal(data["Y"], matrix(0, 2 * SIZE))


def test_copies_of_a_roles_own_threads_are_known_to_all_warps_from_the_next_barrier_on():
    def found(barrier, engine):
        k = kernel()
        x = blocks(k, "X")
        k.smem("X", 4 * SIZE * SIZE)
        with k.role("r", warps=4, registers=24) as r, r.tiles():
            r.delay("begin", 4, effects=(Syncthreads(),))
            r.copy("load X", x, x.line_bytes, "load", engine, effects=(Load(Smem("X")),))
            r.wait_copies("load")
            r.delay("barrier", 4, effects=(Syncthreads(),) if barrier else ())
            r.vector("take", {"alu": 4}, effects=(Move(Smem("X"), "x"),))
        return len(execute(k, X=matrix(0))[1])

    assert [found(barrier, "threads") for barrier in (False, True)] == [1, 0]
    assert found(False, "tma") == 0  # whose mbarrier every warp waits for


def test_a_softmax_resumed_from_its_output_and_log_sum_exp_is_the_whole_softmax():
    scores, values = matrix(0), matrix(1)
    k = kernel()
    tensors = {name: blocks(k, name) for name in ("S", "V")}
    layout = row_blocks(1, SIZE, SIZE, SIZE)
    out = k.tensor("O", 1, 4 * SIZE * SIZE, "own", 0, layout)

    def part(r, half):
        share = half / 2, (half + 1) / 2
        r.vector("max", {"alu": 4}, effects=(Move(Register("S", share=share), "s"), RowMax("s")))
        r.vector("exp", {"alu": 4}, effects=(Probabilities("s", Register("P", share=share)),))
        r.vector("sum", {"alu": 4}, effects=(RowSum(Register("P", share=share)), Rescale("O")))
        r.vector("PV", {"alu": 4}, effects=(Matmul("O", Register("P", share=share), "V", add=True), Normalise("O")))

    with k.role("r", warps=4, registers=24) as r, r.tiles():
        for name, tensor in tensors.items():
            r.copy(f"load {name}", tensor, tensor.line_bytes, "load", "threads", effects=(Load(name),))
        r.wait_copies("load")
        part(r, 0)
        r.vector("forget", {"alu": 4}, effects=(Clear("m"), Clear("l"), Resume("lse"), ResumeOutput("O", "lse")))
        part(r, 1)
        r.copy("store O", out, out.line_bytes, "store", "threads", effects=(Store("O"), Store("lse", array="LSE")))
    data, found, _ = execute(k, S=scores, V=values)
    assert found == []
    weights = np.exp(scores / np.sqrt(k.problem.head_dim))
    total = weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(data["O"], weights @ values / total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(data["LSE"], np.log(total), rtol=1e-5)


def test_effects_of_a_wait_come_after_it():
    k = kernel()
    bar = k.barrier("bar", 1)
    tensors = [blocks(k, name) for name in "XY"]
    ring = k.ring(tensors[0], 64, 1, consumers=1)
    with k.role("writer", warps=4, registers=24) as r, r.tiles():
        r.load(ring)
        r.wait(ring)
        r.vector("take", {"alu": 4}, effects=(Move(Smem("X"), "x"), Move("x", Smem("copy"))))
        r.release(ring)
        r.arrive(bar)
    k.smem("copy", 64)
    with k.role("reader", warps=4, registers=24) as r, r.tiles():
        r.wait_barrier(bar, effects=(Move(Smem("copy"), "y"), Store("y", "Y")))
    data, found, _ = execute(k, X=matrix(0))
    assert found == []
    np.testing.assert_array_equal(data["Y"], matrix(0))


def test_rows_outside_a_tensor_are_zero_and_not_stored():
    k = kernel(tiles=2, mode="static")
    copy_through_ring(k)
    k.tensors = [
        type(t)(t.name, t.lines, t.line_bytes, t.start, t.step, row_blocks(1, SIZE + 5, SIZE, SIZE)) for t in k.tensors
    ]
    x = matrix(1, SIZE + 5)
    data, found, _ = execute(k, X=x)
    assert found == []
    np.testing.assert_array_equal(data["Y"], x)


def test_storing_rows_twice_is_found():
    k = kernel(tiles=2, mode="static")
    copy_through_ring(k)
    k.tiles["own"] = np.zeros(2, dtype=np.int64)
    _, found, _ = execute(k, X=matrix(0, 2 * SIZE))
    assert any("writes rows of Y a second time" in message for message in found)


def test_reading_what_nobody_wrote_stops_the_values():
    k = kernel()
    k.smem("X", 64)
    with k.role("r", warps=4, registers=24) as r, r.tiles():
        r.vector("take", {"alu": 4}, effects=(Move(Smem("X"), "x"),))
    _, found, broken = execute(k)
    assert broken
    assert found == ["r 'take' (cycle 100 to 108), X: reads what nobody has written"]


def test_a_place_that_was_not_declared_is_an_error():
    k = kernel()
    with k.role("r", warps=4, registers=24) as r, r.tiles():
        r.vector("take", {"alu": 4}, effects=(Move(Smem("X"), "x"),))
    with pytest.raises(ModelError, match=r"toy: role 'r', operation 'take': no buffer 'X'"):
        execute(k)


# --- asynchronous MMAs -----------------------------------------------------------------------------------
def product(k, *, wait=True, again=False):
    """O = A B^T of a block each, one MMA of a role."""
    a, b = (k.ring(blocks(k, name), 4 * SIZE * SIZE, 1, consumers=1) for name in ("A", "B"))
    blocks(k, "O")
    with k.role("producer", warps=1, registers=24) as p, p.tiles():
        p.load(a)
        p.load(b)
    with k.role("consumer", warps=4, registers=24) as c, c.tiles():
        c.wait(a)
        c.wait(b)
        for _ in range(1 + again):
            c.mma("AB", m=64, n=64, k=16, count=1, effects=(Matmul("O", Smem("A"), Smem("B"), True, add=True),))
        if wait:
            c.wait_mma()
        c.vector("store", {"alu": 4}, effects=(Store("O", "O"),))
        c.wait_mma()
        c.release(a)
        c.release(b)
    return k


@pytest.mark.parametrize("again", [False, True])
def test_products_accumulate_and_start_anew_with_every_tile(again):
    a, b = matrix(0, 3 * SIZE), matrix(1, 3 * SIZE)
    data, found, _ = execute(product(kernel(tiles=3, mode="static"), again=again), A=a, B=b)
    assert found == []
    parts = zip(np.split(a, 3), np.split(b, 3), strict=True)
    np.testing.assert_allclose(data["O"], np.concatenate([(1 + again) * x @ y.T for x, y in parts]), rtol=1e-6)


def test_an_accumulator_in_flight_is_a_race():
    _, found, broken = execute(product(kernel(), wait=False), A=matrix(0), B=matrix(1))
    assert "reads register O that consumer 'AB'" in found[0]
    assert found[0].endswith("an MMA in flight, no wait for it")  # and they do overlap
    assert broken  # there is nothing in O yet


def pair_product(*, alias=False, wait=True):
    """S = A B^T by MMAs over pairs of CTAs, each of which has half the rows of A and of B; read from tensor memory."""
    k = kernel(load_arch("b200", ("chip.sm_count=2",)), tiles=2, cluster=2, tmem_columns=64)
    k.tiles["lead"] = np.array([1, 0])
    whole = row_blocks(1, 2 * SIZE, SIZE, 2 * SIZE)
    rings = [k.ring(blocks(k, name), 4 * SIZE * SIZE, 1, consumers=1) for name in ("A", "B")]
    k.tensor("S", 2, 8 * SIZE * SIZE, "own", 0, whole)
    k.region("S", 0, 32)
    k.region("P", 16 if alias else 32, 16)
    full, done = k.barrier("pair.full", 2), k.barrier("done", 1)
    with k.role("producer", warps=1, registers=24) as p, p.tiles():
        for ring in rings:
            p.load(ring)
    with k.role("mma", warps=1, registers=24) as m, m.tiles():
        for ring in rings:
            m.wait(ring)
        m.arrive(full, scope="leader")
        with m.loop("lead"):
            if wait:
                m.wait_barrier(full)
            effect = Matmul(Tmem("S"), Smem("A"), Smem("B"), transposed=True)
            m.mma("AB", m=256, n=32, k=16, count=1, two_cta=True, done=done, effects=(effect,))
    with k.role("epilogue", warps=4, registers=24) as e, e.tiles():
        e.wait_barrier(done)
        e.vector("read", {"alu": 1}, effects=(Move(Tmem("S"), "s"), Move(Register("s", share=(0, 0.5)), Tmem("P"))))
        e.vector("store", {"alu": 1}, effects=(Move(Tmem("S"), "s"), Store("s", "S")))
        for ring in rings:
            e.release(ring)
    return k


def test_an_mma_of_a_pair_reads_both_ctas():
    a, b = matrix(0, 2 * SIZE), matrix(1, 2 * SIZE)
    data, found, _ = execute(pair_product(), A=a, B=b)
    assert found == []
    np.testing.assert_allclose(data["S"], a @ b.T, rtol=1e-5)


def test_the_other_ctas_operands_have_to_be_waited_for():
    _, found, _ = execute(pair_product(wait=False), A=matrix(0, 2 * SIZE), B=matrix(1, 2 * SIZE))
    assert any("reads A that producer 'load A' of another CTA" in message for message in found)


def test_tensor_memory_that_shares_columns_is_overwritten():
    _, found, broken = execute(pair_product(alias=True), A=matrix(0, 2 * SIZE), B=matrix(1, 2 * SIZE))
    assert broken
    assert any(message.endswith("S: reads what epilogue 'read' overwrote") for message in found)


def test_parts_of_a_place_are_joined_along_rows_or_columns():
    k = kernel(load_arch("b200", ("chip.sm_count=1",)), tmem_columns=32)
    k.tensor("X", 1, 64, "own", 0, row_blocks(1, SIZE, SIZE, SIZE))
    ring = k.ring(k.tensors[0], 64, 1, consumers=1)
    k.tensor("Y", 1, 64, "own", 0, Layout(SIZE, SIZE, lambda line, tile: ArrayRegion(np.arange(SIZE))))
    k.region("T", 0, 16)
    with k.role("producer", warps=1, registers=24) as p, p.tiles():
        p.load(ring)
    with k.role("r", warps=4, registers=24) as r, r.tiles():
        r.wait(ring)
        r.vector("in", {"alu": 1}, effects=(Move(Smem("X"), "x"),))
        for share in ((0.75, 1.0), (0.0, 0.75)):
            effects = (Move(Register("x", share=share), Tmem("T", share=share)),)
            r.vector("part", {"alu": 1}, effects=effects)
        r.vector("out", {"alu": 1}, effects=(Move(Tmem("T"), "y"), Store("y", "Y")))
        r.release(ring)
    x = matrix(3)
    data, found, _ = execute(k, X=x)
    assert found == []
    np.testing.assert_array_equal(data["Y"], x)
    assert Load(Smem("X")) in p.body[0].body[1].effects  # ring.load says what lands where
