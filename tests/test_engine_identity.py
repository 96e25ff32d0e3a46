"""The two engines execute one semantics: every number and every slice of the trace is the same."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import TOY_MHZ, Chaos, Plan, chaos, comparable, everything, kernel, outcome, plans, toy_arch

from fasim.arch import Arch, list_archs, load_arch
from fasim.engine import compiled, reference
from fasim.engine.common import TraceWindow
from fasim.engine.memory import new_memory, next_launch
from fasim.errors import FasimError
from fasim.lowering.lower import lower, lower_all
from fasim.problem import Problem
from fasim.program.language import Kernel
from fasim.program.library import Schedule, list_schedules, load_schedule
from fasim.studies.simulate import TraceSpec, execute


@settings(max_examples=300)
@given(plans())
def test_random_kernels(plan: Plan):
    image = lower(plan.build(), TOY_MHZ)
    first = outcome(reference, image)
    assert first == outcome(compiled, image)
    assert isinstance(first, dict), first  # these programs cannot deadlock


@settings(max_examples=300)
@given(chaos())
def test_random_roles_and_their_deadlocks(plan: Chaos):
    image = lower(plan.build(), TOY_MHZ)
    assert outcome(reference, image) == outcome(compiled, image)


@settings(max_examples=50)
@given(plans(), st.integers(0, 5), st.integers(0, 3000), st.integers(0, 1000), st.sampled_from((3, 100_000)))
def test_random_trace_windows(plan: Plan, sm: int, first: int, length: int, limit: int):
    """A window keeps the same slices; a full buffer keeps the same ones where they come from one SM."""
    image = lower(plan.build(), TOY_MHZ)
    window = TraceWindow((sm % (plan.sms * plan.cluster),), (first * 64, (first + length) * 64), limit)
    assert outcome(reference, image, window) == outcome(compiled, image, window)


@settings(max_examples=30)
@given(plans(), plans())
def test_random_launches_one_after_the_other(one: Plan, two: Plan):
    """The second kernel finds in L2 what the first left there."""
    chip = ("l2.partitions=2", "l2.coalescers=2")
    images = [lower(plan.build(*chip), TOY_MHZ) for plan in (one, two)]
    results = []
    for engine in (reference, compiled):
        memory = new_memory(200, images[0].machine, images[0].slowest_line)
        results.append([])
        for image in images:
            results[-1].append(comparable(engine.run(image, everything(image), memory)))
            next_launch(memory)
    assert results[0] == results[1]


def test_a_run_longer_than_the_histogram():
    """Bins double in width several times, in whatever order SMs report."""
    k = kernel(toy_arch("chip.sm_count=3"), tiles=9, trips=(100, 900, 300), mode="dynamic")
    with k.role("w", warpgroups=2, registers=24) as w, w.tiles(draws=True), w.loop("trips"):
        w.mma("mma", m=64, n=128, k=16, count=2)
        w.vector("exp", {"ex2": 64})
        w.wait_mma()
    image = lower(k, TOY_MHZ)
    first = outcome(reference, image, TraceWindow((), (0, 0), 0))
    assert first == outcome(compiled, image, TraceWindow((), (0, 0), 0))
    assert first["bin_shift"] > 17


# --- what is shipped -----------------------------------------------------------------------------------
#: Small problems, of which a schedule runs the first that it has a tile for.
SHAPES = (
    {"batch": 1, "seqlen_q": 512, "heads_q": 4, "heads_kv": 2, "head_dim": 128},
    {"batch": 1, "seqlen_q": 512, "heads_q": 4, "head_dim": 64},
    {"batch": 2, "seqlen_q": 1, "seqlen_k": 1024, "heads_q": 16, "heads_kv": 2, "head_dim": 128},
    {"batch": 1, "seqlen_q": 512, "heads_q": 4, "heads_kv": 4, "head_dim": 192, "head_dim_v": 128},
    {"batch": 2, "seqlen_q": 1, "seqlen_k": 1024, "heads_q": 64, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512},
)


def record(schedule: Schedule, arch: Arch, causal: bool, dtype: str, direction: str) -> list[Kernel]:
    refusals = []
    for shape in SHAPES:
        try:
            return schedule.build(Problem(**shape, causal=causal, dtype=dtype, direction=direction), arch, {})
        except FasimError as error:
            refusals.append(str(error))
    raise AssertionError("\n".join(refusals))


def combinations() -> list[tuple[str, str]]:
    """Shipped schedule and arch, where the schedule says that it exists for the chip."""
    archs = {name: load_arch(name).architecture for name in list_archs()}
    return [
        (schedule, name)
        for schedule, (name, architecture) in product(list_schedules(), archs.items())
        if architecture in load_schedule(schedule).architectures
    ]


@pytest.mark.parametrize(("name", "chip"), combinations())
def test_shipped_schedules(name: str, chip: str):
    schedule, arch = load_schedule(name), load_arch(chip, ("chip.sm_count=4",))
    dtypes = [dtype for dtype in schedule.dtypes if dtype in arch.sm.tensor.flops_per_cycle]
    if (name, arch.architecture) == ("fa4", "hopper"):
        dtypes.remove("fp8")  # the Hopper kernels are for 16 bits
    for direction, (dtype, causal) in product(schedule.directions, ((dtypes[0], True), (dtypes[-1], False))):
        images = lower_all(record(schedule, arch, causal, dtype, direction), 1500.0)
        spec = TraceSpec(sms=(0, 3))
        first, second = (execute(images, engine, spec) for engine in ("reference", "compiled"))
        assert [comparable(raw) for raw in first] == [comparable(raw) for raw in second]
        assert all(len(raw.trace) for raw in first)
