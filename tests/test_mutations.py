"""Changes of a recorded kernel: what they change and leave alone, and selectors that name nothing or too much."""

from __future__ import annotations

import changes as mutations
import numpy as np
import pytest
from changes import At, drop, move, redeclare, replace_effect, restage, retarget, retile, together
from programs import kernel, toy_arch

from fasim.errors import ConfigError
from fasim.program.effects import Mask, Matmul, RowMax, RowSum
from fasim.program.language import Barrier, Kernel, Smem, Tensor, walk
from fasim.program.ops import Loop


@pytest.fixture
def k() -> Kernel:
    """A producer and a consumer of one ring; the consumer peels its first step off the loop."""
    k = kernel(toy_arch(), trips=3)
    ring = k.ring(k.tensor("K", 8, 1024, "own", 1), 1024, 2, consumers=1)
    with k.role("producer", warps=1, registers=32) as p, p.tiles(), p.loop(4):
        p.load(ring)
    with k.role("consumer", warps=4, registers=64) as c, c.tiles():
        c.wait(ring)
        c.mma("QK", m=64, n=64, k=16, count=1, effects=(Matmul("S", "Q", Smem("K"), transposed=True),))
        c.wait_mma(0, "wait QK")
        with c.loop("trips"):
            c.wait(ring)
            c.mma("QK", m=64, n=64, k=16, count=1)
            c.wait_mma(0, "wait QK")
            c.vector("softmax", {"ex2": 1}, effects=(Mask("S"), RowMax("S")))
            c.release(ring)
        c.release(ring)
    return k


def labels(k: Kernel, role: str = "consumer") -> list[str]:
    """Labels of a role in program order."""
    return [op.label for op in walk(next(r for r in k.roles if r.name == role).body)]


WHOLE = ["tiles", "wait K", "QK", "wait QK", "trips", "wait K", "QK", "wait QK", "softmax", "release K", "release K"]


def test_drop_takes_the_operation_named_and_no_other(k):
    (broken,) = drop(At("consumer", "wait QK", inside="trips"))([k])
    assert labels(broken) == WHOLE[:7] + WHOLE[8:]
    assert labels(k) == WHOLE  # the recorded kernel stays as it is


@pytest.mark.parametrize(
    ("at", "left"),
    [
        (At("consumer", "release K", behind="trips"), WHOLE[:10]),
        (At("consumer", "QK", which=-1), WHOLE[:6] + WHOLE[7:]),
        (At("consumer", "QK", which="all"), [label for label in WHOLE if label != "QK"]),
        (At("consumer", "wait K", barrier="K.full", which=0), WHOLE[:1] + WHOLE[2:]),
        (At("consumer", "trips"), [*WHOLE[:4], "release K"]),
    ],
)
def test_selectors_narrow_a_label_down(k, at, left):
    assert labels(drop(at)([k])[0]) == left


def test_move_passes_the_nearest_operation_of_a_label(k):
    (earlier,) = move(At("consumer", "release K", inside="trips"), before="QK")([k])
    assert labels(earlier) == [*WHOLE[:6], "release K", "QK", "wait QK", "softmax", "release K"]
    (later,) = move(At("consumer", "wait K", inside="trips"), after="softmax")([k])
    assert labels(later) == [*WHOLE[:5], "QK", "wait QK", "softmax", "wait K", "release K", "release K"]


def test_several_moves_in_one_body_all_pass():
    k = kernel(toy_arch())
    with k.role("worker", warps=4, registers=64) as w:
        for label in ("x", "a", "a", "b", "b", "y"):
            w.delay(label, 1)
    assert labels(move(At("worker", "a", which="all"), before="x")([k])[0], "worker") == ["a", "a", "x", "b", "b", "y"]
    assert labels(move(At("worker", "b", which="all"), after="y")([k])[0], "worker") == ["x", "a", "a", "y", "b", "b"]


def find(k: Kernel, label: str, which: int = 0):
    return [op for role in k.roles for op in walk(role.body) if op.label == label][which]


def test_retarget_changes_fields_and_fields_within_fields(k):
    broken = together(
        retarget(At("consumer", "wait QK", which=0), pending=1),
        retarget(At("producer", "wait K empty"), use={"ahead": 0}),
        retarget(At("consumer", "trips"), trips=5),
        mutations.retarget_effect(At("consumer", "QK", which=0), Matmul, b={"back": 1}),
    )([k])[0]
    assert (find(broken, "wait QK").pending, find(broken, "wait QK", 1).pending) == (1, 0)
    assert (find(broken, "wait K empty").use.ahead, find(k, "wait K empty").use.ahead) == (0, 1)
    assert isinstance(find(broken, "trips"), Loop) and find(broken, "trips").trips == 5
    assert find(broken, "QK").effects == (Matmul("S", "Q", Smem("K", back=1), transposed=True),)


def test_effects_are_replaced_left_out_and_added(k):
    at = At("consumer", "softmax")
    assert find(replace_effect(at, Mask)([k])[0], "softmax").effects == (RowMax("S"),)
    assert find(replace_effect(at, RowMax, RowSum("S"))([k])[0], "softmax").effects == (Mask("S"), RowSum("S"))
    assert find(mutations.add_effect(at, RowSum("S"))([k])[0], "softmax").effects[0] == RowSum("S")


def test_declarations_and_the_tile_table(k):
    (broken,) = together(
        redeclare(Barrier, "K.empty", arrivals=2),
        redeclare(Kernel, "toy", tmem_columns=640),
        restage(1, "K", "K.full", "K.empty"),
        retile("shared", lambda tiles: tiles["trips"] + 1),
        redeclare(Tensor, "K", start="shared"),
    )([k])
    assert [(b.arrivals, b.stages) for b in broken.barriers] == [(1, 1), (2, 1)]
    assert {op.use.stages for role in broken.roles for op in walk(role.body) if "use" in vars(op)} == {1}
    assert (find(broken, "load K").bar.stages, broken.buffers[0].stages, broken.tmem_columns) == (1, 1, 640)
    assert np.array_equal(broken.tiles["shared"], [4]) and broken.tensors[0].start == "shared"
    assert (k.barriers[0].stages, k.tmem_columns, k.tiles["shared"].tolist()) == (2, 0, [0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(At("consumer", "wait K")), "'wait K': 2 of 2 fit, say .*behind nothing.*inside tiles > trips.*K.full"),
        (drop(At("consumer", "QK", behind="softmax")), "0 of 2 fit"),
        (drop(At("consumer", "QK", which=2)), "which=2, but 2 fit"),
        (drop(At("consumer", "wait PV")), "role 'consumer', operation 'wait PV': no such.*choices: .*wait QK"),
        (drop(At("consumers", "QK")), "no role 'consumers'; did you mean 'consumer'"),
        (drop(At("consumer", "QK", kernel="tay")), "no kernel 'tay'; did you mean 'toy'"),
        (
            move(At("consumer", "softmax"), before="release K"),
            r"no 'release K' before it.*choices: QK, wait K, wait QK",
        ),
        (retarget(At("consumer", "softmax"), pending=1), "no field 'pending'"),
        (retarget(At("producer", "wait K empty"), use={"ahead": 1}), "use: ahead is 1 already"),
        (replace_effect(At("consumer", "softmax"), RowSum), r"no effect RowSum \(has Mask, RowMax\)"),
        (redeclare(Barrier, "K.fill", stages=1), "no barrier 'K.fill'; did you mean 'K.full'"),
        (restage(2, "K"), "'K' has 2 stages already"),
        (restage(1, "L"), "'L' is not there"),
        (retile("own", lambda tiles: tiles["own"]), "'own' holds these values already"),
    ],
)
def test_what_names_nothing_too_much_or_no_change_is_refused(k, change, message):
    with pytest.raises(ConfigError, match=message):
        change([k])


def test_a_move_has_one_direction():
    with pytest.raises(ConfigError, match="either before or after"):
        move(At("consumer", "QK"))
