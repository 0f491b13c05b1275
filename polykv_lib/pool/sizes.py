"""How many bytes a layer of a pool will take, before there is one."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from polykv_lib.kv import Geometry
from polykv_lib.pool.pieces import positions_nbytes
from polykv_lib.pool.tiered import Side, Tiered, is_lossless, tiers
from polykv_lib.quantize import Affine, FullPrecision, Quantizer
from polykv_lib.quantize.base import encode

SIZE_OF_ID: Final = 4  # bytes of a token's id, which a pool holds too


def layer_nbytes(
    keys: Side,
    values: Side,
    n_sink: int,
    *,
    n_heads: int,
    n_kept: int,
    n_tokens: int,
    head_dim: int,
) -> int:
    """Bytes of a layer whose heads keep `n_kept` of a document's tokens each, its sinks among them.

    Codes, scales, norms, sinks and positions, of a layer that `freeze` cuts into pieces; what is
    not quantised is held in bf16.
    """
    full: Quantizer = FullPrecision()
    n_sinks_kept = 0 if is_lossless(keys, values) else min(n_sink, n_kept)
    evicted = n_kept < n_tokens
    ranked = isinstance(keys, Tiered) or isinstance(values, Tiered)
    pieces = [(n_sinks_kept, full, full, evicted)]
    for start, stop, key, value in tiers(keys, values, n_kept - n_sinks_kept):
        pieces.append((stop - start, key, value, evicted or ranked))
    total = 0
    for n, key, value, noted in pieces:
        if n:
            total += sum(_codec_nbytes(codec, n_heads, n, head_dim) for codec in (key, value))
            total += n_heads * positions_nbytes(n, n_tokens) if noted else 0
    return total


def _codec_nbytes(codec: Any, n_heads: int, n_tokens: int, head_dim: int) -> int:
    """Bytes of keys or values of some heads: every `step` further tokens take the same."""
    step = codec.group if isinstance(codec, Affine) and codec.axis == "token" else 1
    short = min(n_tokens, n_tokens % step + step)
    one, two = (_encoded_nbytes(codec, n_heads, n, head_dim) for n in (short, short + step))
    return one + (n_tokens - short) // step * (two - one)


@lru_cache(maxsize=10_000)
def _encoded_nbytes(codec: Any, n_heads: int, n_tokens: int, head_dim: int) -> int:
    """Bytes of so many tokens, counted once they are encoded."""
    x = torch.zeros(n_heads, n_tokens, head_dim, dtype=torch.bfloat16)
    return encode(codec, x, torch.eye(head_dim).expand(n_heads, -1, -1)).nbytes


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
