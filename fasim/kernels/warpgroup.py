"""Roles of forward kernels on Hopper: warps that load, and warpgroups that multiply and take the softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fasim.kernels import softmax
from fasim.kernels.blocks import kv_loops
from fasim.kernels.forward import Forward
from fasim.program.effects import Mask, Move, Rescale
from fasim.program.language import Barrier, Group, Kernel, Ring, Role, Smem, waited
from fasim.program.ops import Mix, add_mixes, scale_mix


def setup(role: Role, f: Forward) -> None:
    """Barriers and setmaxnreg, at the start of a CTA."""
    role.delay("setup", 2 * f.arch.launch.registers_realloc_cycles, "launch")


def kv_blocks(kernel: Kernel, role: Role) -> Iterator[bool]:
    """The loops over the KV blocks of a tile but the first, last to first; yields whether they are masked."""
    for trips, masked in kv_loops(kernel.tiles):
        with role.loop(trips):
            yield masked


class Producer:
    """The warp, or the warpgroup, that loads."""

    def __init__(self, kernel: Kernel, role: Role, f: Forward) -> None:
        self.kernel, self.role, self.f = kernel, role, f
        setup(role, f)

    def blocks(self) -> Iterator[bool]:
        """Loops over KV blocks; what the first warp executes around a block's loads comes first in them."""
        for masked in kv_blocks(self.kernel, self.role):
            self.role.vector("issue loads", self.f.build.mix("loads", self.f.kind), warps=1)
            yield masked

    def load_q(self, q: Ring) -> None:
        """One TMA copy; rows of several heads are gathered by cp.async of the producer warpgroup."""
        if self.f.cut.packed_heads == 1:
            self.role.load(q)
            return
        self.role.wait_barrier(q.empty, reason="empty", ahead=1, label="wait Q empty")
        self.role.fill(q, "threads", q.tensor)

    def transpose(self, source: Ring, into: Ring) -> None:
        """The oldest V block, transposed by the producer warpgroup: ldmatrix.trans, byte permutes, stmatrix.

        wgmma takes a K-major B operand only in FP8. Per 512 bytes and warp one load, one store and four PRMT.
        """
        role, build = self.role, self.f.build
        name, nbytes = into.buffer.name, into.buffer.bytes
        role.wait(source)
        role.wait_barrier(into.empty, reason="empty", ahead=1, label=f"wait {name} empty")
        moves = nbytes / softmax.ACCESS_BYTES / role.warps
        slots = build.cost("transpose_slots", "block") + build.cost("transpose_slots", "move") * moves
        mix: Mix = {"lds": moves, "sts": moves, "alu": 4 * moves, "misc": slots}
        smem_bytes = 2 * nbytes * build.cost("transpose_wavefronts")
        latency = build.cost("round_latencies") * moves
        effect = Move(Smem(source.buffer.name), Smem(name, after=waited(into.empty)))
        role.vector("transpose V", mix, smem_bytes=smem_bytes, latency={"smem": latency}, effects=(effect,))
        role.arrive(into.full, label=f"{name} full")
        role.release(source)


class Consumer:
    """A warpgroup: 64 query rows, their S, P and O in registers."""

    def __init__(self, kernel: Kernel, role: Role, f: Forward, turn: Barrier) -> None:
        self.kernel, self.role, self.f, self.turn_barrier = kernel, role, f, turn
        setup(role, f)

    def set_up_tile(self, drawn: bool = False) -> None:
        """Find the block, set up pointers and descriptors, fetch code. ``drawn``: the tile comes from a counter."""
        build = self.f.build
        cycles = build.cost("setup", self.f.kind) + (build.cost("draw", self.f.kind) if drawn else 0.0)
        self.role.delay("tile set-up", cycles, "issue")
        self.role.delay("instruction fetch", build.cost("fetch", "before"), "issue")

    # --- synchronisation --------------------------------------------------------------------
    def take_turn(self, when: bool = True) -> None:
        """Wait for the right to issue MMAs, which the warpgroups hand around (ping-pong)."""
        if when and self.f.turns:
            self.role.wait_barrier(self.turn_barrier, "own", label="wait turn")

    def pass_turn(self, when: bool = True) -> None:
        """Hand it to the next warpgroup."""
        if when and self.f.turns:
            self.role.arrive(self.turn_barrier, "next", label="pass turn")

    @contextmanager
    def turn(self, when: bool = True) -> Iterator[None]:
        """A turn, for as long as MMAs are being issued."""
        self.take_turn(when)
        yield
        self.pass_turn(when)

    def wait(self, ring: Ring, ordered: bool = False) -> None:
        """Wait for the next stage. ``ordered``: the order of turns covers all but the first warpgroup, which polls."""
        if not (ordered and self.f.turns):
            self.role.wait(ring)
            return
        with self.role.only(0):
            self.role.wait(ring)
        with self.role.only(0, others=True):
            self.role.wait(ring, polled=False)

    def release(self, ring: Ring) -> None:
        """Give the oldest stage back."""
        self.role.release(ring)

    def finish(self, group: Group, product: str, free: Ring | None = None) -> None:
        """Wait until a product is complete, and give its operand back."""
        with self.role.phase(f"wait {product}"):
            self.role.finish(group, f"wait {product}")
        if free is not None:
            self.role.release(free)

    # --- work -------------------------------------------------------------------------------
    def qk(self, q: Ring, k: Ring, rescale: bool = False) -> Group:
        """S = Q K^T of a block. ``rescale``: O is rescaled for the PV that follows, where the kernel does so early.

        The compiler puts those FMUL between the first wgmma: most behind the first, the others behind the second.
        """
        f, role = self.f, self.role
        multiplies = f.dv / 2 if rescale and f.rescale_early else 0.0
        early = min(f.build.cost("fmul_behind_first"), multiplies) if multiplies else 0.0
        first = 0
        for fmul, effects in ((early, (Rescale("O"),)), (multiplies - early, ())):
            if fmul:
                self._qk(q, k, (first, first + 1), takes_effect=False)
                role.vector("rescale O", {"fmul": fmul}, effects=effects)
                first += 1
        return self._qk(q, k, (first, None))

    def _qk(self, q: Ring, k: Ring, steps: tuple[int, int | None], takes_effect: bool = True) -> Group:
        slots = self.f.build.cost("slots_per_wgmma")
        with self.role.phase("QK"):
            return self.role.gemm(
                "QK", q, k, self.f.s, transposed=True, steps=steps, takes_effect=takes_effect, slots=slots
            )

    def pv(self, v: Ring) -> Group:
        """O += P V of a block."""
        f = self.f
        with self.role.phase("PV"):
            return self.role.gemm("PV", f.p, v, f.pv, add=not f.two_level, slots=f.build.cost("slots_per_wgmma"))

    def mask(self) -> None:
        """Scores of keys that do not exist, or that the mask hides, become -inf."""
        build, causal = self.f.build, self.f.problem.causal
        mix = scale_mix(build.mix("mask", "causal" if causal else "full"), self.f.scores)
        if causal and "diagonal" in build.mixes:
            mix = add_mixes(mix, build.mix("diagonal"))
        self.role.vector("mask", mix, effects=(Mask("S"),))

    def softmax(self, masked: bool, first: bool = False, at_wait_pv: Callable[[], None] | None = None) -> None:
        """From S to P. ``at_wait_pv`` records what stands where the compiler waits for PV, if one is in flight."""
        order = self.f.softmax_order(overlap=at_wait_pv is not None)
        if masked:
            self.mask()
        softmax.row_max(self.role, self.f, order)
        softmax.probabilities(self.role, self.f, order, not (first or self.f.rescale_early), at_wait_pv)

    def rescale_late(self) -> None:
        """Before the last PV, where every other one was preceded by the QK that hides the rescale."""
        if self.f.rescale_early:
            self.role.vector("rescale O", {"fmul": self.f.dv / 2}, effects=(Rescale("O"),))

    def branch(self) -> None:
        """Branches, fences and waits of an iteration."""
        self.role.delay("loop", self.f.build.cost("loop"), "issue")
