"""How many bytes each codec stores, from shapes alone: no tensor is built.

The pools that are really built are counted from their tensors; both must agree to the byte.
"""

from math import ceil

from polykv_lib.kv import Geometry
from polykv_lib.pool.tiered import Tiered, tiers
from polykv_lib.presets import Codec
from polykv_lib.quantize import (
    Affine,
    FullPrecision,
    HarmonicTurboQuant,
    Int8,
    Quantizer,
    TurboQuant,
)

FULL_BYTES = 2  # bfloat16 or float16: what full precision means in every computed size
HALF, SINGLE = 2, 4  # bytes of an fp16 and of an fp32 number


def pool_bytes(codec: Codec, geometry: Geometry, n_tokens: int) -> int:
    """Bytes of keys and values of a whole pool; the document's token ids are not part of it."""
    lossless = codec.keys == codec.values == FullPrecision()
    n_sink = 0 if lossless else min(codec.n_sink, n_tokens)
    of_layer = 2 * side_bytes(FullPrecision(), geometry, n_sink)
    ranked = any(isinstance(side, Tiered) for side in (codec.keys, codec.values))
    for start, stop, *sides in tiers(codec.keys, codec.values, n_tokens - n_sink):
        of_layer += sum(side_bytes(side, geometry, stop - start) for side in sides)
        if ranked:  # which tokens: numbers, or a bit for each of the document's
            of_layer += geometry.n_kv_heads * min(4 * (stop - start), ceil(n_tokens / 8))
    return geometry.n_layers * of_layer


def side_bytes(codec: Quantizer, geometry: Geometry, n_tokens: int) -> int:
    """Bytes of one layer's keys (or values): codes, then scales, norms and zeros.

    Raises:
        ValueError: A codec without a formula here.
    """
    if n_tokens == 0:
        return 0
    heads, dim = geometry.n_kv_heads, geometry.head_dim
    vectors = heads * n_tokens
    match codec:
        case FullPrecision():
            return vectors * dim * FULL_BYTES
        case Int8(scale="tensor"):
            return vectors * dim + SINGLE
        case Int8(scale="channel"):
            return vectors * dim + heads * dim * SINGLE
        case Int8(scale="token"):
            return vectors * dim + vectors * HALF + SINGLE
        case Int8(scale="block"):
            return vectors * dim + vectors * dim // 32 * HALF + SINGLE
        case TurboQuant(bits=bits, norms="byte"):
            return vectors * dim * bits // 8 + vectors + 2 * SINGLE
        case TurboQuant(bits=bits):
            return vectors * dim * bits // 8 + vectors * HALF + SINGLE
        case HarmonicTurboQuant(bits=bits, norms=norms):
            rest = side_bytes(TurboQuant(bits, norms=norms), geometry, n_tokens)
            return rest + heads * 3 * dim // 2 * SINGLE
        case Affine(bits=bits, group=group, axis="token"):
            groups = heads * dim * ceil(n_tokens / group)
        case Affine(bits=bits, group=group, axis="channel"):
            groups = vectors * ceil(dim / group)
        case _:
            raise ValueError(f"{codec} has no byte formula; add one beside the others.")
    return vectors * dim * bits // 8 + groups * 2 * HALF + SINGLE
