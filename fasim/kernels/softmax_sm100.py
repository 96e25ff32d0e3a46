"""The softmax of a query tile in tensor memory: a thread a row, P in fragments, exponentials partly as polynomials.

FlashAttention's ``SoftmaxSm100`` (flash_attn/cute/softmax.py at 0251105a). The scale of O and at last the row sum go
through shared memory to a correction warpgroup, so that O is rescaled off the critical path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from fasim.errors import ConfigError
from fasim.kernels.blocks import kv_loops
from fasim.kernels.correction import rescale_effects, store_output
from fasim.kernels.tmem import ROWS, QueryTile, Registers, TmemForward, setup
from fasim.numerics import Exp2
from fasim.program.effects import Effect, Mask, Move, Probabilities, Round, RowMax, RowSum
from fasim.program.language import Kernel, Register, Role, Shape
from fasim.program.ops import Latencies, Mix, add_mixes, scale_mix


@dataclass(frozen=True)
class SoftmaxKnobs:
    """What can be changed in any of these kernels; None is what the real kernel picks."""

    exp2_emulation: Annotated[bool | None, "some exp2 as polynomials; default: on where EX2 is slow (B200)"] = None
    emulation_frequency: Annotated[int | None, "period of emulation in a fragment; default: tuning table"] = None
    emulation_residue: Annotated[int | None, "elements emulated per period; default: tuning table"] = None
    emulation_start: Annotated[int | None, "first fragment with emulation; default: tuning table"] = None
    hardware_row_max: Annotated[bool | None, "row maximum comes with the TMEM load; default: B300"] = None
    pack_gqa: Annotated[bool | None, "heads of a group share a query tile; default: where there are groups"] = None
    softmax: Annotated[bool, "off: no maximum, exponential, sum; data movement and barriers stay"] = True


K = TypeVar("K", bound=SoftmaxKnobs)


def choose(knobs: K, f: TmemForward) -> tuple[K, TmemForward]:
    """Knobs and kernel with what the real kernel picks.

    Raises ConfigError for an emulation that does not exist.
    """
    arch = f.arch
    slow_exp2 = arch.sm.mufu.ops_per_cycle < arch.sm.alu.ops_per_cycle / 2
    facts = {"two_cta": f.ctas > 1, "packed": f.cut.pack_gqa, "slow_exp2": slow_exp2}
    row = {name: int(value) for name, value in f.build.row("tuning", f.problem, **facts).items()}
    on = knobs.softmax and (slow_exp2 if knobs.exp2_emulation is None else knobs.exp2_emulation)
    frequency = row["frequency"] if knobs.emulation_frequency is None else knobs.emulation_frequency
    residue = row["residue"] if knobs.emulation_residue is None else knobs.emulation_residue
    start = row["start"] if knobs.emulation_start is None else knobs.emulation_start
    if frequency < 1:
        raise ConfigError(f"fa4: emulation_frequency {frequency}: at least 1 (exp2_emulation=off switches it off)")
    maximum = arch.compute_capability == "10.3" if knobs.hardware_row_max is None else knobs.hardware_row_max
    chosen = replace(knobs, exp2_emulation=on, emulation_frequency=frequency, emulation_residue=residue)
    chosen = replace(chosen, emulation_start=start, hardware_row_max=maximum, pack_gqa=f.cut.pack_gqa)
    pairs = sum(k % frequency >= frequency - residue for k in range(0, f.fragment, 2))
    emulated = tuple(pairs if on and start <= part < f.fragments - 1 else 0 for part in range(f.fragments))
    # without tensor memory a softmax warpgroup holds S, O, P and little else, and there is no correction
    registers = Registers(row["softmax"], row["correction"]) if f.tmem else Registers(f.n + f.dv + f.n // 2 + 16, 0)
    return chosen, replace(f, emulated=emulated, hardware_max=maximum, softmax=knobs.softmax, registers=registers)


@dataclass(frozen=True)
class Softmax:
    """What a softmax warpgroup does for its query tile."""

    kernel: Kernel
    role: Role
    f: TmemForward
    tile: QueryTile

    @contextmanager
    def tiles(self) -> Iterator[None]:
        """The loop over work tiles."""
        setup(self.role, self.f)
        with self.role.tiles():
            self.role.delay("instruction fetch", self.f.build.cost("fetch") / 2, "issue")
            yield

    def blocks(self) -> Iterator[bool]:
        """All blocks of keys, the last ones first and the first of these apart. Yields whether a block is masked."""
        yield True
        for trips, masked in kv_loops(self.kernel.tiles):
            with self.role.loop(trips):
                yield masked

    def block(self, masked: bool) -> None:
        """One block: row maximum, the scale of O published, P in fragments, then the row sum."""
        r, f, tile, mix = self.role, self.f, self.tile, self.f.build.mix
        scores = (Move(tile.s, "S"),)
        r.wait_barrier(tile.scores, reason="full", label="wait S", effects=() if f.tmem else scores)
        if f.tmem:
            nbytes = 4 * ROWS * f.n
            r.vector("load S", mix("load_s"), tmem_load_bytes=nbytes, latency={"tmem": 1}, effects=scores)
        if f.softmax:
            if masked:
                r.vector("mask", scale_mix(mix("mask"), f.n), effects=(Mask("S"),))
            by_load = f.hardware_max and not masked
            compare = (
                mix("row_max", "block")
                if by_load
                else add_mixes(scale_mix(mix("row_max", "key"), f.n), mix("row_max", "block"))
            )
            r.vector("row max", compare, latency={"fma": 1, "alu": 2}, effects=(RowMax("S", threshold=f.threshold),))
            publish = (Move("alpha", tile.scale),) if f.tmem else ()
            r.vector("scale of O", mix("scale"), smem_bytes=4 * ROWS if f.tmem else 0, effects=publish)
        if f.tmem:
            r.arrive(tile.stats)
        else:
            r.vector("rescale O", {"ffma2": f.dv / 2}, effects=rescale_effects(f, tile.o))
        self._probabilities()
        if f.tmem:
            r.wait_barrier(tile.read, reason="empty")
        if f.softmax:
            sums = add_mixes(scale_mix(mix("row_sum", "key"), f.n), mix("row_sum", "block"))
            r.vector("row sum", sums, effects=(RowSum("E"),))

    def _probabilities(self) -> None:
        """Exponentials, conversion and store of P, fragment by fragment, released in two parts.

        The slow conversions to FP8 do not hide behind the exponentials of their fragment: a fit to FA4's counters.
        """
        r, f, tile, mix = self.role, self.f, self.tile, self.f.build.mix
        bits, last = f.problem.bits, f.fragments - 1
        for part, pairs in enumerate(f.emulated):
            emulated: Mix = {**scale_mix(mix("exp", "emulated"), pairs), "ex2": -2.0 * pairs}
            exp: Mix = add_mixes(scale_mix(mix("exp", "element"), f.fragment), emulated) if f.softmax else {}
            exp = add_mixes(exp, mix("exp", "fragment"))
            if bits < 16:
                exp = add_mixes(exp, scale_mix(mix("pack", bits), f.fragment))
            convert = scale_mix(mix("convert", bits), f.fragment)
            latency: Latencies = {}
            if part in (f.early - 1, last):  # the polynomial, or EX2, then F2FP
                result: Latencies = {"fma": 6, "alu": 3} if pairs else {"ex2": 1, "alu": 1}
                latency = {**result, "tmem_store": 1 if f.tmem else 0}
            columns = (part / (last + 1), (part + 1) / (last + 1))
            s, e = Register("S", share=columns), Register("E", share=columns)
            power: Effect = Probabilities(s, e, method=Exp2(2 * pairs / f.fragment)) if f.softmax else Move(s, e)
            write = Round(e, tile.p(columns), f.format)
            store = Shape(ROWS, f.fragment, f.format).bytes if f.tmem else 0
            if bits == 8:
                r.vector("exp", exp, effects=(power,))
                r.vector("P", convert, tmem_store_bytes=store, latency=latency, effects=(write,))
            else:
                exp = add_mixes(exp, convert)
                r.vector("exp, P", exp, tmem_store_bytes=store, latency=latency, effects=(power, write))
            if part == f.early - 1:
                r.arrive(tile.ready, scope=f.scope)
            elif part == last:
                r.arrive(tile.last, scope=f.scope)

    def end(self) -> None:
        """After the last block: the row sum goes to the correction. Without tensor memory O is this warpgroup's own."""
        r, f, tile = self.role, self.f, self.tile
        if not f.tmem:
            r.wait_barrier(tile.output, reason="full")
            store_output(r, f, tile)
            return
        sums = (Move("l", tile.scale), Move("m", tile.row_max)) if f.softmax else ()
        r.vector("publish sum", f.build.mix("publish_sum"), smem_bytes=8 * ROWS, effects=sums)
        r.arrive(tile.stats)
        r.wait_barrier(tile.read, reason="empty")
