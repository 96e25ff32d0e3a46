"""Work tiles of FlashAttention-4: schedulers, key blocks per tile, and how often O is rescaled."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fasim.kernels.blocks import BlockInfo
from fasim.kernels.grid import cluster_rank, for_each_cta, in_order, kv_heads_in_l2, kv_lines, longest_first, q_lines
from fasim.kernels.layouts import key_layout, query_layout, value_layout
from fasim.program.effects import Layout
from fasim.program.language import GridMode, Kernel

Order = Literal["static", "lpt", "clc", "single"]

#: static: persistent, tiles in turn. lpt: a CTA per tile, longest first. clc: persistent, longest first, drawn (cluster
#: launch control). single: a CTA per tile.
MODES: dict[Order, GridMode] = {"static": "static", "lpt": "single", "clc": "dynamic", "single": "single"}

#: K and V of the heads that the longest-first order keeps together.
L2_SECTION_BYTES = 50e6


class Layouts(NamedTuple):
    """What the memory lines of Q, K, V and O hold."""

    q: Layout
    k: Layout
    v: Layout
    o: Layout


def grid(k: Kernel, rows: int, n: int, order: Order, packed: bool, tiles_per_cta: int = 1, halves: int = 1) -> Layouts:
    """Fill the tile table, a row per CTA and work tile; returns what the lines hold that it names.

    ``rows`` query rows per cluster tile, ``n`` keys per block; ``packed``: the query heads of a group lie side by
    side in a tile. Columns: ``lead`` and ``follow`` (first CTA of the cluster or not), ``steps`` (key blocks after
    the first), ``masked`` and ``full`` of these, ``q`` and ``kv`` (first lines; ``tiles_per_cta`` lines of Q a CTA,
    ``halves`` of K and V a block).
    """
    problem, ctas = k.problem, k.cluster
    cut = BlockInfo(problem, rows, n, packed)
    k.mode = MODES[order]
    if order == "clc":
        tiles = longest_first(cut, cut.pairs)
    elif order == "lpt":
        tiles = longest_first(cut, kv_heads_in_l2(problem, L2_SECTION_BYTES) * (problem.group // cut.packed_heads))
    else:
        tiles = in_order(cut)
    of_cta = for_each_cta(tiles, ctas)
    blocks = cut.kv_blocks(of_cta)
    rest = blocks.after_first()
    rank = cluster_rank(of_cta, ctas)
    k.tiles = {
        "lead": (rank == 0).astype(np.int64),
        "follow": (rank != 0).astype(np.int64),
        "steps": rest.visited,
        **rest.columns(),
        "q": q_lines(of_cta, tiles_per_cta),
        "kv": kv_lines(cut, of_cta, blocks.last, ctas, halves),
    }
    q, o = (
        query_layout(cut, columns, tiles, ctas=ctas, tiles_per_cta=tiles_per_cta)
        for columns in (problem.head_dim, problem.head_dim_v)
    )
    return Layouts(q, key_layout(cut, ctas, halves), value_layout(cut, ctas, halves), o)


def rescales(k: Kernel, n: int, rows: int, conditional: bool, threshold: float, rate: float | None) -> None:
    """Tile columns ``rescaled`` and ``kept``: steps that rescale O, put first because there maxima grow, and others.

    ``rows``: PV waits until O is right for all of them. ``rate`` is the share of steps, None for that of random
    inputs (:func:`rescale_chance`).
    """
    steps = k.tiles["steps"]
    if not conditional:
        rescaled = steps
    elif rate is not None:
        rescaled = np.rint(steps * rate).astype(np.int64)
    else:
        chance = rescale_chance(int(steps.max()) + 1, n, threshold)
        rescaled = np.rint(np.cumsum(1.0 - (1.0 - chance) ** rows)[steps]).astype(np.int64)
    k.tiles |= {"rescaled": rescaled, "kept": steps - rescaled}


def rescale_chance(blocks: int, n: int, threshold: float) -> npt.NDArray[np.float64]:
    """Chance that a row is rescaled at each of ``blocks`` blocks of ``n`` keys; shape ``(blocks,)``, the first is 0.

    Scores are independent standard normal numbers: queries and keys of unit variance, scaled by the root of the head
    dimension. A row is rescaled when a block's maximum exceeds the maximum in use by more than ``threshold`` powers of
    two, and uses the new one from then on: a Markov chain, carried here on a grid of maxima. With threshold 0, block
    i sets a record with chance 1/i. With 8, 5.5 standard deviations, it never happens.
    """
    edges = np.arange(-4.0, 12.0, 0.01)
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in edges]) ** n  # a block's maximum is below
    centre = 0.5 * (edges[1:] + edges[:-1])
    density, middle = np.diff(below), 0.5 * (below[1:] + below[:-1])
    jump = threshold * math.log(2.0)
    grows = 1.0 - np.interp(centre + jump, centre, middle, right=1.0)
    chance = np.zeros(blocks)
    in_use = density
    for i in range(1, blocks):
        chance[i] = in_use @ grows
        reached = np.interp(
            centre - jump, centre, np.cumsum(in_use) - in_use / 2, left=0.0
        )  # from maxima this far below
        in_use = in_use * (1.0 - grows) + density * reached
    return chance
