"""The toy chip of ``toy.toml``, a way to read what happened on it, and random small programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
from hypothesis import strategies as st

from fasim.arch import Arch, load_arch
from fasim.engine import compiled, reference
from fasim.engine import image as im
from fasim.engine.common import TraceWindow
from fasim.engine.image import Image, RawResult
from fasim.errors import FasimError
from fasim.lowering.lower import lower
from fasim.problem import Problem
from fasim.program.language import Kernel, Ring, Role
from fasim.program.ops import BarrierUse, Copy
from fasim.results.reasons import REASONS, UNIT_SLICE

TOY_MHZ = 1000.0


@cache
def toy_arch(*overrides: str) -> Arch:
    """The chip of ``toy.toml``: one SM, round numbers, no interference; ``overrides`` as in ``load_arch``."""
    return load_arch(Path(__file__).with_name("toy.toml"), overrides)


def kernel(arch: Arch, *, tiles: int = 1, trips: int | Sequence[int] = 1, **options: object) -> Kernel:
    """An empty kernel of ``tiles`` work tiles with the columns trips, own (one line each) and shared (line 0).

    One CTA per SM unless ``options`` (of ``Kernel``) say otherwise.
    """
    k = Kernel("toy", Problem(), arch, {}, **{"max_ctas_per_sm": 1, **options})  # type: ignore[arg-type]
    k.tiles = {
        "trips": np.resize(np.array(trips, dtype=np.int64), tiles),
        "own": np.arange(tiles, dtype=np.int64),
        "shared": np.zeros(tiles, dtype=np.int64),
    }
    return k


# --- running ---------------------------------------------------------------------------------------
def everything(image: Image) -> TraceWindow:
    """All slices of all SMs."""
    sms = image.machine.groups * image.machine.cluster
    return TraceWindow(tuple(range(sms)), (0, 2**62), 100_000)


def comparable(raw: RawResult) -> dict[str, object]:
    """A result as plain data that ``==`` compares."""
    values = {field.name: getattr(raw, field.name) for field in fields(raw)}
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}


def outcome(engine: ModuleType, image: Image, window: TraceWindow | None = None) -> dict[str, object] | str:
    """What an engine makes of an image: its result as plain data, or the text of its error."""
    try:
        return comparable(engine.run(image, window or everything(image)))
    except FasimError as error:
        return str(error)


def both(k: Kernel, clock_mhz: float = TOY_MHZ) -> RawResult:
    """Run ``k`` on both engines, which must agree in everything."""
    image = lower(k, clock_mhz)
    assert outcome(reference, image) == outcome(compiled, image)
    return compiled.run(image, everything(image))


def cycles(k: Kernel) -> float:
    return both(k).ticks / im.TICKS


def log(k: Kernel, *, sm: int | None = None, units: bool = True, causes: bool = False) -> list[str]:
    """What happened, one line a slice in order of start: ``"100-104 producer: load K (issue)"``.

    With ``causes`` each line that was released ends in the one it was released by, after an arrow.
    """
    trace = both(k).trace.tolist()
    lines = _lines(lower(k, TOY_MHZ), trace, sm)
    shown = []
    for line, row in zip(lines, trace, strict=True):
        if (sm is not None and row[im.T_SM] != sm) or (row[im.T_KIND] == UNIT_SLICE and not units):
            continue
        released = causes and row[im.T_CAUSE] != im.NO_CAUSE
        shown.append(f"{line} <- {lines[row[im.T_CAUSE]]}" if released else line)
    return shown


def _lines(image: Image, trace: list[list[int]], sm: int | None) -> list[str]:
    tracks = [*image.agents, "tensor", "tma"]
    lines = []
    for row in trace:
        kind = row[im.T_KIND]
        start, end = (f"{row[column] / im.TICKS:g}" for column in (im.T_START, im.T_END))
        where = f"SM{row[im.T_SM]} " if sm is None and image.machine.groups * image.machine.cluster > 1 else ""
        where += f"slot{row[im.T_SLOT]} " if image.machine.slots > 1 else ""
        what = f" ({REASONS[kind]})" if kind != UNIT_SLICE else ""
        lines.append(f"{start}-{end} {where}{tracks[row[im.T_TRACK]]}: {image.names[row[im.T_NAME]]}{what}")
    return lines


# --- random programs -------------------------------------------------------------------------------
VARIED = {
    "sm.tensor.async_mma.max_in_flight": (1, 2, 7),
    "sm.sync.mbarrier_wake_cycles": (0, 10),
    "sm.sync.mbarrier_try_cycles": (0, 5),
    "sm.sync.named_barrier_cycles": (0, 6),
    "sm.tma.multicast_extra_cycles": (0, 20),
    "sm.interference.alu_cycles": (2, 4.4),
    "sm.interference.mufu_port_cycles": (0, 6),
    "sm.interference.ex2_wait_cycles": (0, 1.5),
    "sm.interference.fmul_stop_cycles": (0, 1),
    "sm.interference.ffma_delay_cycles": (0, 1, 2.5),
    "sm.interference.alu_delay_cycles": (0, 0.3),
    "sm.interference.absorbed_per_cycle": ([0], [0.1]),
    "sm.interference.absorbed_ahead_cycles": (0, 70),
    "sm.issue.stall_cycles": (0, 0.24),
    "l2.capacity_bytes": (4096,),
    "l2.partitions": (1, 2, 3),
    "l2.coalescers": (0, 1, 2),
    "launch.ramp_ns": (0,),
    "launch.cta_dispatch_ns": (0,),
    "launch.cta_turnover_cycles": (0,),
}
MIXES = (
    {"ffma": 7},
    {"fmnmx": 9.5, "shfl": 2},
    {"ex2": 8, "ffma": 16, "f2fp": 4},
    {"misc": 3},
    {"sts": 4},
    {"ex2": 40, "fadd": 40, "alu": 20},
    {},
)


@dataclass(frozen=True)
class Step:
    """One local operation of a role: nothing another role waits for."""

    kind: str
    size: int

    def record(self, role: Role, k: Kernel) -> None:
        if self.kind == "vector":
            role.vector("vector", MIXES[self.size % len(MIXES)], latency={"shfl": self.size % 3}, smem_bytes=0)
        elif self.kind == "smem":
            role.vector("smem", {"lds": self.size}, smem_bytes=300.0 * self.size, latency={"smem": 1})
        elif self.kind == "hmma":
            role.vector("hmma", {"ffma": 2}, mma_sync_flops=20_000.0 * self.size)
        elif self.kind == "mma":
            a = "smem" if self.size % 2 else "register"
            role.mma("mma", m=64, n=32 * self.size, k=16, count=self.size, a=a)
        elif self.kind == "wait_mma":
            role.wait_mma(self.size % 3)
        elif self.kind == "delay":
            role.delay("delay", 3.3 * (self.size - 1))
        elif self.kind in ("gather", "store", "reduce"):
            kind = {"gather": "load"}.get(self.kind, self.kind)
            engine = "threads" if self.kind == "gather" or self.size % 2 else "tma"
            role.copy(self.kind, k.find_tensor("X"), 256 * self.size, kind, engine)  # type: ignore[arg-type]
        else:
            role.wait_copies("load" if self.size % 2 else "store")


KINDS = ("vector", "smem", "hmma", "mma", "wait_mma", "delay", "gather", "store", "reduce", "wait_copies")
steps = st.lists(st.builds(Step, st.sampled_from(KINDS), st.integers(1, 6)), max_size=3)


@dataclass(frozen=True)
class Plan:
    """A random program in the shape of an attention kernel, free of deadlock by construction.

    A producer fills rings; consumers take every ring in turn, pass turns and meet at an epilogue; an
    issuer role may run MMAs for them and signal a barrier (tcgen05), for a pair of CTAs in a cluster.
    """

    overrides: tuple[str, ...]
    sms: int
    cluster: int
    mode: str
    ctas: int
    tiles: int
    trips: tuple[int, ...]
    consumers: int
    stages: tuple[int, ...]  # one ring each
    multicast: bool
    turns: bool
    inner: int
    issuer: str  # "", "own" or "pair"
    body: tuple[tuple[Step, ...], ...]
    epilogue: tuple[Step, ...]

    def build(self, *changes: str) -> Kernel:
        """The kernel on the plan's chip, with further ``changes`` to it."""
        arch = toy_arch(f"chip.sm_count={self.sms * self.cluster}", *self.overrides, *changes)
        trips = np.repeat(np.resize(self.trips, self.tiles), self.cluster)
        k = kernel(
            arch,
            tiles=self.tiles * self.cluster,
            trips=trips.tolist(),
            cluster=self.cluster,
            mode=self.mode,
            max_ctas_per_sm=self.ctas,
        )
        share = self.cluster if self.multicast else 1
        x = k.tensor("X", k.tile_count + 40, 512, "own", 1)
        rings: list[Ring] = []
        for i, stages in enumerate(self.stages):
            tensor = k.tensor(f"R{i}", 64, 1024, "shared", 1 + i)
            rings.append(k.ring(tensor, 1024, stages, consumers=self.consumers, multicast=share > 1))
        turn = k.turns("turn", self.consumers)
        meet = k.barrier("meet", self.consumers, named=True)
        pair = self.issuer == "pair" and self.cluster > 1
        go = k.barrier("go", self.consumers)
        done = k.barrier("done", self.cluster if pair else 1)
        with k.role("producer", warps=1, registers=24) as p, p.tiles(draws=True), p.loop("trips"):
            for ring in rings:
                p.load(ring)
        with k.role("consumer", warpgroups=self.consumers, registers=64) as c, c.tiles():
            with c.loop("trips"):
                for ring, local in zip(rings, self.body, strict=True):
                    c.wait(ring)
                    if self.turns:
                        c.wait_barrier(turn, "own")
                    with optional_loop(c, self.inner):
                        for step in local:
                            step.record(c, k)
                    if self.turns:
                        c.arrive(turn, "next")
                    if self.issuer:
                        c.arrive(go)
                        c.wait_barrier(done, reason="dependency")
                    c.release(ring)
            for step in self.epilogue:
                step.record(c, k)
            c.wait_mma()  # nothing is left in flight when the role ends
            c.wait_copies("load")
            c.sync(meet)
            with c.only(-1):
                c.copy("out", x, 512, "store")
                c.wait_copies("store")
            with c.only(-1, others=True):
                c.vector("rest", {"alu": 4})
        if self.issuer:
            with k.role("issuer", warps=1, registers=24) as i, i.tiles():
                with i.loop("trips"):
                    for _ in rings:
                        i.wait_barrier(go, reason="full")
                        i.mma("umma", m=64, n=64, k=16, count=2, two_cta=pair, done=done)
                i.wait_mma()
        return k


@contextmanager
def optional_loop(role: Role, trips: int) -> Iterator[None]:
    if trips == 1:
        yield
    else:
        with role.loop(trips):
            yield


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    overrides = tuple(f"{key}={draw(st.sampled_from(v))}" for key, v in VARIED.items() if draw(st.booleans()))
    stages = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    body = tuple(tuple(draw(steps)) for _ in stages)
    cluster = draw(st.sampled_from((1, 2)))
    return Plan(
        overrides=overrides,
        sms=draw(st.integers(1, 3)),
        cluster=cluster,
        mode=draw(st.sampled_from(("single", "static", "dynamic"))),
        ctas=draw(st.integers(1, 2)),
        tiles=draw(st.integers(1, 8)),
        trips=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))),
        consumers=draw(st.integers(1, 3)),
        stages=stages,
        multicast=cluster > 1 and draw(st.booleans()),
        turns=draw(st.booleans()),
        inner=draw(st.sampled_from((1, 1, 2))),
        issuer=draw(st.sampled_from(("", "", "own", "pair"))),
        body=body,
        epilogue=tuple(draw(steps)),
    )


# --- programs with no shape at all: most of them deadlock ------------------------------------------------
@dataclass(frozen=True)
class Chaos:
    """Roles that arrive and wait at barriers as chance has it."""

    arrivals: tuple[int, ...]  # of each barrier
    stages: tuple[int, ...]
    mode: str
    cluster: int
    tiles: int
    ctas: int
    draws: tuple[bool, ...]  # one a role
    ops: tuple[tuple[tuple[str, int, str], ...], ...]  # one a role: what, barrier, scope

    def build(self) -> Kernel:
        k = kernel(
            toy_arch(f"chip.sm_count={2 * self.cluster}"),
            tiles=self.tiles * self.cluster,
            cluster=self.cluster,
            mode=self.mode,
            max_ctas_per_sm=self.ctas,
        )
        x = k.tensor("X", k.tile_count + 20, 512, "own", 1)
        bars = [k.barrier(f"b{i}", n, s) for i, (n, s) in enumerate(zip(self.arrivals, self.stages, strict=True))]
        for i, (draws, ops) in enumerate(zip(self.draws, self.ops, strict=True)):
            with k.role(f"r{i}", warps=1, count=2, registers=24) as r:
                with r.tiles(draws=draws):
                    for what, which, scope in ops:
                        bar = bars[which % len(bars)]
                        if what == "arrive":
                            r.arrive(bar, scope=scope)  # type: ignore[arg-type]
                        elif what == "wait":
                            r.wait_barrier(bar, ahead=which % 2)
                        elif what == "copy":
                            use = BarrierUse(bar.name, bar.stages)
                            r.record(Copy("copy", x.name, 256, "load", "tma", use, scope == "cluster"))
                        else:
                            r.delay("delay", 10 * which)
                for bar in bars:
                    r.arrive(bar)
        return k


@st.composite
def chaos(draw: st.DrawFn) -> Chaos:
    arrivals = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    op = st.tuples(
        st.sampled_from(("arrive", "wait", "copy", "delay")),
        st.integers(0, 5),
        st.sampled_from(("cta", "cluster", "leader")),
    )
    ops = tuple(tuple(o) for o in draw(st.lists(st.lists(op, max_size=4), min_size=1, max_size=3)))
    return Chaos(
        arrivals=arrivals,
        stages=tuple(draw(st.integers(1, 2)) for _ in arrivals),
        mode=draw(st.sampled_from(("single", "static", "dynamic"))),
        cluster=draw(st.sampled_from((1, 2))),
        tiles=draw(st.integers(1, 4)),
        ctas=draw(st.integers(1, 2)),
        draws=tuple(draw(st.booleans()) for _ in ops),
        ops=ops,
    )
