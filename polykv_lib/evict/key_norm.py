"""Key norm (arXiv:2406.11430): keys of small L2 norm attract attention."""

from dataclasses import dataclass

from polykv_lib.evict.base import Protected
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class KeyNorm:
    """Keeps the keys of smallest norm; needs no attention.

    At prefill and while generating alike, each KV head by itself. The authors exempt layers 0 and
    1; here that is the plan's to say.
    """

    def score(self, layer: LayerKV) -> Scores:
        """Minus the key's L2 norm."""
        return -layer.keys.float().norm(dim=-1)

    def protect(self, budget: int) -> Protected:
        """Nothing."""
        return Protected()
