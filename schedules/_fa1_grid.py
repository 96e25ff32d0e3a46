"""FlashAttention-1's grid: who takes which rows, how many steps a block has, and which rows a copy means.

Sources as :mod:`fa1`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from fasim.kernels.blocks import BlockInfo
from fasim.program.effects import Layout, Region
from fasim.program.language import Kernel

ROWS = 16  # query rows of one step

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

    def region(line: int, tile: int) -> Region:
        if line < 0:
            return Region(np.full(ROWS, -1, np.int64))
        row = step_of[line % steps] * ROWS + np.arange(ROWS, dtype=np.int64)
        return Region(problem.sequences.q_rows(line // steps, row))

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
