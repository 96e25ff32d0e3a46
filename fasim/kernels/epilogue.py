"""What a consumer warpgroup does after its last block: row sums, O / l, and O on its way to memory."""

from __future__ import annotations

from fasim.kernels.forward import Forward
from fasim.kernels.softmax import ACCESS_BYTES
from fasim.program.effects import Add, Effect, Move, Normalise, Round, Store
from fasim.program.language import Barrier, Role, Smem, Tensor
from fasim.program.ops import CopyEngine, Mix, scale_mix


def normalise(c: Role, f: Forward) -> None:
    """Row sums across the quad, their reciprocals, O / l and its log-sum-exp, O to 16 bit."""
    c.vector("row sum", f.build.mix("row_sum"), latency={"shfl": 2, "fma": 2, "ex2": 2})
    effects: tuple[Effect, ...] = (Add("O", "PV"),) if f.two_level else ()
    effects += (Normalise("O"),)
    if f.output == "partial":  # each warpgroup stores its own rows of a split's share
        effects += (Store("O", "O.partial"), Store("lse", "O.partial", array="LSE.partial"))
    else:
        effects += (Round("O", "O", f.output_format), Store("lse", "O", array="LSE"))
    converted = 0.0 if f.output == "partial" else f.dv / 4
    c.vector("scale O", {"fmul": f.dv / 2, "f2fp": converted}, latency={"fma": 1}, effects=effects)


def stage(c: Role, f: Forward) -> None:
    """A warpgroup's rows of O into shared memory, and a proxy fence so that TMA sees them."""
    nbytes = 2 * 64 * f.dv
    mix: Mix = {"sts": nbytes / ACCESS_BYTES / 4}
    c.vector("store O", mix, smem_bytes=nbytes, effects=(Move("O", Smem("O")),))
    c.delay("fence O", f.build.cost("fence_o"))


def fetch(c: Role, f: Forward) -> None:
    """The code after the loop is fetched anew for every tile."""
    c.delay("instruction fetch", f.build.cost("fetch", "after"), "issue")


def store_by_last(c: Role, f: Forward, done: Barrier, staged: Barrier, o: Tensor, free: Barrier) -> None:
    """FA3: O goes through the space of V; the last warpgroup sends it by TMA, or all threads do.

    ``done``: all warpgroups are done with V. ``staged``: all rows of O are in shared memory; only who sends waits for
    that. ``free``: the producers of the cluster may load V again. A split's share goes out straight from registers.
    """
    fetch(c, f)
    normalise(c, f)
    if f.fp8:  # columns back in order
        c.vector("reorder O", scale_mix(f.build.mix("reorder_o"), f.dv), latency={"shfl": 1})
    if f.output != "partial":
        c.sync(done, label="epilogue barrier")
        stage(c, f)
        if f.output == "tma":
            with c.only(-1, others=True):
                c.arrive(staged, label="O staged")
            with c.only(-1):
                c.sync(staged, label="O complete")
        else:
            c.sync(staged, label="O complete")
    with c.only(-1):
        effects = () if f.output == "partial" else (Store(Smem("O")),)
        engine: CopyEngine = "tma" if f.output == "tma" else "threads"
        c.copy("store O", o, o.line_bytes, "store", engine, boxes=-(-f.dv // 64), effects=effects)
        if f.output == "tma":
            c.wait_copies("store", "wait O store")
        c.arrive(free, scope="cluster", label="O stored")


def store_by_first(c: Role, f: Forward, staged: Barrier, o: Tensor) -> None:
    """FA4 on Hopper: O goes through the space of Q, and a warp of the first warpgroup sends it by TMA.

    The other warpgroups only arrive at the second phase of ``staged`` and are done.
    """
    fetch(c, f)
    c.sync(staged, label="Q read")  # O takes its place
    normalise(c, f)
    stage(c, f)
    c.arrive(staged, label="O staged")
    with c.only(0):
        c.wait_barrier(staged, label="wait O staged")
        c.copy("store O", o, o.line_bytes, "store", boxes=-(-f.dv // 64), effects=(Store(Smem("O")),))
        c.wait_copies("store", "wait O store")
