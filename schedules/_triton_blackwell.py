"""The Triton tutorial on Blackwell: S, P and O in tensor memory, with and without warp specialisation."""

from __future__ import annotations

from collections.abc import Iterator

from fasim.kernels.blocks import kv_loops
from fasim.program.effects import Effect, Mask, Matmul, Move, Probabilities, Rescale, Round, RowMax, RowSum
from fasim.program.language import Barrier, Kernel, Role, arrived, committed, waited
from fasim.program.ops import add_mixes
from fasim.program.tiles import Smem, Tmem

from ._triton_parts import (
    MASK_PER_SCORE,
    SETUP,
    Config,
    barrier,
    cold,
    load_q,
    output_buffer,
    overhead,
    prefetch,
    store_output,
    tensors,
    wait_copy,
)


def _tcgen05(c: Role, cfg: Config, label: str, columns: int, depth: int, done: Barrier) -> None:
    """128 rows at a time; a tile of 64 rows takes as long, half of the datapath idles."""
    k = 32 // cfg.element
    effect = Matmul(Tmem("O"), Tmem("P"), Smem("V"), add=True)
    if label == "QK":
        effect = Matmul(Tmem("S", after=committed(done), back=-1), Smem("Q"), Smem("K"), transposed=True)
    c.mma(
        label, m=128, n=columns, k=k, count=depth // k * max(1, cfg.m // 128), a="smem" if label == "QK" else "tmem",
        dtype=cfg.mma_dtype, done=done, effects=(effect,),
    )  # fmt: skip


def _scores(c: Role, cfg: Config, masked: bool, done: Barrier, *more: Effect) -> None:
    """S from TMEM, its mask and row maximum, and what is done with it. ``done``: the barrier that QK completes at."""
    effect = Move(Tmem("S", after=waited(done)), "S")
    c.vector("load S", {"misc": 4}, tmem_load_bytes=4 * cfg.m * cfg.n, latency={"tmem": 1}, effects=(effect,))
    if masked:
        c.vector("mask", {"alu": MASK_PER_SCORE * cfg.scores}, effects=(Mask("S"),))
    mix = {"fmnmx": cfg.scores / 2 + 4, "fmul": cfg.thread_rows}
    c.vector("row max", mix, latency={"alu": 4, "fma": 1}, effects=(RowMax("S"), *more))


def _probabilities(c: Role, cfg: Config) -> None:
    e, r = cfg.scores, cfg.thread_rows
    mix = add_mixes({"ffma": e + r, "ex2": e + r, "ffma2": e / 2}, cfg.convert)
    effects = Probabilities("S"), RowSum("S"), Round("S", "P", cfg.formats[0])
    c.vector("exp, sum, P", mix, latency={"ex2": 1, "fma": 1}, effects=effects)


def _p_to_tmem(c: Role, cfg: Config) -> None:
    c.vector("store P", {"misc": 4}, tmem_store_bytes=cfg.element * cfg.m * cfg.n, effects=(Move("P", Tmem("P")),))


def _rescale(c: Role, cfg: Config) -> None:
    """O out of TMEM, times exp2(old maximum - new), and back."""
    nbytes = 4 * cfg.m * cfg.dv
    c.vector("load O", {"misc": 4}, tmem_load_bytes=nbytes, latency={"tmem": 1})
    mix = {"fmul": cfg.outputs, "misc": 4}
    c.vector("rescale O", mix, tmem_store_bytes=nbytes, effects=(Rescale(Tmem("O")),))


def _load_output(c: Role, cfg: Config) -> None:
    effects = (Move(Tmem("O"), "O"),)
    c.vector("load O", {"misc": 4}, tmem_load_bytes=4 * cfg.m * cfg.dv, latency={"tmem": 1}, effects=effects)


def _tmem(k: Kernel, cfg: Config, buffers: int) -> None:
    """Columns for ``buffers`` S of FP32, P and O, allocated as a power of two."""
    rows = max(1, cfg.m // 128)
    s = k.region("S", 0, rows * cfg.n, buffers)
    p = k.region("P", s.stages * s.columns, rows * cfg.n * cfg.element // 4)
    o = k.region("O", p.first + p.columns, rows * cfg.dv)
    columns = o.first + o.columns
    k.tmem_columns = 1 << (columns - 1).bit_length()


def blackwell(k: Kernel, cfg: Config) -> None:
    """All warps in step; PV of this block and QK of the next are issued together, after the softmax."""
    q, key, value, o = tensors(k, cfg)
    _tmem(k, cfg, 1)
    k.smem("Q", q.line_bytes)
    full = {}
    for tensor in (key, value):
        k.smem(tensor.name, tensor.line_bytes, cfg.stages)
        full[tensor.name] = k.barrier(f"{tensor.name}.full", 1, cfg.stages)
    output_buffer(k, q, o)
    s_full, pv_done = k.barrier("S.full", 1), k.barrier("PV.done", 1)
    with k.role("program", warps=cfg.warps, registers=255) as c, c.tiles():
        load_q(c, cfg, q)
        for region, masked in kv_loops(k.tiles, ascending=True):
            for tensor, trips in ((value, "ahead"), (key, "buffers")):
                with c.loop(f"{region} {trips}", "prefetch"):
                    prefetch(c, cfg, tensor, full)
            with c.loop(f"{region} any", "first QK"):
                wait_copy(c, cfg, "K", full)
                _tcgen05(c, cfg, "QK", cfg.n, cfg.d, s_full)
            # QK of a block is complete one iteration before its PV, so K is copied one block further ahead than V
            for trips, copied in (("both", (value, key)), ("last V", (value,)), ("drain", ()), ("any", ())):
                with c.loop(f"{region} {trips}", region):
                    c.wait_barrier(s_full, reason="dependency", label="wait QK")
                    _scores(c, cfg, masked, s_full)
                    _probabilities(c, cfg)
                    c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
                    wait_copy(c, cfg, "V", full)
                    _p_to_tmem(c, cfg)
                    _rescale(c, cfg)
                    barrier(c, cfg)
                    _tcgen05(c, cfg, "PV", cfg.dv, cfg.n, pv_done)
                    if trips != "any":
                        wait_copy(c, cfg, "K", full)
                        _tcgen05(c, cfg, "QK", cfg.n, cfg.d, s_full)
                    for tensor in copied:
                        barrier(c, cfg)
                        prefetch(c, cfg, tensor, full)
                    overhead(c, cfg)
        c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
        _load_output(c, cfg)
        store_output(c, cfg, o)


def blackwell_specialized(k: Kernel, cfg: Config) -> None:
    """The compiler's four partitions; S is double-buffered, so that QK runs ahead of the softmax."""
    q, key, value, o = tensors(k, cfg)
    _tmem(k, cfg, 2)
    k.launch_registers = 168
    q_ring = k.ring(q, q.line_bytes, 1, consumers=1, boxes=-(-cfg.d // 64))
    full = {}
    for tensor in (key, value):
        k.smem(tensor.name, tensor.line_bytes, cfg.stages)
        full[tensor.name] = k.barrier(f"{tensor.name}.full", 1, cfg.stages)
    output_buffer(k, q, o)
    k.smem("alpha", 4 * cfg.m, 2)  # the correction may be a block behind
    qk_done, pv_done = k.barrier("QK.done", 1), k.barrier("PV.done", 1)
    s_free, p_full, maximum, o_ready = (k.barrier(name, 1) for name in ("S.free", "P.full", "maximum", "O.ready"))
    regions = k.barrier("region", 4, named=True)

    def loops(role: Role, *trips: str) -> Iterator[tuple[bool, str]]:
        """The loops over KV blocks: are they masked? Each is a region of its own, at whose end the partitions meet."""
        for region, masked in kv_loops(k.tiles, ascending=True):
            for name in trips:
                with role.loop(f"{region} {name}".strip(), region):
                    yield masked, name
            role.sync(regions, label="end of region")

    with k.role("load", warps=1, registers=24) as p, p.tiles():
        p.load(q_ring)
        for _, trips in loops(p, "primed", "rest", "last"):
            if trips != "primed":
                p.wait_barrier(pv_done, reason="empty", ahead=cfg.stages, label="wait V free")
                prefetch(p, cfg, value, full)
            if trips != "last":
                p.wait_barrier(qk_done, reason="empty", ahead=cfg.stages, label="wait K free")
                prefetch(p, cfg, key, full)
    with k.role("mma", warps=1, registers=24) as t, t.tiles():
        t.wait(q_ring)
        for _, trips in loops(t, "primed", "rest", "last"):
            if trips != "primed":
                wait_copy(t, cfg, "V", full)
                t.wait_barrier(o_ready, reason="full")
                t.wait_barrier(p_full, reason="full")
                _tcgen05(t, cfg, "PV", cfg.dv, cfg.n, pv_done)
            if trips != "last":
                wait_copy(t, cfg, "K", full)
                t.wait_barrier(s_free, reason="empty", ahead=2)
                _tcgen05(t, cfg, "QK", cfg.n, cfg.d, qk_done)
        t.release(q_ring)
    with k.role("correction", warps=4, registers=168) as c, c.tiles():
        for _ in loops(c, ""):
            c.wait_barrier(maximum, reason="full")
            alpha = (Move(Smem("alpha", after=waited(maximum)), "alpha"),)
            c.vector("scale", {"fadd": 1, "ex2": 1}, latency={"smem": 1, "ex2": 1}, effects=alpha)
            c.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
            _rescale(c, cfg)
            c.arrive(o_ready)
    with k.role("softmax", warps=cfg.warps, registers=168) as s, s.tiles():
        cold(s, "setup", SETUP)
        for masked, _ in loops(s, ""):
            s.wait_barrier(qk_done, reason="full", label="wait QK")
            alpha = Move("alpha", Smem("alpha", after=arrived(maximum), back=-1))
            _scores(s, cfg, masked, qk_done, alpha)
            s.arrive(s_free)
            s.arrive(maximum)
            _probabilities(s, cfg)
            s.wait_barrier(pv_done, reason="empty", ahead=1, label="wait P free")
            _p_to_tmem(s, cfg)
            s.arrive(p_full)
        s.wait_barrier(pv_done, reason="dependency", ahead=1, label="wait PV")
        _load_output(s, cfg)
        store_output(s, cfg, o)
