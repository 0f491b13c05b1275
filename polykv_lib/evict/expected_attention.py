"""Expected attention (arXiv:2510.00636): what queries still to come will attend to."""

from dataclasses import dataclass

from polykv_lib.evict.base import Protected, check_counts, queries_of
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention:
    """Keeps the tokens to which Gaussian queries attend most, weighted by their values' norms.

    E[exp(s q.k)] = exp(s mu.k + s^2 k.Sigma.k / 2). At prefill, mean and variance of q.k are those
    over the prompt's newest `window` queries; while generating, over the new queries alone, of
    which a single one has no variance. Weights of query heads that share a KV head are averaged.
    The first `n_sink` tokens are kept.

    Departures: the queries are taken as observed, each rotated to its own position. The authors
    estimate mu and Sigma from all queries but the first 4, before RoPE, and average the rotation
    over the next 512 positions, for which a policy would have to know the model. The sinks take
    part in the softmax; the authors leave them out of it.
    """

    window: int = 256
    n_sink: int = 4
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, window=1, n_sink=0)

    def score(self, layer: LayerKV) -> Scores:
        """(softmax over tokens of the log-expectation + epsilon) * norm of the value."""
        n_heads = layer.keys.shape[1]
        queries = queries_of(layer, self)[:, :, -self.window :].float()
        grouped = queries.unflatten(1, (n_heads, -1)) * layer.softmax_scale
        scores = grouped @ layer.keys.float().mT[:, :, None]
        expected = scores.mean(3) + scores.var(3, correction=0) / 2
        weights = expected.softmax(-1).mean(2)
        return (weights + self.epsilon) * layer.values.float().norm(dim=-1)

    def protect(self, budget: int) -> Protected:
        """The sinks."""
        return Protected(first=self.n_sink)
