"""D2O (arXiv:2406.13035): heavy hitters, and evicted tokens merged into the nearest kept key."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from polykv_lib.evict.base import KeptIndex, Protected, check_counts, check_shares
from polykv_lib.evict.merging import at, evicted_of
from polykv_lib.evict.tallies import AttentionReceived, running
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class D2O:
    """Keeps what H2O keeps and the first `n_sink` tokens; similar evicted tokens are merged.

    An evicted token merges into the kept one whose key has the largest cosine u, if u reaches the
    threshold: at first the mean of these maxima, later its moving average with weight `beta` on
    the newest mean. A kept key or value becomes (e x + sum exp(u_i) x_i) / (e + sum exp(u_i)),
    so a token counts by its cosine, the kept one by its cosine with itself.

    At prefill the sums are those of all the prompt's queries and the whole excess merges at once;
    while generating, each step adds to the sums, evicts what exceeds the budget and merges it.

    Departures: merging starts at the prefill, where the plan evicts, not at the first new token;
    each layer's budget is the plan's, where the authors derive it from the variance of attention
    and exempt the first two layers and the last. Each KV head has a threshold and nearest tokens of
    its own (sums averaged over its query heads); in the authors' code one threshold serves a layer,
    and the n-th evicted token of all heads merges or none does. That code also weighs by u itself
    and divides by a count, (x + sum u_i x_i) / (1 + n), where the paper has exponentials.
    """

    recent: float = 0.5
    n_sink: int = 4
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_shares(self, "recent", "beta")
        check_counts(self, n_sink=0)

    @property
    def tally(self) -> AttentionReceived:
        """The sums go on while a cache generates."""
        return AttentionReceived()

    def score(self, layer: LayerKV) -> Scores:
        """Column sums of the softmax attention over all queries so far."""
        return running(self, layer)

    def protect(self, budget: int) -> Protected:
        """The sinks and the recent part."""
        return Protected(first=self.n_sink, last=int(self.recent * budget))

    def merge(self, layer: LayerKV, kept: KeptIndex) -> LayerKV:
        """The kept tokens with similar evicted ones folded in, and the moved threshold."""
        evicted = evicted_of(kept, layer.keys.shape[2])
        directions = functional.normalize(layer.keys.float(), dim=-1)
        similar = at(directions, evicted) @ at(directions, kept).mT
        best, nearest = similar.max(-1)
        threshold = best.mean(-1)
        if layer.threshold is not None:
            moved = self.beta * threshold + (1 - self.beta) * layer.threshold
            threshold = torch.where(layer.threshold.isnan(), threshold, moved)
        weights = best.exp().masked_fill(best < threshold[..., None], 0.0)
        total = math.e + torch.zeros(kept.shape, device=kept.device).scatter_add(
            -1, nearest, weights
        )
        sides = []
        for x in (layer.keys, layer.values):
            into = nearest[..., None].expand(-1, -1, -1, x.shape[-1])
            folded = at(x, evicted).float() * weights[..., None]
            summed = (math.e * at(x, kept).float()).scatter_add(2, into, folded)
            sides.append((summed / total[..., None]).to(x.dtype))
        return LayerKV(keys=sides[0], values=sides[1], threshold=threshold)
