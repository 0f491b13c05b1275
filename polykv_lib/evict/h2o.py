"""H2O (arXiv:2306.14048): heavy hitters by accumulated attention, and a recent half."""

from dataclasses import dataclass

from polykv_lib.evict.base import Protected, check_shares
from polykv_lib.evict.tallies import AttentionReceived, running
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class H2O:
    """Keeps the tokens that received most attention from all queries, and the most recent ones.

    At prefill all of the prompt's queries are summed over. While generating, each step adds its own
    queries' attention to the sums of the tokens still held, then evicts, as the authors' code that
    really drops does. `recent` is the recent part's share of the budget (the authors give both
    parts the same size). Departure: sums of query heads that share a KV head are averaged (in the
    authors' models none share).
    """

    recent: float = 0.5

    def __post_init__(self) -> None:
        check_shares(self, "recent")

    @property
    def tally(self) -> AttentionReceived:
        """The sums go on while a cache generates: each step adds its own queries' attention."""
        return AttentionReceived()

    def score(self, layer: LayerKV) -> Scores:
        """Column sums of the softmax attention over all queries so far."""
        return running(self, layer)

    def protect(self, budget: int) -> Protected:
        """The recent part."""
        return Protected(last=int(self.recent * budget))
