"""Finding schedules, describing their knobs, and reading knobs from text."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from fasim.arch import load_arch
from fasim.errors import ConfigError
from fasim.problem import Problem
from fasim.program.language import Kernel
from fasim.program.library import Schedule, list_schedules, load_schedule, parse_knobs, schedule_folder

HEADER = """
    from __future__ import annotations
    from dataclasses import dataclass
    from typing import Annotated, Literal
    from fasim.arch import Arch
    from fasim.program.library import schedule
    from fasim.problem import Problem
    from fasim.program.language import Kernel
"""
BODY = '''
    @dataclass(frozen=True)
    class Knobs:
        tile: Annotated[int | None, "rows per CTA"] = None
        share: Annotated[float, "of exponentials"] = 0.5
        overlap: Annotated[bool, "on or off"] = True
        order: Annotated[Literal["lpt", "heads"], "of work tiles"] = "lpt"
        copies: int = 1

    @schedule(architectures=("hopper",), dtypes=("bf16", "fp8"))
    def mine(problem: Problem, arch: Arch, knobs: Knobs) -> Kernel:
        """What it is.

        And more of it.
        """
        kernel = Kernel("mine", problem, arch, vars(knobs))
        return kernel if knobs.copies == 1 else [kernel] * knobs.copies
'''


def write(folder: Path, *parts: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Schedule:
    return load_schedule(write(tmp_path, HEADER, BODY))


def refusal(function, *args) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- what is shipped -----------------------------------------------------------------------------------------
def test_list_is_the_folder():
    files = [path.stem for path in schedule_folder().glob("*.py") if not path.stem.startswith("_")]
    assert list_schedules() == sorted({name.partition("_sm")[0] for name in files})
    assert {"fa3", "fa4_sm90"} <= set(files)


def test_chip_and_problem_pick_the_kernel_and_its_knobs():
    fa4 = load_schedule("fa4")
    assert list(fa4.knobs_on(load_arch("h100"))) == ["pack_gqa", "build"]
    assert "two_cta" in fa4.knobs_on(load_arch("b200"))
    assert {"pack_gqa", "two_cta"} <= set(fa4.knobs)
    assert "unknown knob 'two_cta'" in refusal(fa4.build, Problem(), load_arch("h100"), {"two_cta": "on"})


@pytest.mark.parametrize("name", list_schedules())
def test_shipped_schedules_describe_themselves(name: str):
    schedule = load_schedule(name)
    assert schedule.name == name
    assert len(schedule.summary) > 10
    assert set(schedule.architectures) <= {"ampere", "hopper", "blackwell"}
    assert set(schedule.directions) <= {"fwd", "bwd"}
    assert all(knob.doc for knob in schedule.knobs.values())


# --- a user's own file ---------------------------------------------------------------------------------------
def test_a_file_is_a_schedule(mine: Schedule):
    assert (mine.name, mine.summary) == ("mine", "What it is.")
    assert (mine.architectures, mine.dtypes, mine.directions) == (("hopper",), ("bf16", "fp8"), ("fwd",))
    assert {k.name: (k.type, k.default, k.doc, k.choices) for k in mine.knobs.values()} == {
        "tile": (int, None, "rows per CTA", ()),
        "share": (float, 0.5, "of exponentials", ()),
        "overlap": (bool, True, "on or off", ()),
        "order": (str, "lpt", "of work tiles", ("lpt", "heads")),
        "copies": (int, 1, "", ()),
    }


def test_build_makes_one_kernel_or_several(mine: Schedule):
    problem, arch = Problem(), load_arch("h100")
    (kernel,) = mine.build(problem, arch, {"tile": "64", "overlap": "off", "order": "heads"})
    assert isinstance(kernel, Kernel)
    assert kernel.knobs == {"tile": 64, "share": 0.5, "overlap": False, "order": "heads", "copies": 1}
    assert len(mine.build(problem, arch, {"copies": 3})) == 3


def test_build_refuses_what_the_schedule_does_not_exist_for(mine: Schedule):
    message = refusal(mine.build, Problem(), load_arch("a100"), {})
    assert message.startswith(
        "schedule 'mine' does not exist for a100 (ampere); it runs on hopper; schedules for a100: "
    )
    assert refusal(mine.build, Problem(dtype="fp16"), load_arch("h100"), {}) == (
        "schedule 'mine': no dtype 'fp16' (has bf16, fp8)"
    )
    assert refusal(mine.build, Problem(direction="bwd"), load_arch("h100"), {}) == (
        "schedule 'mine': no direction 'bwd' (has fwd)"
    )


# --- knobs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        ("tile", "128", 128), ("tile", 128, 128), ("tile", "128.0", 128), ("tile", "auto", None), ("tile", None, None),
        ("share", "0.25", 0.25), ("share", "", 0.5), ("share", 1, 1.0),
        ("overlap", "on", True), ("overlap", "OFF", False), ("overlap", "no", False), ("overlap", True, True),
        ("overlap", "1", True), ("overlap", "false", False),
        ("order", "heads", "heads"), ("order", " LPT ", "lpt"),
    ],
)  # fmt: skip
def test_knob_values(mine: Schedule, knob, text, value):
    parsed = parse_knobs(mine.name, mine.knobs, {knob: text})[knob]
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"tiles": 1},
            "schedule 'mine': unknown knob 'tiles'; did you mean 'tile'? "
            "(choices: copies, order, overlap, share, tile)",
        ),
        ({"tile": "1.5"}, "knob 'tile': expected a whole number, got '1.5'"),
        ({"tile": "wide"}, "knob 'tile': expected a whole number, got 'wide'"),
        ({"share": "half"}, "knob 'share': expected a number, got 'half'"),
        ({"overlap": "maybe"}, "knob 'overlap': expected on or off, got 'maybe'"),
        ({"order": "head"}, "knob 'order': unknown value 'head'; did you mean 'heads'? (choices: heads, lpt)"),
    ],
)
def test_bad_knobs(mine: Schedule, knobs, message):
    assert refusal(parse_knobs, mine.name, mine.knobs, knobs) == message


# --- bad files ---------------------------------------------------------------------------------------------------
def test_unknown_name():
    assert refusal(load_schedule, "fa33").startswith("unknown schedule 'fa33'; did you mean 'fa3'? (choices: ")


def test_missing_file(tmp_path: Path):
    path = tmp_path / "none.py"
    assert refusal(load_schedule, path) == f"schedule file '{path}' does not exist"
    assert "does not exist" in refusal(load_schedule, "some/folder")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "expected one function marked @schedule, found 0"),
        ("def f(:", "SyntaxError: "),
        ("import does_not_exist", "ModuleNotFoundError: No module named 'does_not_exist'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_is_no_schedule(tmp_path: Path, text: str, message: str):
    path = write(tmp_path, text)
    assert refusal(load_schedule, path).startswith(f"{path}: {message}")


def test_two_schedules_in_a_file(tmp_path: Path):
    path = write(tmp_path, HEADER, BODY, BODY.replace("def mine", "def yours"))
    assert refusal(load_schedule, path) == f"{path}: expected one function marked @schedule, found 2"
