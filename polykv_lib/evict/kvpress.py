"""Scorers of the kvpress library as policies; kvpress itself is imported by who makes the press."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from polykv_lib.evict.attention import window_weights
from polykv_lib.evict.base import Protected
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class KVPress:
    """Ranks tokens by a kvpress `ScorerPress` that needs keys, values and attention weights only.

    Such are its SnapKV, TOVA, StreamingLLM, KeyDiff, Knorm, LagKV, Random and ObservedAttention. At
    prefill and while generating the press scores what the layer holds, by the attention of the
    queries at hand; query heads that share a KV head are its own matter. The press's
    compression_ratio matters where its score depends on it, as StreamingLLM's
    does; the plan's budget decides how many tokens are kept. The whole attention matrix is computed
    for one layer at a time. Such a policy can not be saved in a plan.
    """

    press: Any

    def score(self, layer: LayerKV) -> Scores:
        """The press's score.

        Raises:
            ValueError: the press looks at the model's hidden states or weights.
        """
        batch, n_heads, n_tokens, dim = layer.keys.shape
        attention, n_q_heads = None, n_heads
        if layer.queries is not None:
            n_q_heads, n_queries = layer.queries.shape[1:3]
            attention = window_weights(layer.queries, layer.keys, layer.softmax_scale, n_queries)
        heads = {"num_attention_heads": n_q_heads, "num_key_value_heads": n_heads}
        module = SimpleNamespace(
            config=SimpleNamespace(**heads, head_dim=dim),
            head_dim=dim,
            num_key_value_groups=n_q_heads // n_heads,
        )
        length_only = layer.keys.new_empty(batch, n_tokens, 0)
        try:
            return self.press.score(module, length_only, layer.keys, layer.values, attention, {})
        except (AttributeError, KeyError, NotImplementedError) as error:
            raise ValueError(
                f"{type(self.press).__name__} scores by the model itself, not by keys, values and "
                f"attention ({error}); use it through kvpress."
            ) from error

    def protect(self, budget: int) -> Protected:
        """Nothing beyond the press's own scores."""
        return Protected()
