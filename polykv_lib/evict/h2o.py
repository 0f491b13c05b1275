"""H2O (arXiv:2306.14048): heavy hitters by accumulated attention, and a recent half."""

from dataclasses import dataclass

from polykv_lib.evict.attention import column_sums
from polykv_lib.evict.base import Protected, queries_of
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class H2O:
    """Keeps the tokens that received most attention from all queries, and the most recent ones.

    `recent` is the recent part's share of the budget (the authors give both parts the same size).
    Departure: scores of query heads that share a KV head are averaged (the authors' models do not).
    """

    recent: float = 0.5

    def score(self, layer: LayerKV) -> Scores:
        """Column sums of the softmax attention over all of the document's queries."""
        return column_sums(queries_of(layer, self), layer.keys, layer.softmax_scale)

    def protect(self, budget: int) -> Protected:
        """The recent part."""
        return Protected(last=int(self.recent * budget))
