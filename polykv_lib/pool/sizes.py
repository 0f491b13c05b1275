"""How many bytes a layer of a pool will take, before there is one."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from polykv_lib.kv import Geometry, LayerKV
from polykv_lib.pool.freeze import pieces_of

SIZE_OF_ID: Final = 4  # bytes of a token's id, which a pool holds too


@lru_cache(maxsize=100_000)
def layer_nbytes(
    keys: Any,
    values: Any,
    n_sink: int,
    *,
    n_heads: int,
    n_kept: int,
    n_tokens: int,
    head_dim: int,
) -> int:
    """Bytes of a layer whose heads keep `n_kept` of a document's tokens each, its sinks among them.

    Codes, scales, norms, sinks and positions, counted from a layer that is frozen as `freeze` does;
    what is not quantised is held in bf16. `keys` and `values` are codecs.
    """
    document = torch.zeros(1, n_heads, n_tokens, head_dim, dtype=torch.bfloat16)
    kept = [torch.arange(n_kept)] * n_heads
    layer = LayerKV(
        keys=document,
        values=document,
        moments=torch.eye(head_dim).expand(1, n_heads, -1, -1),
        attention=torch.zeros(1, n_heads, n_tokens),
    )
    pieces = pieces_of(layer, keys, values, n_sink, kept)
    return sum(t.numel() * t.element_size() for p in pieces for t in p.tensors.values())


def sizes_of(codec: Any, n_tokens: int, head_dim: int) -> Callable[[int, int], int]:
    """Bytes of so many heads of a layer that keep so many of a document's tokens each.

    `codec` has `keys`, `values` and `n_sink`, such as those of `presets`.
    """

    def sizes(n_heads: int, n_kept: int) -> int:
        return layer_nbytes(
            codec.keys,
            codec.values,
            codec.n_sink,
            n_heads=n_heads,
            n_kept=n_kept,
            n_tokens=n_tokens,
            head_dim=head_dim,
        )

    return sizes


def layers_nbytes(share: float, geometry: Geometry, n_tokens: int) -> int:
    """Bytes of all layers of a pool of `share` of one bf16 copy; the tokens' ids take the rest."""
    return int(share * 2 * geometry.elements_per_token * n_tokens) - SIZE_OF_ID * n_tokens
