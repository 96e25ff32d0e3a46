"""The thread that issues all MMAs of a CTA, or of both CTAs of a pair (tcgen05.mma, with cta_group::2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fasim.kernels.tmem import ROWS, Operands, TmemForward
from fasim.program.language import Barrier, Kernel, Ring, Role, Tile
from fasim.program.role import MMA_DEPTH_BITS


@dataclass(frozen=True)
class Issuer:
    """Issues MMAs and commits. ``peers``: barriers at which the operands of the other CTA of a pair arrive."""

    role: Role
    f: TmemForward
    peers: Mapping[str, Barrier]

    def wait(self, ring: Ring) -> None:
        """Wait until the next stage of ``ring`` is full, in both CTAs of a pair."""
        self.role.wait(ring)
        if ring.buffer.name in self.peers:
            self.role.wait_barrier(self.peers[ring.buffer.name], reason="full")

    def qk(self, q: Tile, keys: Tile, into: Tile, done: Barrier | None, add: bool = False) -> None:
        """S = Q K^T; ``done`` is committed."""
        self._gemm("QK", q, keys, into, done, transposed=True, add=add)

    def pv(self, p: Tile, values: Tile, into: Tile, done: Barrier | None = None) -> None:
        """O += P V; the first product of a work tile overwrites."""
        self._gemm("PV", p, values, into, done, transposed=False, add=True)

    def _gemm(
        self, label: str, a: Tile, b: Tile, into: Tile, done: Barrier | None, *, transposed: bool, add: bool
    ) -> None:
        slots, pair = self.f.build.cost("slots_per_mma"), self.f.ctas > 1
        self.role.gemm(label, a, b, into, add=add, transposed=transposed, pair=pair, slots=slots, done=done)

    def commit(self, done: Barrier) -> None:
        """tcgen05.commit: ``done`` is arrived at when all MMAs so far are complete."""
        f, slots = self.f, self.f.build.cost("slots_per_mma")
        rows, depth, pair = ROWS * f.ctas, MMA_DEPTH_BITS // f.problem.bits, f.ctas > 1
        dtype = f.problem.dtype
        self.role.mma("commit", m=rows, n=ROWS, k=depth, count=0, dtype=dtype, two_cta=pair, slots=slots, done=done)

    def release(self, ring: Ring) -> None:
        """Free the ring's oldest stage when all MMAs so far are complete."""
        self.commit(ring.empty)


@contextmanager
def issuer(kernel: Kernel, r: Role, f: TmemForward, x: Operands, parts: int = 1) -> Iterator[Issuer]:
    """Body of the MMA role in a work tile, ``parts`` stages of K and of V a block.

    A pair of CTAs has one issuer; the tile table's column ``lead`` is 1 for its CTA. The other CTA's copies complete
    at the issuer's barrier: here that CTA's idle MMA warp passes them on.
    """
    if f.ctas == 1:
        yield Issuer(r, f, {})
        return
    peers = {ring.buffer.name: kernel.barrier(f"{ring.buffer.name}.peer", 1, ring.full.stages) for ring in (x.q, x.kv)}

    def relay(ring: Ring, times: int) -> None:
        for _ in range(times):
            r.wait(ring)
            r.arrive(peers[ring.buffer.name], scope="leader")

    with r.loop("lead"):
        yield Issuer(r, f, peers)
    with r.loop("follow"):
        relay(x.kv, parts)
        relay(x.q, f.queries)
        relay(x.kv, parts)
        with r.loop("steps"):
            relay(x.kv, 2 * parts)
