"""TOVA (arXiv:2401.06104): what the newest query attends to, all heads together."""

from dataclasses import dataclass

from polykv_lib.evict.attention import window_weights
from polykv_lib.evict.base import Protected, queries_of
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class TOVA:
    """Keeps the tokens that the last query weighs most, by the mean over all query heads.

    At prefill the prompt's last query decides; while generating, the newest one at every step. All
    KV heads keep the same tokens as long as they hold the same; heads that hold different ones
    (other budgets or policies before) go by the mean over their own query heads. The newest token
    is kept in any case (as kvpress does; the authors leave it to its score).
    """

    def score(self, layer: LayerKV) -> Scores:
        """Mean attention of the last query, the same for every KV head."""
        weights = window_weights(queries_of(layer, self), layer.keys, layer.softmax_scale, 1)
        return weights[:, :, 0].mean(1, keepdim=True).expand(-1, layer.keys.shape[1], -1)

    def protect(self, budget: int) -> Protected:
        """The newest token."""
        return Protected(last=1)
