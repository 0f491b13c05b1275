"""The words of this library: tensor axes, tensor types, and one layer of a prefilled document.

batch   sequences run side by side        head    key/value head (GQA: fewer than query heads)
token   position in the document          dim     channels of one head (head_dim)
row     one query of one query head, folded onto the KV head that it reads

Keys are stored after RoPE, in the order of Hugging Face: batch, head, token, dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

Keys: TypeAlias = Float[Tensor, "batch head token dim"]
Values: TypeAlias = Float[Tensor, "batch head token dim"]
Rows: TypeAlias = Float[Tensor, "head row dim"]
Queries: TypeAlias = Float[Tensor, "batch q_head query dim"]
Scores: TypeAlias = Float[Tensor, "batch head token"]  # higher = keep
KeptTokens: TypeAlias = Int[Tensor, " _"]  # of one head, ascending in time; heads may differ


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """Keys (after RoPE) and values of one layer, for one document (batch 1) or several rows.

    An eviction policy may also look at the queries (after RoPE, of the newest tokens; at prefill of
    all) and at the factor by which q . k is multiplied before the softmax (None: head_dim ** -0.5).

    What a cache remembers from step to step while it generates comes along: the tokens' positions
    (None: consecutive from 0; -1: an empty slot), running numbers a token, by the tally that keeps
    them (`evict/tallies.py`), and the similarity from which a merging policy merges (nan: none).

    A codec that shapes its errors looks at the second moments of the queries, E[q q^T], of those
    that read each head (`quantize/shaping.py`); codecs by rank look at the attention that each
    token received (`pool/tiered.py`).
    """

    keys: Keys
    values: Values
    queries: Queries | None = None
    scale: float | None = None
    positions: Int[Tensor, "batch head token"] | None = None
    tallies: Mapping[Any, Scores] = field(default_factory=dict)
    threshold: Float[Tensor, "batch head"] | None = None
    moments: Float[Tensor, "batch head dim dim"] | None = None
    attention: Scores | None = None

    @property
    def softmax_scale(self) -> float:
        """The factor of q . k."""
        return self.keys.shape[-1] ** -0.5 if self.scale is None else self.scale


def stacked(rows: Sequence[LayerKV]) -> LayerKV:
    """Keys and values of one layer from several documents, equally long, as rows of one batch."""
    return LayerKV(
        keys=torch.cat([row.keys for row in rows]), values=torch.cat([row.values for row in rows])
    )


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The shape of a model's KV cache: all that memory arithmetic needs."""

    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token adds to the cache, keys and values together."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim
