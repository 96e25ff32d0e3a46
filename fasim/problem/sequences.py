"""Sequences: how long they are, and which row of which tensor a token is.

All sequences of a batch are of equal length today. What depends on that is in this module and in
:class:`fasim.kernels.blocks.BlockInfo`: ragged lengths (``cu_seqlens``) belong here, as offsets of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasim.problem.masks import IntArray


@dataclass(frozen=True)
class Sequences:
    """The sequences of one call.

    A *pair* is a (batch, head) pair, numbered ``batch * heads + head`` with the heads of Q (O alike) or those of K
    and V. Rows of Q and O are numbered (batch, head, token) through the whole tensor, those of K and V likewise; row
    -1 is outside the tensor and reads as zero.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int

    @property
    def q_row_count(self) -> int:
        """Rows of Q and O."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def k_row_count(self) -> int:
        """Rows of K and V."""
        return self.batch * self.heads_kv * self.seqlen_k

    def q_rows(self, pair: int | IntArray, token: IntArray) -> IntArray:
        """Rows of Q and O of the queries ``token`` of query heads ``pair``; -1 beyond the last query."""
        return np.where(token < self.seqlen_q, pair * self.seqlen_q + token, -1)

    def k_rows(self, pair: int | IntArray, token: IntArray) -> IntArray:
        """Rows of K and V of the keys ``token`` of key/value heads ``pair``; -1 beyond the last key."""
        return np.where(token < self.seqlen_k, pair * self.seqlen_k + token, -1)

    def position(self, query: IntArray) -> IntArray:
        """Number of the key opposite a query of its sequence: aligned bottom right, as masks are asked."""
        return query + (self.seqlen_k - self.seqlen_q)

    def row_position(self, row: IntArray) -> IntArray:
        """Positions of rows of Q or O."""
        return self.position(row % self.seqlen_q)

    def row_key(self, row: IntArray) -> IntArray:
        """Number within its sequence of rows of K or V."""
        return row % self.seqlen_k
