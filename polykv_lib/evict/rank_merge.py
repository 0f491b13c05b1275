"""Two policies in one head: each contributes its best tokens in turn."""

from dataclasses import dataclass

import torch

from polykv_lib.evict.base import EvictionPolicy, Protected
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class RankMerge:
    """Round-robin merge of two rankings: about half of the budget from each, no token twice.

    At prefill and while generating each policy ranks as it does alone; each KV head by itself.
    """

    first: EvictionPolicy
    second: EvictionPolicy

    def score(self, layer: LayerKV) -> Scores:
        """Minus the better of the token's two ranks; a tie goes to the first policy."""
        ranks = [_ranks(policy.score(layer)) for policy in (self.first, self.second)]
        return -torch.minimum(2 * ranks[0], 2 * ranks[1] + 1)

    def protect(self, budget: int) -> Protected:
        """What either protects."""
        both = self.first.protect(budget), self.second.protect(budget)
        return Protected(first=max(p.first for p in both), last=max(p.last for p in both))


def _ranks(scores: Scores) -> Scores:
    """Place of each token in its head's ranking: 0 for the highest score."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order.argsort(dim=-1).float()
