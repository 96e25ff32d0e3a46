"""Builds: what is shipped validates, what a user writes is checked, and kernels get the numbers they ask for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import pytest
from click.testing import Result
from typer.testing import CliRunner

import fasim
from fasim.arch import load_arch
from fasim.cli import app
from fasim.errors import ConfigError
from fasim.files import data_folder
from fasim.problem import Problem
from fasim.program.build_files import choose_build, list_builds, load_build
from fasim.program.builds import Build, Grade
from fasim.program.library import Schedule, load_schedule

SHIPPED = sorted(data_folder("schedules").glob("builds/*/*.toml"))
SCHEDULES = sorted({path.parent.name for path in SHIPPED})


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(schedule: str, path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_build(schedule, path)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_builds_are_well_formed(path):
    build = load_build(path.parent.name, path.stem)
    assert (build.schedule, build.name, build.path) == (path.parent.name, path.stem, path)
    assert build == load_build(path.parent.name, path), "by name and by path"


def tables(content: dict) -> dict[str, dict]:
    """Every table of a file that holds numbers."""
    found = {"tiles": content["tiles"]} if "tiles" in content else {}
    for section in ("costs", "mixes", "tables", "loops"):
        found |= {f"{section}.{name}": table for name, table in content.get(section, {}).items()}
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_number_has_source_and_grade_in_its_own_file(path):
    content = tomllib.loads(path.read_text())
    outside = {
        key
        for key, value in content.items()
        if not isinstance(value, dict | str | bool) and key not in ("architectures", "features")
    }
    assert not outside
    for name, table in tables(content).items():
        assert table["grade"] in get_args(Grade), name
        assert len(table["source"]) >= 4, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_default_for_each_architecture(schedule):
    builds = [load_build(schedule, name) for name in list_builds(schedule)]
    defaults = [architecture for build in builds if build.default for architecture in build.architectures]
    assert sorted(defaults) == sorted(set(defaults))
    assert {a for build in builds for a in build.architectures} == set(defaults)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kernels_ask_for_every_number(schedule):
    takes_build = {
        architecture: variant.takes_build
        for variant in load_schedule(schedule).variants
        for architecture in variant.marked.architectures
    }
    files = [*data_folder("schedules").glob("*.py"), *Path(fasim.__file__).parent.rglob("*.py")]
    code = "".join(path.read_text() for path in files)
    for build in (load_build(schedule, name) for name in list_builds(schedule)):
        if not all(takes_build[architecture] for architecture in build.architectures):
            continue  # its numbers are still in Python, see test_builds_constants.py
        names = [name for section in ("costs", "mixes", "tables") for name in getattr(build, section)]
        names += [loop.region for loop in build.loops.values()] + list(build.features)
        assert [name for name in names if f'"{name}"' not in code] == []


def test_choose():
    assert choose_build("fa3", "hopper").name == "2026"
    assert choose_build("fa3", "hopper", "2024").has("first release")
    assert choose_build("fa3", "ampere") is None
    with pytest.raises(ConfigError, match=r"fa3: build '2024' is for hopper, not ampere"):
        choose_build("fa3", "ampere", "2024")
    with pytest.raises(ConfigError, match=r"unknown build of fa3 '2025'; did you mean '202.'\? \(choices"):
        load_build("fa3", "2025")


def test_inheritance():
    first, later = load_build("fa3", "2024"), load_build("fa3", "2026")
    assert (first.default, later.default) == (False, True), "a derived build is not the default for that"
    assert first.costs == later.costs and first.loops == later.loops
    assert first.tiles != later.tiles and first.title != later.title


def test_a_users_build(tmp_path):
    text = 'base = "2026"\n[costs.loop]\nvalue = 70\nsource = "my stamps"\ngrade = "measured"\n'
    build = load_build("fa3", write(tmp_path, text))
    assert build.name == "mine"
    assert build.cost("loop") == 70
    assert build.cost("setup", "fp8") == load_build("fa3", "2026").cost("setup", "fp8")
    assert choose_build("fa3", "hopper", str(tmp_path / "mine.toml")) == build


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('titel = "x"', "mine.toml: titel: unknown key; did you mean 'title'?"),
        (
            '[costs.loop]\nvalue = 7\ngrade = "measured"\nsource = "mine"\nunits = "x"',
            "mine.toml: costs.loop.units: unknown key; did you mean 'unit'?",
        ),
        (
            '[costs.lop]\nvalue = 7\nunit = "cycles"\ngrade = "measured"\nsource = "mine"',
            "mine.toml: costs.lop: unknown key; did you mean 'loop'?",
        ),
        (
            '[costs.setup.by_kind]\n"16 bits" = 7\n[costs.setup]\ngrade = "measured"\nsource = "mine"',
            "mine.toml: costs.setup.by_kind.16 bits: unknown key; did you mean '16 bit'?",
        ),
        (
            '[mixes.scale]\nmix = { ffna = 2 }\ngrade = "counted"\nsource = "mine"',
            "mine.toml: mixes.scale.mix.ffna: unknown key; did you mean 'ffma'?",
        ),
        (
            '[costs.loop]\nvalue = 7\ngrade = "guess"\nsource = "mine"',
            "mine.toml: costs.loop.grade: unknown value 'guess' (choices: assumed, counted,",
        ),
        ("[costs.loop]\nvalue = 7", "mine.toml: costs.loop.source: missing key"),
        (
            '[costs.loop]\nby_kind = { a = 1 }\ngrade = "measured"\nsource = "mine"',
            "mine.toml: costs.loop: expected either value or by_kind",
        ),
        (
            '[tiles]\nrows = [{ when = {}, tile_m = 128, tile_m = 128 }]\ngrade = "source"\nsource = "mine"',
            "mine.toml: not valid TOML",
        ),
        (
            '[tiles]\nrows = [{ when = {}, tile_m = 128, tile_k = 128 }]\ngrade = "source"\nsource = "mine"',
            "mine.toml: tiles.rows.0.tile_k: unknown key; did you mean 'tile_n'?",
        ),
        (
            '[loops.x]\nregion = "serial"\nrows_first = 1\nruns = [{ label = "exp", share = { ex2 = 1.0 } }]\n'
            'grade = "counted"\nsource = "mine"',
            "mine.toml: loops.x.runs.0.share: unknown key; did you mean 'shares'?",
        ),
        (
            '[loops.x]\nregion = "sofmax"\nrows_first = 1\nruns = []\ngrade = "counted"\nsource = "mine"',
            "mine.toml: loops.region.sofmax: unknown key; did you mean 'softmax'?",
        ),
        (
            '[costs.setup]\ngrades = { fp4 = "assumed" }\ngrade = "measured"\nsource = "mine"',
            "mine.toml: costs.setup: grades.fp4: unknown key; did you mean 'fp8'?",
        ),
        ('schedule = "fa2"', "mine.toml: schedule: 'fa2', but it is a build of 'fa3'"),
        ('architectures = ["hoper"]', "unknown value 'hoper'; did you mean 'hopper'?"),
    ],
)
def test_bad_files(tmp_path, text, message):
    assert message in refused("fa3", write(tmp_path, f'base = "2026"\n{text}\n'))


def test_a_build_of_a_users_schedule(tmp_path):
    folder = tmp_path / "builds" / "own"
    folder.mkdir(parents=True)
    head = 'schedule = "own"\ntitle = "t"\ncompiler = "c"\nrevision = "r"\narchitectures = ["hopper"]\ndefault = true\n'
    write(folder, head, "only.toml")
    schedule = tmp_path / "own.py"
    assert list_builds(schedule) == ["only"]
    assert choose_build(schedule, "hopper").name == "only"
    assert choose_build(tmp_path / "other.py", "hopper") is None, "a schedule without builds"


OWN = '''
from __future__ import annotations
from dataclasses import dataclass
from fasim import Arch, Problem, schedule
from fasim.program.builds import Build
from fasim.program.language import Kernel

@dataclass(frozen=True)
class Knobs:
    stages: int = 2

@schedule(architectures=("hopper", "ampere", "blackwell"), dtypes=("bf16",))
def own(problem: Problem, arch: Arch, knobs: Knobs, build: Build) -> Kernel:
    """Mine."""
    return Kernel("own", problem, arch, {"stages": knobs.stages, "build": build.name})
'''


@pytest.fixture
def own(tmp_path: Path) -> Schedule:
    """A schedule with a build for Hopper, which is the default, and one for Hopper and Ampere."""
    folder = tmp_path / "builds" / "own"
    folder.mkdir(parents=True)
    head = 'schedule = "own"\ntitle = "Title"\ncompiler = "nvcc"\nrevision = "r"\narchitectures = '
    write(folder, head + '["hopper"]\ndefault = true\n', "one.toml")
    write(folder, head + '["hopper", "ampere"]\n', "two.toml")
    return load_schedule(write(tmp_path, OWN, "own.py"))


def test_a_schedule_gets_the_build_that_is_chosen(own, tmp_path):
    def chosen(arch: str, **knobs: object) -> object:
        return own.build(Problem(), load_arch(arch), knobs)[0].knobs["build"]

    assert chosen("h100") == chosen("h100", build="auto") == "one"
    assert chosen("h100", build="two") == chosen("a100", build="two") == "two"
    mine = write(tmp_path, 'base = "two"\ntitle = "x"\n', "Mine.toml")
    assert chosen("h100", build=str(mine), stages=3) == "Mine"
    for arch, build, message in (
        ("h100", "twoo", r"knob 'build': unknown value 'twoo'; did you mean 'two'\?"),
        ("a100", "one", r"knob 'build': unknown value 'one' \(choices: two\)"),
        ("a100", None, r"schedule 'own' has no build for a100"),
        ("b200", str(mine), r"own: build 'Mine' is for hopper, ampere, not blackwell"),
        ("h100", "no/such.toml", r"no/such.toml: no such file \(shipped builds of own: one, two\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            chosen(arch, build=build)


def test_the_knob_lists_the_builds_of_an_architecture(own):
    assert own.knobs["build"].choices == ("one", "two")
    assert own.knobs_on(load_arch("a100"))["build"].choices == ("two",)
    assert own.knobs_on(load_arch("h100"))["build"].default == "one"


def test_command_line(own, tmp_path):
    def call(*command: str) -> Result:
        return CliRunner().invoke(app, list(command))

    listed = call("list", "builds", str(own.path))
    assert listed.exit_code == 0
    assert [line.split()[:3] for line in listed.output.splitlines() if "Title" in line] == [
        ["own", "one*", "hopper"],
        ["own", "two", "hopper,"],
    ]
    shown = call("list", "builds").output
    assert all(schedule in shown for schedule in SCHEDULES)
    mine = write(tmp_path, 'base = "two"\n[cost.x]\n')
    for option in (["--build", str(mine)], ["--knob", f"build={mine}"]):
        failed = call("run", str(own.path), "--arch", "h100", *option)
        assert isinstance(failed.exception, ConfigError) and failed.exception.exit_code == 2
        assert "mine.toml: cost: unknown key; did you mean 'costs'?" in str(failed.exception)


@pytest.fixture
def build() -> Build:
    return load_build("fa3", "2026")


def test_tiles(build):
    def tile(**shape: object) -> tuple[int, int]:
        row = build.tile(Problem(**shape))
        return row.tile_m, row.tile_n

    assert tile(head_dim=128, causal=False) == (128, 176)
    assert tile(head_dim=128, causal=True) == (128, 128)
    assert tile(head_dim=80) == tile(head_dim=96)
    assert tile(head_dim=192, head_dim_v=128) == (128, 128)
    assert tile(head_dim=192, head_dim_v=192) == (128, 112)
    assert tile(head_dim=128, dtype="fp8") == (128, 224)
    with pytest.raises(ConfigError, match="fa3: build 2026: no tile for head_dim 512"):
        tile(head_dim=512)


def test_columns_come_from_the_first_row_that_states_them(tmp_path, build):
    text = """
    base = "2026"
    [tables.registers]
    source = "mine"
    grade = "assumed"
    rows = [
        { when = { warpgroups = [2, 3] }, columns = { producer = 40 } },
        { columns = { launch = 1, producer = 2, consumer = 3 } },
    ]
    """
    mine = load_build("fa3", write(tmp_path, text))
    assert mine.row("registers", warpgroups=2) == {"launch": 1, "producer": 40, "consumer": 3}
    assert mine.row("registers", warpgroups=1) == {"launch": 1, "producer": 2, "consumer": 3}
    with pytest.raises(ConfigError, match=r"2026.toml: tables.registers: no row for warpgroups 4"):
        build.row("registers", warpgroups=4)
    with pytest.raises(ConfigError, match=r"2026.toml: tables.registers.rows.0.when.warpgroups: unknown key"):
        build.row("registers", warps=4)


def test_loops(build):
    facts = {"dtype": "bf16", "p_in_registers": True}
    early, late = build.loop("softmax", overlap=True, head_dim=256, **facts).split("wait PV")
    assert [run.label for run in early] == ["row max 2, exp", "exp, sum", "scale S and O, exp"]
    assert [run.label for run in late] == ["scale S and O, exp"]
    assert late[0].shares["f2fp"] == 0.65
    serial = build.loop("softmax", overlap=False, head_dim=128, **facts)
    assert serial.split("wait PV") == ((), serial.runs), "no mark: everything is after it"
    assert build.loop("softmax", overlap=False, head_dim=80, **facts) is serial, "the next larger head dimension"
    assert build.loop("softmax", overlap=False, head_dim=256, **facts) is serial, "the largest that was counted"
    with pytest.raises(ConfigError, match=r"2026.toml: loops: no region 'parallel'"):
        build.loop("parallel", head_dim=64)


def test_what_is_not_there_is_named(build):
    with pytest.raises(ConfigError, match=r"2026.toml: costs.lop: missing key; did you mean 'loop'\?"):
        build.cost("lop")
    with pytest.raises(ConfigError, match=r"2026.toml: costs.setup.by_kind.fp4: missing key; did you mean 'fp8'\?"):
        build.cost("setup", "fp4")
    with pytest.raises(ConfigError, match=r"2026.toml: mixes.load: missing key; did you mean 'loads'\?"):
        build.mix("load", "fp8")
