import csv
import json
import pickle
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.optimize import least_squares

from fasim.arch import arch_folder, arch_schema, check_arch, list_archs, load_arch
from fasim.engine import image as im
from fasim.errors import ConfigError
from fasim.lowering import cost
from fasim.program.ops import Vector

SHIPPED = ("a100", "b200", "b300", "gb200", "gb300", "h100", "h100_pcie", "h20", "h200")
DATA = Path(__file__).parent.parent / "validation" / "data"


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def rows_of(file, **equal):
    with open(DATA / file) as lines:
        return [row for row in csv.DictReader(lines) if all(row[k] == v for k, v in equal.items())]


def refused(*args):
    with pytest.raises(ConfigError) as caught:
        load_arch(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_list_is_the_folder():
    assert tuple(list_archs()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_sound(name):
    assert check_arch(arch_folder() / f"{name}.toml") == []


@pytest.mark.parametrize("name", SHIPPED)
def test_every_value_has_a_comment_with_a_grade(name):
    text = (arch_folder() / f"{name}.toml").read_text()
    assert text.startswith("#:schema ./arch.schema.json\n")
    text = re.sub(r"\n# (?=.*; [A-D]$)", " ", text, flags=re.MULTILINE)  # a comment may run on to the next line
    for line in text.splitlines():
        key = line.split(" = ")[0]
        if " = " in line and not line.startswith("#") and key not in (
            "base", "name", "title", "architecture", "compute_capability", "kind",
        ):  # fmt: skip
            assert re.search(r"#.*\b[A-D]( \[[^]]+\])?$", line), line


def test_values_and_inheritance():
    h100, h200, b300, gb300 = (load_arch(name) for name in ("h100", "h200", "b300", "gb300"))
    assert h100.sm.mufu.ops_per_cycle == 16
    assert h100.sm.tensor.async_mma.kind == "wgmma"
    assert h100.sm.tmem is None
    assert h200.title == "NVIDIA H200 SXM 141 GB"
    assert h200.hbm.peak_bytes_per_second == 4.8e12
    assert h200.sm == h100.sm
    assert h200.clock.max_mhz == 1980
    assert b300.sm.tensor.flops_per_cycle["bf16"] == 8192
    assert b300.sm.tensor.flops_per_cycle["fp4"] == 49152
    assert gb300.sm.mufu.ops_per_cycle == 32 and gb300.chip.sm_count == 152
    assert load_arch("a100").sm.tma is None


def test_architecture_is_immutable():
    arch = load_arch("h100")
    with pytest.raises(ValidationError):
        arch.sm.mufu.ops_per_cycle = 3


def test_schema_file_is_current():
    committed = json.loads((arch_folder() / "arch.schema.json").read_text())
    assert committed == arch_schema(), "run: fasim arch schema > arch_models/arch.schema.json"


def test_every_number_is_read_by_something():
    names = {name for table in arch_schema()["$defs"].values() for name in table["properties"]}
    package = arch_folder().parent / "fasim"
    rules = ("arch_model.py", "arch_sm.py", "calibration_rules.py")
    files = [file for file in package.rglob("*.py") if file.name not in rules]
    files += (arch_folder().parent / "schedules").glob("*.py")
    words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    assert "ops_per_cycle" in names
    assert sorted(names - words) == []


def test_h200_clocks_are_the_measured_medians():
    for dtype, kind in (("bf16", "tensor_16bit"), ("fp8", "tensor_8bit")):
        rows = rows_of("h200_timing.csv", kernel="fa3", dtype=dtype, direction="fwd")
        median = statistics.median(float(row["sm_clock_mhz"]) for row in rows)
        assert load_arch("h200").clock.sustained_mhz[kind] == median


def microbench(program: str, table: str) -> list[dict[str, object]]:
    data = json.loads((DATA / "h200_microbench.json").read_text())["benchmarks"][program]["tables"][table]
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def test_hopper_interference_follows_from_the_corun_data():
    inter = load_arch("h100").sm.interference
    corun = [r for r in microbench("corun", "corun") if r["operand"] == "ss" and r["mma_groups"] == 1]
    for vector, cycles in (("fmnmx", inter.alu_cycles), ("f2fp", inter.alu_cycles), ("ex2", inter.mufu_cycles)):
        lanes = [r["vector_lanes_per_cycle"] for r in corun if r["vector"] == vector and r["n"] in (128, 192)]
        assert cycles == pytest.approx(128 / statistics.mean(lanes), rel=0.03), vector
    mix = [r["vector_lanes_per_cycle"] for r in corun if r["vector"] == "softmax_mix" and r["vector_groups"] == 3]
    port = 1.5 * inter.alu_port_cycles + inter.ffma_port_cycles + inter.fmul_port_cycles + inter.mufu_port_cycles
    assert port == pytest.approx(128 / statistics.mean(mix), rel=0.07)
    duty = [r for r in microbench("corun", "corun_duty") if r["n"] == 64 and r["vector_groups"] == 2]
    measured = statistics.median(r["mma_delay_per_vector_instr"] for r in duty if r["vector"] == "fmul")
    assert inter.fmul_delay_cycles == pytest.approx(measured, abs=0.1)


def test_a_softmax_beside_the_mma_takes_what_its_port_and_exponentials_take():
    """One warpgroup, in the order of the benchmark's SASS: 10 % on average, 25 % at most, as builds differ."""
    chip, errors = load_arch("h200"), []
    for row in microbench("softmax", "softmax_parts"):
        if (row["parts"], row["warpgroups"], row["stream"], row["build"]) != ("all", 1, "ss", 0):
            continue
        e = row["keys"] / 2
        blocks = [
            {"fmnmx": e + 4, "shfl": 4},
            {"ffma": e, "fmul": 32, "ex2": 0.2 * e, "fadd": 0.15 * e},
            {"ex2": 0.8 * e, "fadd": 0.85 * e, "f2fp": e / 2},
        ]
        demands = [cost.vector_demand(Vector("block", mix), chip, 4, 0.0) for mix in blocks]
        cycles = sum(d.beside.max() + d.stall[1] for d in demands) / im.TICKS
        errors.append((cycles + 2 * chip.sm.interference.shuffle_latency_cycles) / row["cycles"] - 1)
    assert len(errors) == 4
    assert max(map(abs, errors)) < 0.25 and statistics.mean(map(abs, errors)) < 0.1, errors


def test_mma_sync_interference_follows_from_the_corun_data():
    inter = load_arch("h100").sm.mma_sync_interference
    (alone,) = rows_of("h200_corun_hmma.csv", mma_warps_per_subcore="2", vec="none")
    stops = {"FFMA": inter.fma_mma_cycles, "FMNMX": inter.alu_mma_cycles, "MUFU.EX2": inter.mufu_mma_cycles}
    for vec, stop in stops.items():
        measured = []
        for row in rows_of("h200_corun_hmma.csv", mma_warps_per_subcore="2", vec=vec):
            cycles = float(row["cycles_per_hmma_per_subcore"])
            instructions = float(row["vec_lanes_per_clk_per_sm"]) / 128 * cycles
            measured.append((cycles - float(alone["cycles_per_hmma_per_subcore"])) / instructions)
        assert stop == pytest.approx(statistics.mean(measured), abs=0.015), vec


def test_overrides_are_typed_and_recorded():
    plain = load_arch("h100")
    arch = load_arch("h100", ["sm.mufu.ops_per_cycle=32", "title = what if", "clock.sustained_mhz.memory=1.5e3"])
    assert arch.sm.mufu.ops_per_cycle == 32
    assert arch.title == "what if"
    assert arch.clock.sustained_mhz["memory"] == 1500
    assert arch.overrides == ("sm.mufu.ops_per_cycle=32", "title = what if", "clock.sustained_mhz.memory=1.5e3")
    assert arch.digest == plain.digest
    assert arch.content_digest() != plain.content_digest()
    assert plain.content_digest() == plain.digest and plain.overrides == ()


def test_digest_sees_values_not_comments(tmp_path):
    same = load_arch(write(tmp_path, "x.toml", 'base = "h100"\nname = "h100"\ntitle = "NVIDIA H100 SXM5 80 GB"  # a'))
    assert same.digest == load_arch("h100").digest
    assert len({load_arch(name).digest for name in SHIPPED}) == len(SHIPPED)


def test_provenance_survives_pickling():
    arch = load_arch("h100", ["chip.sm_count=64"])
    again = pickle.loads(pickle.dumps(arch))
    assert again == arch and hash(again) == hash(arch)
    assert (again.source, again.digest, again.overrides) == (arch.source, arch.digest, arch.overrides)


def test_own_file_with_base(tmp_path):
    write(tmp_path, "fast.toml", 'base = "h100"\n[sm.mufu]\nops_per_cycle = 32\n')
    arch = load_arch(write(tmp_path, "faster.toml", 'base = "fast.toml"\n[chip]\nsm_count = 160\n'))
    assert (arch.name, arch.title) == ("faster", "faster")
    assert (arch.chip.sm_count, arch.sm.mufu.ops_per_cycle, arch.sm.mufu.latency_cycles) == (160, 32, 17)
    assert arch.source == str(tmp_path / "faster.toml")


@pytest.mark.parametrize(
    "override, message",
    [
        ("sm.mufu.thruput=3", "sm.mufu.thruput: unknown key (choices: latency_cycles, ops_per_cycle, other_ops"),
        ("sm.mufu.op_per_cycle=3", "sm.mufu.op_per_cycle: unknown key; did you mean 'ops_per_cycle'?"),
        ("smm.x=3", "smm: unknown key; did you mean 'sm'?"),
        ("sm.tensor.async_mma.knd=1", "sm.tensor.async_mma.knd: unknown key; did you mean 'kind'?"),
        ("sm.tensor.flops_per_cycle.fp18=3", "fp18: unknown key; did you mean 'fp8'? (choices: bf16, fp16, fp4"),
        ("sm.mufu.ops_per_cycle=fast", "sm.mufu.ops_per_cycle: expected a number, got 'fast'"),
        ("sm.mufu.ops_per_cycle=-1", "expected a number greater than 0, got -1"),
        ("sm.mufu.ops_per_cycle=inf", "expected a finite number, got inf"),
        ("sm.mufu=3", "sm.mufu: expected a table, got 3"),
        ("clock.sustained_mhz=3", "clock.sustained_mhz: expected a table, got 3"),
        ("chip.sm_count=1.5", "chip.sm_count: expected an integer, got 1.5"),
        ("architecture=ampre", "architecture: unknown value 'ampre'; did you mean 'ampere'?"),
        ("sm.tmem.columns=512", "sm.tmem.load_bytes_per_cycle: missing key (and 2 more)"),
        ("digest=0", "digest: unknown key"),
        ("source=0", "source: unknown key"),
        ("_provenance=0", "_provenance: unknown key"),
        ("base=a100", "base: can only be set in a file"),
        ("sm.mufu.ops_per_cycle", "expected path=value"),
        ("=3", "expected path=value"),
    ],
)
def test_bad_overrides(override, message):
    text = refused("h100", [override])
    assert message in text
    assert text.startswith("override ") and override in text


@pytest.mark.parametrize(
    "text, message",
    [
        (
            'base = "h100"\n[sm.mufu]\nop_per_cycle = 1',
            "x.toml: sm.mufu.op_per_cycle: unknown key; did you mean 'ops_p",
        ),
        ('base = "h100"\n[chip]\nsm_count = "many"', "x.toml: chip.sm_count: expected an integer, got 'many'"),
        ('bsae = "h100"', "x.toml: bsae: unknown key; did you mean 'base'?"),
        ("", "x.toml: architecture: missing key (and 8 more)"),
        ('base = "h10"', "x.toml: base: unknown architecture 'h10'; did you mean 'h100'?"),
        ('base = "none.toml"', "x.toml: base: "),
        ("base = 3", "x.toml: base: expected a string, got 3"),
        ('base = "x.toml"', "x.toml: base: cycle x.toml -> x.toml"),
        ('base = "h100"\nname =\n', "(at line 2, column 7)"),
        ('base = "h100"\ndigest = "0"', "x.toml: digest: unknown key"),
    ],
)
def test_bad_files(tmp_path, text, message):
    assert message in refused(write(tmp_path, "x.toml", text))


def test_blame_goes_to_the_file_with_the_key(tmp_path):
    write(tmp_path, "low.toml", 'base = "h100"\n[chip]\nsm_count = 0\n')
    assert refused(write(tmp_path, "high.toml", 'base = "low.toml"')).startswith("low.toml: chip.sm_count: ")


def test_files_that_cannot_be_read(tmp_path):
    assert "did you mean 'h100'" in refused("h10")
    assert "no such file" in refused(str(tmp_path / "none.toml"))
    assert "cannot read" in refused(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    assert "not UTF-8" in refused(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    "change, warning",
    [
        ('name = "other"', "name: 'other' differs"),
        ("[chip]\nsm_count = 100", "chip.datasheet_tflops.fp16: 989.4, but"),
        ("[chip.datasheet_tflops]\nfp4 = 1", "sm.tensor.flops_per_cycle has no fp4"),
        ("[clock]\nmax_mhz = 1900", "clock.sustained_mhz.memory: 1980 is above"),
        ("[clock]\nmax_mhz = 1700", "clock.datasheet_mhz: 1830 is above"),
        ("[sm.mufu]\nops_per_cycle = 18", "sm.mufu.ops_per_cycle: 18 does not divide"),
        ("[sm.smem]\nmax_cta_bytes = 233472", "sm.smem.max_cta_bytes: "),
        ("[sm.tensor]\nmma_sync_flops_per_cycle = 5000", "sm.tensor.mma_sync_flops_per_cycle: above"),
        ("[hbm]\nachieved_bytes_per_second = 4e12", "hbm.achieved_bytes_per_second: above"),
        ("[hbm]\nlatency_cycles = 100", "hbm.latency_cycles: below"),
        ('architecture = "ampere"', "sm.tma: unexpected"),
    ],
)
def test_sanity_warnings(tmp_path, change, warning):
    path = write(tmp_path, "x.toml", f'base = "h100"\n{change}\n')
    assert any(text.startswith(warning) or warning in text for text in check_arch(path))


def test_the_load_line_of_the_h200_is_that_of_its_forward_rows():
    """MHz against the achieved share of the dense tensor peak, robust least squares as the file says."""
    h200 = load_arch("h200")
    shares, clocks = [], []
    for row in rows_of("h200_timing.csv", direction="fwd"):
        if row["kernel"] == "cudnn" or float(row["ms"]) < 0.03:
            continue
        peak = h200.sm.tensor.flops_per_cycle[row["dtype"]] * h200.chip.sm_count
        share = float(row["tflops"]) * 1e9 * float(row["ms"]) / (float(row["cycles"]) * peak)
        if share > 0.1:
            shares.append(share)
            clocks.append(float(row["sm_clock_mhz"]))
    assert len(shares) == 89
    x, y = np.array(shares), np.array(clocks)
    found = least_squares(lambda c: c[0] - c[1] * x - y, (1900.0, 450.0), loss="soft_l1", f_scale=30.0).x
    line = h200.clock.attention
    assert line is not None
    assert (line.idle_mhz, line.drop_mhz) == pytest.approx(found, abs=2.5)
    assert np.mean(np.abs(line.mhz(x) / y - 1)) == pytest.approx(0.024, abs=0.001)
