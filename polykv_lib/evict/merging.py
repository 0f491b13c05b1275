"""Kept tokens that take up evicted ones: the gathers they need, and heads one by one."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polykv_lib.evict.base import EvictionPolicy, KeptIndex, merger_of
from polykv_lib.kv import KeptTokens, LayerKV


def at(
    x: Float[Tensor, "batch head token dim"], index: Int[Tensor, "batch head some"]
) -> Float[Tensor, "batch head some dim"]:
    """The chosen tokens of each head."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1]))


def evicted_of(kept: KeptIndex, n_tokens: int) -> Int[Tensor, "batch head evicted"]:
    """The tokens that are not kept, ascending."""
    batch, n_heads, n_kept = kept.shape
    gone = torch.ones(batch, n_heads, n_tokens, dtype=torch.bool, device=kept.device)
    gone.scatter_(2, kept, False)
    return gone.nonzero()[:, 2].view(batch, n_heads, n_tokens - n_kept)


def merged(policy: EvictionPolicy, layer: LayerKV, kept: Sequence[KeptTokens]) -> LayerKV | None:
    """The document with kept tokens as the policy changes them; None: nothing merges.

    Heads may keep different numbers of tokens, so each is merged alone. Evicted tokens stay as they
    were: a pool stores the kept ones only. The heads' thresholds come along; nan: none.
    """
    merger = merger_of(policy)
    n_tokens = layer.keys.shape[2]
    if merger is None or all(len(tokens) == n_tokens for tokens in kept):
        return None
    keys, values = layer.keys.clone(), layer.values.clone()
    threshold = torch.full(keys.shape[:2], torch.nan, device=keys.device)
    for head, tokens in enumerate(kept):
        if len(tokens) < n_tokens:
            one = merger.merge(_head(layer, head), tokens[None, None])
            keys[:, head, tokens] = one.keys[:, 0]
            values[:, head, tokens] = one.values[:, 0]
            if one.threshold is not None:
                threshold[:, head] = one.threshold[:, 0]
    return LayerKV(keys=keys, values=values, threshold=threshold)


def _head(layer: LayerKV, head: int) -> LayerKV:
    """One KV head with the query heads that read it."""
    queries = layer.queries
    if queries is not None:
        queries = queries.unflatten(1, (layer.keys.shape[1], -1))[:, head]
    one = slice(head, head + 1)
    return replace(
        layer, keys=layer.keys[:, one], values=layer.values[:, one], queries=queries, tallies={}
    )
