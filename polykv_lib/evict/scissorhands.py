"""Scissorhands (arXiv:2305.17118): a token that mattered goes on mattering."""

from dataclasses import dataclass

import torch

from polykv_lib.evict.attention import weight_blocks
from polykv_lib.evict.base import Protected, check_counts, queries_of
from polykv_lib.evict.tallies import extended, running
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True)
class Unimportance:
    """How many of the last `window` queries gave a token less than an equal share of attention.

    Older counts fade by 1 / window a query instead of leaving after exactly `window` of them.
    """

    window: int

    def after(self, layer: LayerKV, before: Scores | None) -> Scores:
        """Counts of the new queries, averaged over a KV head's query heads, on the faded ones."""
        queries = queries_of(layer, self)[:, :, -self.window :]
        counts = torch.zeros(layer.keys.shape[:3], device=layer.keys.device)
        for weights in weight_blocks(queries, layer.keys, layer.softmax_scale):
            n_rows, n_tokens = weights.shape[-2:]
            visible = torch.arange(n_tokens - n_rows + 1, n_tokens + 1, device=weights.device)
            low = (weights < 1 / visible[:, None]).float()
            low[..., -n_rows:].tril_()  # a token that a query does not see is not counted
            counts[..., :n_tokens] += low.flatten(2, 3).sum(2)
        counts *= layer.keys.shape[1] / queries.shape[1]
        if before is None:
            return counts
        return counts + extended(before, counts) * (1 - 1 / self.window) ** queries.shape[2]


@dataclass(frozen=True, kw_only=True)
class Scissorhands:
    """Drops the tokens that most queries of the history window found unimportant (Algorithm 2).

    A query finds a token unimportant that gets less than 1 / t of its attention, t the number of
    tokens that it sees. The newest `recent` tokens are kept. At prefill, the window is the last
    `window` queries of the prompt; while generating, each step adds its own queries' counts.

    Departures: when a cache is full the authors drop half of it at once (a drop amount of 0.5 of
    the budget), here every step drops what exceeds the budget; counts of query heads that share a
    KV head are averaged; while generating, old counts fade (`Unimportance`) where the authors count
    the last `window` queries anew. Their code for evaluation has no budget: it keeps
    every token that one of the window's queries ranked in its upper tenth, and the recent ones.
    """

    window: int = 400
    recent: int = 10

    def __post_init__(self) -> None:
        check_counts(self, window=1, recent=0)

    @property
    def tally(self) -> Unimportance:
        """The counts go on while a cache generates."""
        return Unimportance(self.window)

    def score(self, layer: LayerKV) -> Scores:
        """Minus the count."""
        return -running(self, layer)

    def protect(self, budget: int) -> Protected:
        """The recent tokens."""
        return Protected(last=self.recent)
