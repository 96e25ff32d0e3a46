"""The compiler's order of a softmax moves instructions, it neither makes nor loses any."""

from collections import Counter

import pytest

from fasim.arch import load_arch
from fasim.problem import Problem
from fasim.program.library import load_schedule
from fasim.program.ops import Loop, TileLoop, Vector, WaitMma


def loop_body(schedule: str, name: str, trips: str, problem: Problem, **knobs: object):
    kernel, *_ = load_schedule(schedule).build(problem, load_arch("h200"), knobs)
    (role,) = (role for role in kernel.roles if role.name == name)
    (tiles,) = (op for op in role.body if isinstance(op, TileLoop))
    (loop,) = (op for op in tiles.body if isinstance(op, Loop) and op.trips == trips)
    return kernel, list(loop.body)


def counts(body) -> dict[str, float]:
    total: Counter[str] = Counter()
    for op in body:
        if isinstance(op, Vector):
            total.update(op.mix)
    return dict(total)


FA3 = [
    *({"head_dim": d} for d in (64, 96, 128, 192, 256)),
    *({"head_dim": d, "dtype": "fp8"} for d in (64, 96, 128, 192, 256)),
]


@pytest.mark.parametrize("knobs", [{}, {"overlap": False}, {"exp": False}], ids=str)
@pytest.mark.parametrize("shape", FA3, ids=str)
def test_fa3_has_the_counted_instructions(shape, knobs):
    kernel, body = loop_body("fa3", "consumer", "full", Problem(seqlen_q=4096, **shape), **knobs)
    e, half = kernel.knobs["tile_n"] / 2, shape["head_dim"] / 2  # per thread: scores, elements of O
    exps = (e + 2) * knobs.get("exp", True)
    expected = {"fmnmx": e + 4, "shfl": 4, "ffma": e + 2, "ex2": exps, "fadd": e, "fmul": half + 4, "f2fp": e / 2}
    found = counts(body)
    assert {name: found.get(name, 0) for name in expected} == pytest.approx(expected)
    assert set(found) - set(expected) <= {"sts"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_fa4_on_hopper_has_the_counted_instructions(head_dim, causal):
    kernel, body = loop_body(
        "fa4", "consumer", "masked" if causal else "full", Problem(seqlen_q=4096, head_dim=head_dim, causal=causal)
    )
    e, half = kernel.knobs["tile_n"] / 2, head_dim / 2
    found = counts(body)
    expected = {"fmnmx": e + 4, "shfl": 4, "ffma": e + 2, "ex2": e + 2, "fadd": e + 2, "fmul": half + 4, "f2fp": e / 2}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("head_dim", "share"), [(64, 0), (96, 0.38), (128, 0.26), (192, 0.33), (256, 0.44)])
def test_exponentials_before_the_wait_for_pv(head_dim, share):
    """Counted in the loops over full blocks; the two of the scale are apart."""
    kernel, body = loop_body("fa3", "consumer", "full", Problem(seqlen_q=4096, head_dim=head_dim))
    wait = [isinstance(op, WaitMma) and op.pending == 0 for op in body].index(True)
    e = kernel.knobs["tile_n"] / 2
    assert counts(body[:wait]).get("ex2", 0) == pytest.approx(share * e + 2 * (share > 0))
