"""Attention as policies need it: its last rows, or the sums of its columns, never all of it."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.kv import Keys, Queries, Scores

BLOCK = 64  # queries whose weights are held at once: few enough to stay in a core's cache

Weights = Float[Tensor, "batch head group row token"]  # group: the query heads of a KV head


def window_weights(
    queries: Queries, keys: Keys, scale: float, window: int
) -> Float[Tensor, "batch q_head row token"]:
    """Softmax weights of the last `window` queries over all tokens, causal."""
    [weights] = weight_blocks(queries[:, :, -window:], keys, scale, block=window)
    return weights.flatten(1, 2)


def column_sums(queries: Queries, keys: Keys, scale: float) -> Scores:
    """Attention that each token received from all queries, averaged over a KV head's query heads.

    Exact, in blocks of queries: memory grows with the document's length, not with its square. The
    queries are those of the last tokens: of all, at prefill.
    """
    n_heads = keys.shape[1]
    sums = torch.zeros(keys.shape[:3], device=keys.device)
    for weights in weight_blocks(queries, keys, scale):
        sums[..., : weights.shape[-1]] += weights.flatten(2, 3).sum(2)
    return sums * (n_heads / queries.shape[1])


def recent_attention(queries: Queries, keys: Keys, scale: float, window: int = 64) -> Scores:
    """Attention that each token received from the last queries, over a KV head's query heads.

    The mean over `window` queries; to those before a token it counts as none.
    """
    weights = window_weights(queries, keys, scale, min(window, queries.shape[2]))
    return over_groups(weights.mean(2), keys.shape[1])


def weight_blocks(
    queries: Queries, keys: Keys, scale: float, block: int | None = None
) -> Iterator[Weights]:
    """Softmax weights in fp32, `block` queries at a time, over the tokens that the last one sees.

    The queries are those of the last tokens. A block is overwritten by the next one.
    """
    batch, n_heads, n_tokens, _ = keys.shape
    groups, n_queries = queries.shape[1] // n_heads, queries.shape[2]
    most = min(block or BLOCK, n_queries)
    columns = keys.detach().float().flatten(0, 1).mT
    scratch = columns.new_empty(2, batch * n_heads * groups * most * n_tokens)
    for start in range(0, n_queries, most):
        rows = queries[:, :, start : start + most].detach().float() * scale
        n_rows = rows.shape[2]
        visible = n_tokens - n_queries + start + n_rows
        shape = (batch * n_heads, groups * n_rows, visible)
        scores, weights = (x[: math.prod(shape)].view(shape) for x in scratch)
        torch.bmm(rows.reshape(shape[0], shape[1], -1), columns[..., :visible], out=scores)
        hidden = torch.ones(n_rows, n_rows, dtype=torch.bool, device=keys.device).triu(1)
        scores.unflatten(1, (groups, n_rows))[..., -n_rows:].masked_fill_(hidden, -math.inf)
        torch.softmax(scores, -1, out=weights)
        yield weights.view(batch, n_heads, groups, n_rows, visible)


def over_groups(
    x: Float[Tensor, "batch q_head token"], n_heads: int
) -> Float[Tensor, "batch head token"]:
    """Mean over the query heads that share a KV head."""
    return x.unflatten(1, (n_heads, -1)).mean(2)
