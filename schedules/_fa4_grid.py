"""Work tiles of FlashAttention-4: schedulers, key blocks per tile, and how often O is rescaled."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fasim.problem import Problem
from fasim.program.effects import Layout, Region
from fasim.program.language import GridMode, Kernel

IntArray = npt.NDArray[np.int64]

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
    group = problem.group if packed else 1
    m_blocks = -(-problem.seqlen_q * group // rows)
    heads = problem.batch * problem.heads_q // group
    k.mode = MODES[order]
    if order in ("lpt", "clc"):
        per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.element_bytes
        section = 2 ** int(math.log2(max(1.0, L2_SECTION_BYTES / per_head))) * (problem.group // group)
        section = heads if order == "clc" else section
        pairs = [
            (h, b)
            for first in range(0, heads, section)
            for b in range(m_blocks - 1, -1, -1)
            for h in range(first, min(first + section, heads))
        ]
        head, block = np.array(pairs).T
    else:
        head, block = (a.ravel() for a in np.mgrid[0:heads, 0:m_blocks])
    visits = [_blocks(problem, n, b * rows // group, -(-(b + 1) * rows // group)) for b in range(m_blocks)]
    total, masked = np.array(visits)[block].T
    kv_head = head // (problem.group // group)
    kv_blocks = -(-problem.seqlen_k // n)
    rank = np.tile(np.arange(ctas), len(head))
    total, masked, kv_head = (np.repeat(column, ctas) for column in (total, masked, kv_head))
    k.tiles = {
        "lead": (rank == 0).astype(np.int64),
        "follow": (rank != 0).astype(np.int64),
        "steps": total - 1,
        "masked": masked,
        "full": total - 1 - masked,
        "q": np.arange(len(rank)) * tiles_per_cta,
        "kv": ((kv_head * kv_blocks + total - 1) * halves + halves - 1) * ctas + rank,
    }
    q, o = (
        _query_layout(k, rows, head, block, group, tiles_per_cta, columns)
        for columns in (problem.head_dim, problem.head_dim_v)
    )
    return Layouts(q, _key_layout(k, n, halves), _value_layout(k, n, halves), o)


def _query_layout(
    k: Kernel, rows: int, head: IntArray, block: IntArray, group: int, tiles_per_cta: int, columns: int
) -> Layout:
    """A query tile a line. The CTAs of a cluster share an MMA's rows; the heads of a packed group take turns."""
    problem, ctas = k.problem, k.cluster
    size = rows // (tiles_per_cta * ctas)

    def region(line: int, tile: int) -> Region:
        cta, number = divmod(line, tiles_per_cta)
        cluster, rank = divmod(cta, ctas)
        row = block[cluster] * rows + (number * ctas + rank) * size + np.arange(size, dtype=np.int64)
        query = (head[cluster] * group + row % group) * problem.seqlen_q + row // group
        return Region(np.where(row < problem.seqlen_q * group, query, -1))

    return Layout(problem.batch * problem.heads_q * problem.seqlen_q, columns, region)


def _key_layout(k: Kernel, n: int, halves: int) -> Layout:
    """``halves`` of K's columns for each block; each CTA of a cluster loads its share of the rows."""
    problem, rows, width = k.problem, n // k.cluster, k.problem.head_dim // halves

    def region(line: int, tile: int) -> Region:
        line, rank = divmod(line, k.cluster)
        block, half = divmod(line, halves)
        return Region(_key_rows(problem, n, block)[rank * rows :][:rows], slice(half * width, (half + 1) * width))

    return Layout(problem.batch * problem.heads_kv * problem.seqlen_k, problem.head_dim, region)


def _value_layout(k: Kernel, n: int, halves: int) -> Layout:
    """``halves`` of V's columns for each block; each CTA of a cluster loads its share of them."""
    problem, parts = k.problem, halves * k.cluster
    width = problem.head_dim_v // parts

    def region(line: int, tile: int) -> Region:
        block, part = divmod(line, parts)
        return Region(_key_rows(problem, n, block), slice(part * width, (part + 1) * width))

    return Layout(problem.batch * problem.heads_kv * problem.seqlen_k, problem.head_dim_v, region)


def _key_rows(problem: Problem, n: int, block: int) -> IntArray:
    """Rows of a block of ``n`` keys, numbered through all heads; -1 beyond the last key."""
    head, block = divmod(block, -(-problem.seqlen_k // n))
    row = block * n + np.arange(n, dtype=np.int64)
    return np.where(row < problem.seqlen_k, head * problem.seqlen_k + row, -1)


def _blocks(problem: Problem, n: int, first: int, last: int) -> tuple[int, int]:
    """Key blocks of the queries first <= q < last, and how many after the first of these run the masked code."""
    total = max(1, -(-problem.kv_range(first, last) // n))
    end = first + problem.seqlen_k - problem.seqlen_q if problem.causal else problem.seqlen_k
    return total, min(total - 1, max(0, total - 1 - max(0, end) // n))


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
