"""KeyDiff (arXiv:2504.15364): keys unlike the mean key."""

from dataclasses import dataclass

from torch.nn import functional

from polykv_lib.evict.base import Protected
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class KeyDiff:
    """Keeps the keys least similar to the mean of the normalised keys; needs no attention.

    At prefill the mean is that of the whole prompt (the paper works block by block); while
    generating, that of the keys held at each step. Each KV head by itself.
    """

    def score(self, layer: LayerKV) -> Scores:
        """Minus the cosine between a key and the mean direction of its head's keys."""
        keys = layer.keys.float()
        anchor = functional.normalize(keys, dim=-1).mean(2, keepdim=True)
        return -functional.cosine_similarity(keys, anchor, dim=-1)

    def protect(self, budget: int) -> Protected:
        """Nothing."""
        return Protected()
