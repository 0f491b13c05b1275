"""Attention as policies need it: its last rows, or the sums of its columns, never all of it."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.kv import Keys, Queries, Scores

BLOCK = 256  # query rows whose weights are held at once


def window_weights(
    queries: Queries, keys: Keys, scale: float, window: int
) -> Float[Tensor, "batch q_head row token"]:
    """Softmax weights of the last `window` queries over all tokens, causal."""
    return _weights(queries[:, :, -window:], keys, scale)


def column_sums(queries: Queries, keys: Keys, scale: float) -> Scores:
    """Attention that each token received from all queries, averaged over a KV head's query heads.

    Exact, in blocks of queries: memory grows with the document's length, not with its square. The
    queries are those of the last tokens: of all, at prefill.
    """
    batch, n_heads, n_tokens, _ = keys.shape
    groups = queries.shape[1] // n_heads
    n_queries = queries.shape[2]
    sums = torch.zeros(batch, n_heads, n_tokens, device=keys.device)
    for start in range(0, n_queries, BLOCK):
        stop = min(start + BLOCK, n_queries)
        visible = n_tokens - n_queries + stop
        weights = _weights(queries[:, :, start:stop], keys[:, :, :visible], scale)
        sums[:, :, :visible] += weights.sum(2).unflatten(1, (n_heads, groups)).mean(2)
    return sums


def _weights(queries: Queries, keys: Keys, scale: float) -> Float[Tensor, "batch q_head row token"]:
    """Softmax weights of queries that belong to the last tokens of `keys`, in fp32."""
    n_heads, n_tokens = keys.shape[1:3]
    n_rows = queries.shape[2]
    rows = queries.float().unflatten(1, (n_heads, -1)).flatten(2, 3) * scale
    scores = (rows @ keys.float().mT).unflatten(2, (-1, n_rows)).flatten(1, 2)
    hidden = torch.ones(n_rows, n_tokens, dtype=torch.bool, device=keys.device)
    hidden = hidden.triu(n_tokens - n_rows + 1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


def over_groups(
    x: Float[Tensor, "batch q_head token"], n_heads: int
) -> Float[Tensor, "batch head token"]:
    """Mean over the query heads that share a KV head."""
    return x.unflatten(1, (n_heads, -1)).mean(2)
