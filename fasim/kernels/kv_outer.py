"""A grid whose outer loop runs over KV blocks: who takes which query rows, how many steps a block has.

FlashAttention-1: a CTA holds a block of K and V and lets its share of the query rows, ``ROWS`` at a time, pass by.
Source: fmha_fprop_kernel_1xN.h, fmha_fwd_launch_template.h of Dao-AILab/flash-attention v1.0.8 (9610114c).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from fasim.arch import Arch
from fasim.kernels.blocks import BlockInfo
from fasim.kernels.layouts import kv_layout
from fasim.program.builds import Build
from fasim.program.effects import ArrayRegion, Effect, Layout, Load, Move
from fasim.program.language import Kernel, Role, Smem, Tensor
from fasim.program.tiles import Cursor

ROWS = 16  # query rows of one step
WARPS = 4  # which split the keys

IntArray = npt.NDArray[np.int64]


def split_heuristic(heads: int, slots: int, seqlen_q: int) -> int:
    """The smallest number of CTAs per head within 5 % of the best wave efficiency (num_splits_heuristic_fwd)."""
    splits = np.arange(1, min(30, seqlen_q + ROWS) + 1)
    waves = heads * splits / slots
    efficiency = waves / np.ceil(waves)
    return int(splits[efficiency > 0.95 * efficiency.max()][0])


def grid(k: Kernel, splits: int, steps: int, blocks: int, keys: int) -> None:
    """Grid (batch, head, split), batch fastest; CTA z takes the steps z, z + splits, ... of its head.

    Trip counts: the steps of a block without its last one, and (``... end``) the last one, which fetches no more Q.
    Causal: of a block the steps on the diagonal, whose rows end here, and those below it.
    """
    problem = k.problem
    split, head, batch = (a.ravel() for a in np.mgrid[0:splits, 0 : problem.heads_q, 0 : problem.batch])
    row = batch * problem.heads_q + head

    def up_to(step: int) -> IntArray:
        """Steps below ``step`` that each split has."""
        return np.maximum(0, -(-(step - np.arange(splits)) // splits))

    first = row * steps + np.concatenate([[0], np.cumsum(up_to(steps))])[split]
    k.tiles = {"q": first, "kv": row * blocks, "cta": row * splits + split}

    def loop(name: str, trips: IntArray, ends: npt.NDArray[np.bool_]) -> None:
        k.tiles[name], k.tiles[f"{name} end"] = (trips - ends)[split], ends.astype(np.int64)[split]

    if not problem.causal:
        loop("steps", up_to(steps), up_to(steps) > 0)
        return
    cut = BlockInfo(problem, ROWS, keys)
    for j, (begin, _, end) in enumerate(zip(*cut.q_blocks(np.arange(blocks)), strict=True)):
        diagonal, below = up_to(end) - up_to(begin), up_to(steps) - up_to(end)
        loop(f"diagonal {j}", diagonal, (diagonal > 0) & (below == 0))
        loop(f"below {j}", below, below > 0)


def row_layouts(k: Kernel, splits: int, steps: int, blocks: int) -> dict[str, Layout]:
    """Rows of Q and O by tensor. Lines number the steps of a head so that those of a CTA follow each other."""
    problem = k.problem
    length = problem.seqlen_q
    step_of = np.concatenate([np.arange(split, steps, splits) for split in range(splits)])

    def region(line: int, tile: int) -> ArrayRegion:
        if line < 0:
            return ArrayRegion(np.full(ROWS, -1, np.int64))
        row = step_of[line % steps] * ROWS + np.arange(ROWS, dtype=np.int64)
        return ArrayRegion(problem.sequences.q_rows(line // steps, row))

    def trips(name: str, tile: int) -> int:
        return int(k.tiles[name][tile] + k.tiles[f"{name} end"][tile])

    @cache
    def copies(tile: int) -> dict[tuple[str, str], list[int]]:
        """What a CTA copies in its order: tensor and kind -> lines; -1 where a block has no step for it."""
        found: dict[tuple[str, str], list[int]] = {}
        done = 0  # steps whose rows have ended
        for j in range(blocks):
            ended = trips(f"diagonal {j}", tile) if problem.causal else 0
            total = ended + trips(f"below {j}", tile) if problem.causal else trips("steps", tile)
            lines = [int(k.tiles["q"][tile]) + done + i for i in range(total)]
            if problem.causal:
                done += ended
            elif j == blocks - 1:
                ended = total
            again = " again" if j else ""
            for tensor, kind, moved in (
                ("Q again", "load", lines[:1] or [-1]),
                (f"Q{again}", "load", lines[1:]),
                ("O", "store", lines[:ended]),
                (f"O partial{again}", "store", lines[ended:]),
                ("O partial again", "load", lines if j else []),
            ):
                found.setdefault((tensor, kind), []).extend(moved)
        return found

    def layout(tensor: str, array: str) -> Layout:
        def order(tile: int, kind: str, number: int) -> int:
            lines = copies(tile)[tensor, kind]
            return lines[number] if number < len(lines) else -1

        rows = problem.batch * problem.heads_q * length
        return Layout(rows, problem.head_dim, region, array, order=order)

    arrays = {"Q": "Q", "Q again": "Q", "O": "O", "O partial": "O partial", "O partial again": "O partial"}
    return {tensor: layout(tensor, array) for tensor, array in arrays.items()}


@dataclass(frozen=True)
class Block:
    """A K/V block: padded head dim, keys, and the tensors that pass by. ``again``: strips that are in L2 already."""

    arch: Arch
    build: Build
    d: int
    keys: int
    dtype: str
    t: dict[str, Tensor]

    @property
    def scores(self) -> float:
        """Scores per thread and step; a thread has them in two rows."""
        return ROWS * self.keys / (32 * WARPS)

    @property
    def flops(self) -> float:
        """FLOP of one of the two GEMMs of a step."""
        return 2.0 * ROWS * self.keys * self.d

    def exchange(self, kind: str, warp: int = 0) -> Smem:
        """Where the warps meet: parts of O in FP32, behind them a row maximum and a row sum for each row and warp."""
        sizes = {"O": 4 * ROWS * self.d, "max": 4 * ROWS * WARPS, "sum": 4 * ROWS * WARPS}
        begin = {"O": warp * sizes["O"], "max": WARPS * sizes["O"], "sum": WARPS * sizes["O"] + sizes["max"]}[kind]
        return Smem("parts", share=(begin / self.exchanged_bytes, (begin + sizes[kind]) / self.exchanged_bytes))

    @property
    def exchanged_bytes(self) -> int:
        """Parts of O, row maxima and row sums."""
        return WARPS * 4 * ROWS * self.d + 2 * 4 * ROWS * WARPS


def block(k: Kernel, build: Build, padded: int, keys: int, splits: int) -> Block:
    """The tensors of a kernel whose tile table :func:`grid` has filled."""
    problem = k.problem
    heads, blocks, steps = problem.batch * problem.heads_q, problem.kv_tiles(keys), problem.q_tiles(ROWS)
    q_bytes, o_bytes, kv_bytes = 2 * ROWS * padded, 4 * ROWS * padded, 2 * keys * padded
    kv, rows = kv_layout(BlockInfo(problem, ROWS, keys), problem.head_dim), row_layouts(k, splits, steps, blocks)
    tensors = {name: k.tensor(name, heads * blocks, kv_bytes, "kv", 1, kv) for name in ("K", "V")}
    for name, nbytes in (("Q", q_bytes), ("O", q_bytes), ("O partial", o_bytes)):
        tensors[name] = k.tensor(name, heads * steps, nbytes, "q", 1, rows[name])
    # From a CTA's second K/V block on, its strip of Q and O is taken to be in L2; one line stands for it.
    for name, nbytes in (("Q again", q_bytes), ("O partial again", o_bytes)):
        tensors[name] = k.tensor(name, heads * splits, nbytes, "cta", layout=rows[name])
    return Block(k.arch, build, padded, keys, problem.dtype, tensors)


def load_q(w: Role, q: Tensor, first: bool) -> None:
    """The next rows of Q, and what earlier blocks left of their softmax."""
    effects = (Load("next Q"),) if first else (Load("next Q"), Load("next lse", array="LSE"))
    w.copy("load Q", q, q.line_bytes, "load", "threads", effects=effects)


def q_to_smem(w: Role, b: Block, first: bool) -> None:
    """Into the other of two buffers."""
    effects: tuple[Effect, ...] = (Move("next Q", Smem("Q", after=Cursor("copy", "load Q"), share=(0, 1))),)
    effects += () if first else (Move("next lse", "its lse"),)
    mix = b.build.total("q_to_smem", step=1, head_dim=b.d)
    w.vector("Q to SMEM", mix, smem_bytes=2.0 * ROWS * b.d, latency={"smem": 1}, effects=effects)
