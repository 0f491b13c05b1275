"""StreamingLLM (arXiv:2309.17453): attention sinks and the most recent tokens."""

from dataclasses import dataclass

import torch

from polykv_lib.evict.base import Protected, check_counts
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class StreamingLLM:
    """Keeps the first `n_sink` tokens and as many of the newest as the budget holds.

    At prefill and while generating alike; all KV heads keep the same tokens. Departure: kept keys
    stay at their original positions, where the paper renumbers them by cache slot.
    """

    n_sink: int = 4

    def __post_init__(self) -> None:
        check_counts(self, n_sink=0)

    def score(self, layer: LayerKV) -> Scores:
        """Recency: the token's position."""
        batch, heads, tokens, _ = layer.keys.shape
        position = torch.arange(tokens, dtype=torch.float32, device=layer.keys.device)
        return position.expand(batch, heads, tokens)

    def protect(self, budget: int) -> Protected:
        """The sinks."""
        return Protected(first=self.n_sink)
