"""CaM (Zhang et al., ICML 2024): values that leave the window merge into the next ones."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from polykv_lib.evict.attention import over_groups, window_weights
from polykv_lib.evict.base import KeptIndex, Protected, check_counts, check_shares, queries_of
from polykv_lib.evict.chance import uniform
from polykv_lib.evict.merging import at, evicted_of
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class CAM:
    """Keeps the first tokens and the most recent ones; a token that leaves hands on its value.

    An evicted value, divided by `merged`, is added to each of the `merged` values that follow it,
    with the probability attention(token) / mean attention(those that follow), at most 1. Attention
    is the newest query's, averaged over the query heads of a KV head. Keys do not change.

    While generating, a step evicts the tokens that leave the recent part and merges them. At
    prefill, where the authors' cache only masks, all tokens between the two parts leave at once;
    what would go to a follower that leaves too is lost, so only the last of them are merged.

    `start` is the first tokens' share of the budget (the authors give start and recent the same).
    The authors' programs differ: attention is the newest query's or summed over the steps, the mean
    that of the followers or of the whole recent part, `merged` 32, 16 or the whole recent part;
    here the newest query's, over the followers. Departure: one random number a token (from `seed`
    and its position) serves all heads.
    """

    start: float = 0.5
    merged: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_shares(self, "start")
        check_counts(self, merged=1)

    def score(self, layer: LayerKV) -> Scores:
        """Recency: the token's place."""
        newest = torch.arange(layer.keys.shape[2], dtype=torch.float32, device=layer.keys.device)
        return newest.expand(layer.keys.shape[:3])

    def protect(self, budget: int) -> Protected:
        """The first part."""
        return Protected(first=int(self.start * budget))

    def merge(self, layer: LayerKV, kept: KeptIndex) -> LayerKV:
        """The kept tokens, values of evicted predecessors added."""
        _, n_heads, n_tokens, _ = layer.keys.shape
        evicted = evicted_of(kept, n_tokens)
        queries = queries_of(layer, self)
        newest = window_weights(queries, layer.keys, layer.softmax_scale, 1)[:, :, 0]
        attention = over_groups(newest, n_heads)
        odds = attention / _mean_of_next(attention, self.merged)
        positions = layer.positions
        if positions is None:
            positions = torch.arange(n_tokens, device=kept.device).expand_as(attention)
        draws = uniform(positions, self.seed) < odds  # a token without followers: odds are nan
        distance = kept[..., :, None] - evicted[..., None, :]
        follows = (distance > 0) & (distance <= self.merged)
        share = (follows & draws.gather(-1, evicted)[..., None, :]).float() / self.merged
        values = at(layer.values, kept).float() + share @ at(layer.values, evicted).float()
        return LayerKV(keys=at(layer.keys, kept), values=values.to(layer.values.dtype))


def _mean_of_next(x: Float[Tensor, "batch head token"], n: int) -> Tensor:
    """Mean over the n numbers that follow each one, or as many as there are."""
    sums = functional.pad(x.cumsum(-1), (0, n), mode="replicate")
    n_tokens = x.shape[-1]
    places = torch.arange(n_tokens, device=x.device)
    counts = (n_tokens - 1 - places).clamp(max=n)
    return (sums[..., n:] - sums[..., :n_tokens]) / counts
