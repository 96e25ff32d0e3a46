"""Programs in Triton's sense: a CTA per query tile, whose warps move in step between barriers.

The tile and what it needs of a thread, the grid, copies that run ahead of a software-pipelined loop, straight-line code
before and after it, and the output. Where the scores are decides the rest: :mod:`programs_registers` (mma.sync and
wgmma) or :mod:`programs_tmem` (tcgen05).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, NamedTuple

import numpy as np

from fasim.arch import Arch
from fasim.errors import ConfigError
from fasim.kernels.blocks import BlockInfo
from fasim.kernels.grid import in_order, kv_lines, longest_first
from fasim.kernels.layouts import kv_layout, query_layout
from fasim.kernels.mma_sync import syncthreads
from fasim.kernels.softmax import ACCESS_BYTES
from fasim.problem import Problem
from fasim.problem.masks import IntArray
from fasim.program.builds import Build
from fasim.program.effects import Effect, Load, Move, Normalise, Round, Store
from fasim.program.language import Barrier, Kernel, Role, Shape, Smem, Tensor, Tile
from fasim.program.ops import CopyEngine, Mix, scale_mix
from fasim.program.tiles import operand_format

#: Sizes of tiles and heads that exist.
SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Knobs:
    """What can be changed; None is what the real kernel picks. The first four are the space of autotune."""

    tile_m: Annotated[int | None, "query rows of a program; default: what autotune picks"] = None
    tile_n: Annotated[int | None, "keys per iteration; default: what autotune picks"] = None
    stages: Annotated[int | None, "depth of the software pipeline; default: what autotune picks"] = None
    warps: Annotated[int | None, "warps of a program, 4 or 8; default: what autotune picks"] = None
    warp_specialize: Annotated[bool | None, "loads, MMA and softmax in warps of their own; default: on Blackwell"] = (
        None
    )
    copies: Annotated[
        Literal["threads", "tma"] | None, "who copies K and V: cp.async or TMA; default: cp.async up to Hopper"
    ] = None
    longest_first: Annotated[bool, "causal: start with the last block of a head (the tutorial does not)"] = False


@dataclass(frozen=True)
class Program:
    """What a program does for a problem, every choice made.

    ``m`` queries of head dimension ``d``, blocks of ``n`` keys, values of dimension ``dv``; ``engine`` copies.
    """

    problem: Problem
    arch: Arch
    build: Build
    m: int
    n: int
    d: int
    dv: int
    stages: int
    warps: int
    engine: CopyEngine

    @property
    def format(self) -> str:
        """Number format of Q, K, V and P."""
        return operand_format(self.problem.dtype)

    @property
    def output_format(self) -> str:
        """Number format of O."""
        return "bf16" if self.problem.dtype == "fp8" else self.problem.dtype

    @property
    def tma(self) -> bool:
        """Whether TMA copies, else the threads do."""
        return self.engine == "tma"

    @property
    def wgmma(self) -> bool:
        """Whether warpgroups multiply, each 64 rows at a time."""
        return self.arch.architecture == "hopper"

    @property
    def rows(self) -> int:
        """Rows a warpgroup computes; with fewer than 64 each, two warpgroups compute the same scores."""
        return max(4 * self.m // self.warps, min(64, self.m)) if self.wgmma else self.m

    @property
    def scores(self) -> float:
        """Scores per thread and block."""
        return self.rows * self.n / 128 if self.wgmma else self.m * self.n / (32 * self.warps)

    @property
    def outputs(self) -> float:
        """Elements of O per thread."""
        return self.m * self.dv / (32 * self.warps)

    def mix(self, name: str) -> Mix:
        """The build's instructions ``name`` per thread, in a block of K and V, or in a program where outside the loops.

        A thread keeps maximum and sum of rows of which it has every fourth score; tcgen05 gives it whole rows.
        """
        rows = max(1.0, self.m / 128) if self.arch.architecture == "blackwell" else self.scores * 4 / self.n
        times = dict(score=self.scores, row=rows, output=self.outputs, block=1.0, program=1.0)
        return self.build.total(name, **{kind: times[kind] for kind in self.build.kinds(name)})

    @property
    def convert(self) -> Mix:
        """P to operands of PV, instructions per thread and block."""
        return scale_mix(self.build.mix("convert", "fp8" if self.problem.dtype == "fp8" else "16 bit"), self.scores)


def choose(problem: Problem, arch: Arch, build: Build, knobs: Knobs, engine: CopyEngine) -> Program:
    """The program that autotune or ``knobs`` pick. Raises ConfigError for tiles that the compiler has no code for."""
    d, dv, fp8 = problem.head_dim, problem.head_dim_v, problem.dtype == "fp8"
    _check(d in SIZES and dv in SIZES, f"head_dim {d}, head_dim_v {dv}: powers of two from 16 to 256 exist")
    row = build.tile(problem)
    m, n = knobs.tile_m or row.tile_m, knobs.tile_n or row.tile_n
    stages, warps = knobs.stages or row.stages or 2, knobs.warps or row.warps or 4
    for knob, value in (("tile_m", m), ("tile_n", n)):
        _check(value in SIZES, f"{knob} {value}: powers of two from 16 to 256 exist")
    _check(warps in (4, 8), f"warps {warps}: 4 or 8")
    _check(stages >= 2, f"stages {stages}: at least 2, the pipeline loads ahead")
    has_fp8 = "fp8" in arch.sm.tensor.flops_per_cycle
    _check(has_fp8 or not fp8, f"{arch.name} has no FP8 tensor rate: bf16 and fp16 exist")
    _check(min(d, dv, n) >= 32 or not fp8, "fp8: head_dim, head_dim_v and tile_n below 32 are no whole MMA")
    asynchronous = arch.architecture != "ampere"
    _check(m >= 64 or not asynchronous, f"tile_m {m}: {arch.name}'s asynchronous MMA has at least 64 rows")
    return Program(problem, arch, build, m, n, d, dv, stages, warps, engine)


def _check(fine: bool, message: str) -> None:
    if not fine:
        raise ConfigError(f"triton: {message}")


# --- grid and operands ----------------------------------------------------------------------------------------------


def begin(p: Program, knobs: Knobs, specialized: bool) -> Kernel:
    """A kernel without roles. Its tile table: query tile fastest, then head and batch; trip counts of loops' parts.

    ``longest_first``: under a causal mask each head begins with its last tile, the one with the most keys.
    """
    chosen = replace(knobs, tile_m=p.m, tile_n=p.n, stages=p.stages, warps=p.warps, copies=p.engine)
    chosen = replace(chosen, warp_specialize=specialized)
    k = Kernel(p.build.schedule, p.problem, p.arch, {**asdict(chosen), "build": p.build.name})
    cut = BlockInfo(p.problem, p.m, p.n)
    tiles = longest_first(cut) if knobs.longest_first and p.problem.causal else in_order(cut)
    blocks = cut.kv_blocks(tiles)
    k.tiles = {"q": cut.q_line(tiles), "kv": kv_lines(cut, tiles, blocks.lowest)}
    for region, trips in blocks.columns(ascending=True).items():
        k.tiles |= {f"{region}{part}": count for part, count in _pipeline(trips, p.stages).items()}
    return k


def _pipeline(trips: IntArray, stages: int) -> dict[str, IntArray]:
    """Trip counts of the parts of a software-pipelined loop of ``trips`` iterations.

    ``ahead``: blocks copied before the loop begins, and iterations after the last copy. ``buffers``: blocks of K copied
    before the loop where K runs one further ahead. ``primed``: blocks whose QK runs before the loop when S has two
    buffers.
    """
    ahead = np.minimum(trips, stages - 1)
    buffers, primed, first = (np.minimum(trips, most) for most in (stages, 2, 1))
    parts = {"": trips, " ahead": ahead, " steady": trips - ahead, " buffers": buffers, " both": trips - buffers}
    parts |= {" last V": buffers - ahead, " any": first, " drain": ahead - first}
    return parts | {" primed": primed, " rest": trips - primed, " last": primed}


class Operand(NamedTuple):
    """A tensor in global memory, and what of it is in shared memory at a time."""

    tensor: Tensor
    shape: Shape


def operands(k: Kernel, p: Program) -> tuple[Operand, Operand, Operand, Tensor]:
    """Declare Q, K, V and O; a line is one copy's worth."""
    cut = BlockInfo(p.problem, p.m, p.n)
    lines = cut.kv_pairs * cut.n_blocks
    q, keys, values = (Shape(rows, d, p.format) for rows, d in ((p.m, p.d), (p.n, p.d), (p.n, p.dv)))
    o = Shape(p.m, p.dv, p.output_format)
    return (
        Operand(k.tensor("Q", k.tile_count, q.bytes, "q", layout=query_layout(cut, p.d)), q),
        Operand(k.tensor("K", lines, keys.bytes, "kv", 1, kv_layout(cut, p.d)), keys),
        Operand(k.tensor("V", lines, values.bytes, "kv", 1, kv_layout(cut, p.dv)), values),
        k.tensor("O", k.tile_count, o.bytes, "q", layout=query_layout(cut, p.dv)),
    )


def registers(p: Program, role: str) -> int:
    """Registers per thread of a role, by the build."""
    return int(p.build.cost("registers", role))


def q_tile(p: Program) -> Tile:
    """Q in shared memory."""
    return Tile(Smem("Q"), Shape(p.m, p.d, p.format))


def output_buffer(k: Kernel, q: Operand, o: Tensor) -> None:
    """Where O passes on its way out: in the space of Q, or of K where it does not fit."""
    k.smem("O", o.line_bytes, aliases="Q" if o.line_bytes <= q.shape.bytes else "K")


# --- what a program does --------------------------------------------------------------------------------------------


def cold(c: Role, p: Program, label: str, code: str, effects: tuple[Effect, ...] = ()) -> None:
    """Straight-line code that runs once, the build's instructions ``code``: bound by fetch and dependent chains."""
    c.delay(label, p.build.cost("cold") * sum(p.mix(code).values()), "work", effects=effects)


def sync_warps(c: Role, p: Program) -> None:
    """__syncthreads of the program's warps, which arrive together."""
    syncthreads(c, p.arch, "barrier")


def load_q(c: Role, p: Program, q: Operand) -> None:
    """Q by ordinary loads and through registers into shared memory, or by TMA."""
    cold(c, p, "setup", "setup")
    nbytes = q.shape.bytes
    c.copy("load Q", q.tensor, nbytes, "load", p.engine, effects=(Load(Smem("Q") if p.tma else "Q"),))
    c.wait_copies("load", "wait Q")
    if not p.tma:
        mix: Mix = {"sts": nbytes / (ACCESS_BYTES * c.warps)}
        whole = (Move("Q", Smem("Q", share=(0, 1))),)
        c.vector("store Q", mix, smem_bytes=nbytes, latency={"smem": 1}, effects=whole)
    sync_warps(c, p)


def overhead(c: Role, p: Program) -> None:
    """What an iteration takes besides softmax and MMA."""
    c.vector("loop overhead", p.mix("overhead"))
    if cycles := p.build.cost("loop"):
        c.delay("branch, fences", cycles)


def store_output(c: Role, p: Program, o: Tensor, together: Barrier | None = None) -> None:
    """1/l, O to 16 bit, through shared memory and out; the program ends without waiting for plain stores.

    ``together``: the barrier of the instances that share the tile, of which the last one stores.
    """
    share = o.line_bytes / c.count
    done = Normalise("O"), Round("O", "O", p.output_format), Store("lse", "O", array="LSE")
    cold(c, p, "1/l, scale O", "output", done)
    mix: Mix = {"sts": share / (ACCESS_BYTES * c.warps)}
    c.vector("O to SMEM", mix, smem_bytes=share, latency={"smem": 1}, effects=(Move("O", Smem("O")),))
    if together is None:
        sync_warps(c, p)
    else:
        c.sync(together, label="O complete")
    if not p.tma:
        mix, rows = {"lds": share / (ACCESS_BYTES * c.warps)}, (Move(Smem("O", share=(0, 1)), "rows of O"),)
        c.vector("O from SMEM", mix, smem_bytes=share, latency={"smem": 1}, effects=rows)
    with c.only(-1):
        store = (Store(Smem("O") if p.tma else "rows of O"),)
        c.copy("store O", o, o.line_bytes, "store", p.engine, boxes=-(-p.dv // 64), effects=store)
        if p.tma:
            c.wait_copies("store", "wait O store")
