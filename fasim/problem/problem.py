"""The attention problem: shapes, data type, mask, and the work they mean."""

from __future__ import annotations

from dataclasses import dataclass

from fasim.errors import ConfigError, did_you_mean
from fasim.problem.masks import CAUSAL, FULL, Mask
from fasim.problem.sequences import Sequences

#: Bits per element of Q, K and V by data type. Block scales of the narrow types are not counted.
DTYPE_BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "fp4": 4}

DIRECTIONS = ("fwd", "bwd")

#: FLOP of the backward pass over those of the forward pass: five GEMMs instead of two (at head_dim = head_dim_v).
BACKWARD_FACTOR = 2.5


@dataclass(frozen=True, init=False)
class Problem:
    """One attention call: O = softmax(Q K^T) V, or its gradients.

    Shapes: Q ``(batch, heads_q, seqlen_q, head_dim)``, K ``(batch, heads_kv, seqlen_k, head_dim)``,
    V ``(batch, heads_kv, seqlen_k, head_dim_v)``, O ``(batch, heads_q, seqlen_q, head_dim_v)``. The causal mask is
    aligned bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q, so the last query sees all keys, and the
    first ones none where seqlen_q > seqlen_k.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    dtype: str
    direction: str

    def __init__(
        self,
        batch: int = 4,
        seqlen_q: int = 4096,
        seqlen_k: int | None = None,
        heads_q: int = 16,
        heads_kv: int | None = None,
        head_dim: int = 128,
        head_dim_v: int | None = None,
        causal: bool = False,
        dtype: str = "bf16",
        direction: str = "fwd",
    ) -> None:
        """Check and store. ``None`` means as many as of the query side (``head_dim_v``: as ``head_dim``).

        Raises ConfigError for a size below 1, a heads_q that is no multiple of heads_kv, an unknown dtype or direction.
        """
        sizes = {
            "batch": batch,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_q if seqlen_k is None else seqlen_k,
            "heads_q": heads_q,
            "heads_kv": heads_q if heads_kv is None else heads_kv,
            "head_dim": head_dim,
            "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
        }
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"problem: {name}: expected an integer of at least 1, got {size!r}")
        if sizes["heads_q"] % sizes["heads_kv"]:
            raise ConfigError(f"problem: heads_q {sizes['heads_q']} is not a multiple of heads_kv {sizes['heads_kv']}")
        if not isinstance(causal, bool):
            raise ConfigError(f"problem: causal: expected true or false, got {causal!r}")
        for name, value, choices in (("dtype", dtype, DTYPE_BITS), ("direction", direction, DIRECTIONS)):
            if value not in choices:
                raise ConfigError(f"problem: {name}: unknown value {value!r}{did_you_mean(str(value), choices)}")
        fields: dict[str, object] = {**sizes, "causal": causal, "dtype": dtype, "direction": direction}
        for name, field in fields.items():
            object.__setattr__(self, name, field)

    @property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return CAUSAL if self.causal else FULL

    @property
    def sequences(self) -> Sequences:
        """Lengths, and how rows of the tensors are numbered."""
        return Sequences(self.batch, self.heads_q, self.heads_kv, self.seqlen_q, self.seqlen_k)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def bits(self) -> int:
        """Bits per element of Q, K and V."""
        return DTYPE_BITS[self.dtype]

    @property
    def element_bytes(self) -> float:
        """Bytes per element of Q, K and V; 0.5 for fp4."""
        return self.bits / 8

    @property
    def output_bytes(self) -> int:
        """Bytes per element of O and of the gradients, which are 16-bit for every dtype."""
        return 2

    def flops(self) -> float:
        """FLOP by the convention of the FlashAttention papers, the one behind published TFLOP/s.

        2 x batch x heads_q x seqlen_q x seqlen_k x (head_dim + head_dim_v), half of it for a causal mask whatever
        the lengths, times 2.5 for the backward pass.
        """
        scores = self.batch * self.heads_q * self.mask.counted_scores(self.seqlen_q, self.seqlen_k)
        forward = 2.0 * scores * (self.head_dim + self.head_dim_v)
        return forward * BACKWARD_FACTOR if self.direction == "bwd" else forward

    def exact_flops(self) -> int:
        """FLOP of the unmasked score elements alone.

        Two per element and head dimension of each GEMM: QK^T and PV forward; QK^T, dO V^T, dS^T Q, dS K and P^T dO
        backward, three over head_dim and two over head_dim_v.
        """
        d, dv = self.head_dim, self.head_dim_v
        width = 3 * d + 2 * dv if self.direction == "bwd" else d + dv
        return 2 * self.batch * self.heads_q * self.visible_scores() * width

    def visible_scores(self) -> int:
        """Unmasked elements of one head's score matrix."""
        return self.mask.visible_scores(self.seqlen_q, self.seqlen_k)

    def minimal_hbm_bytes(self) -> int:
        """HBM traffic when every tensor crosses once, in bytes.

        Forward reads Q, K, V and writes O and the FP32 log-sum-exp; backward reads Q, K, V, O, dO and the
        log-sum-exp and writes dQ, dK, dV.
        """
        q_rows = self.batch * self.heads_q * self.seqlen_q
        kv_rows = self.batch * self.heads_kv * self.seqlen_k
        q, k = q_rows * self.head_dim, kv_rows * self.head_dim
        o, v = q_rows * self.head_dim_v, kv_rows * self.head_dim_v
        wide = o if self.direction == "fwd" else 2 * o + q + k + v
        return -(-(q + k + v) * self.bits // 8) + wide * self.output_bytes + 4 * q_rows

    def q_tiles(self, tile_m: int) -> int:
        """Query tiles of one head."""
        return _ceil_div(self.seqlen_q, tile_m)

    def kv_tiles(self, tile_n: int) -> int:
        """KV tiles of one head."""
        return _ceil_div(self.seqlen_k, tile_n)

    def describe(self) -> str:
        """One line, such as "B4 S4096 H16 d128 bf16 causal forward"; "a/b" where the key side differs."""
        parts = [
            f"B{self.batch}",
            _pair("S", self.seqlen_q, self.seqlen_k),
            _pair("H", self.heads_q, self.heads_kv),
            _pair("d", self.head_dim, self.head_dim_v),
            self.dtype,
            *(["causal"] if self.causal else []),
            "forward" if self.direction == "fwd" else "backward",
        ]
        return " ".join(parts)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _pair(letter: str, query: int, key: int) -> str:
    return f"{letter}{query}" if query == key else f"{letter}{query}/{key}"
