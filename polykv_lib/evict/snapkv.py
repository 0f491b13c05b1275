"""SnapKV (arXiv:2404.14469): what the last window of the prompt attends to, pooled."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from polykv_lib.evict.attention import over_groups, window_weights
from polykv_lib.evict.base import Protected, check_counts, check_odd, queries_of
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class SnapKV:
    """Keeps the last `window` tokens, and those that their queries attended to most.

    At prefill the queries of the prompt's last `window` tokens are averaged over (the authors sum,
    the ranking is the same); their attention is smoothed over `kernel` neighbouring tokens, and
    averaged over the query heads of a KV head (the authors score every query head, which multiplies
    the cache). A prompt no longer than the window keeps its newest tokens. The authors' window is
    32 or 64; 8 in the KVCache-Factory port.

    While generating, which the authors leave to a growing cache, the queries of the newest forward
    take the place of the window's: each step scores by its own attention, and the last `window`
    tokens stay.
    """

    window: int = 32
    kernel: int = 5
    pooling: Literal["average", "maximum"] = "average"

    def __post_init__(self) -> None:
        check_counts(self, window=1, kernel=1)
        check_odd(self, "kernel")
        if self.pooling not in ("average", "maximum"):
            raise ValueError(f"SnapKV(pooling={self.pooling!r}); choose average or maximum.")

    def score(self, layer: LayerKV) -> Scores:
        """Pooled mean attention of the window's queries; 0 for the window itself."""
        batch, n_heads, n_tokens, _ = layer.keys.shape
        queries = queries_of(layer, self)
        if n_tokens <= self.window:
            newest = torch.arange(n_tokens, dtype=torch.float32, device=layer.keys.device)
            return newest.expand(batch, n_heads, n_tokens)
        weights = window_weights(queries, layer.keys, layer.softmax_scale, self.window)
        before = weights[..., : -self.window].mean(2)
        pool = functional.avg_pool1d if self.pooling == "average" else functional.max_pool1d
        pooled = pool(before, self.kernel, stride=1, padding=self.kernel // 2)
        return functional.pad(over_groups(pooled, n_heads), (0, self.window))

    def protect(self, budget: int) -> Protected:
        """The window, or as much of it as the budget holds."""
        return Protected(last=self.window)
