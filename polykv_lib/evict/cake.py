"""CAKE (arXiv:2503.12491): attention that is high, or that shifts, over the last window."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from polykv_lib.evict.attention import over_groups, window_weights
from polykv_lib.evict.base import Protected, check_counts, check_odd, queries_of
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class CAKE:
    """Keeps the last `window` tokens, and those with the highest mean + gamma * variance.

    At prefill, mean and variance run over the window's queries; their sum is smoothed over `kernel`
    tokens and averaged over the query heads of a KV head. A prompt no longer than the window keeps
    its newest tokens. While generating, one new query has no variance: its smoothed attention is
    the score, as in the authors' code.

    `preference` is the layer's share of the total budget. tau1 and tau2 depend on the model; the
    authors list them for budgets of 128 and 1,024 and use 1 elsewhere. Departure: a plan fixes the
    layers' budgets beforehand, the authors shrink earlier layers as later ones of the same prompt
    are seen.
    """

    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        check_counts(self, window=1, kernel=1)
        check_odd(self, "kernel")

    def score(self, layer: LayerKV) -> Scores:
        """Pooled mean + gamma * variance; 0 for the window itself."""
        batch, n_heads, n_tokens, _ = layer.keys.shape
        if n_tokens <= self.window:
            newest = torch.arange(n_tokens, dtype=torch.float32, device=layer.keys.device)
            return newest.expand(batch, n_heads, n_tokens)
        before = self._weights_before_window(layer)
        indicator = before.mean(2) + self.gamma * _variance(before)
        pooled = functional.avg_pool1d(indicator, self.kernel, stride=1, padding=self.kernel // 2)
        return functional.pad(over_groups(pooled, n_heads), (0, self.window))

    def protect(self, budget: int) -> Protected:
        """The window, or as much of it as the budget holds."""
        return Protected(last=self.window)

    def preference(self, layer: LayerKV) -> float:
        """H ** (1 / tau1) * V ** (1 / tau2), the paper's equation 5: dispersion times shift.

        H sums the entropies of the window's rows, V the variances over them of the tokens before
        the window. Budgets are `budgets.proportional(preferences, total, b_min=window)`.
        """
        before = self._weights_before_window(layer)
        dispersion = -torch.xlogy(before, before).sum()
        shift = _variance(before).sum()
        return float(dispersion ** (1 / self.tau1) * shift ** (1 / self.tau2))

    def _weights_before_window(self, layer: LayerKV) -> torch.Tensor:
        queries = queries_of(layer, self)
        weights = window_weights(queries, layer.keys, layer.softmax_scale, self.window)
        return weights[..., : -self.window]


def _variance(rows: torch.Tensor) -> torch.Tensor:
    return rows.var(2, correction=min(1, rows.shape[2] - 1))
