"""Keys and values of a prefilled document -> a pool."""

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polykv_lib.kv import Geometry, KeptTokens, LayerKV
from polykv_lib.pool.pieces import Piece, PoolError, Stored, located
from polykv_lib.pool.shared import CacheFactory, SharedKVPool
from polykv_lib.pool.tiered import Side, Tiered, is_lossless, tiers
from polykv_lib.quantize import FullPrecision, Quantizer, check_codec
from polykv_lib.quantize.base import all_finite, encode

Codecs: TypeAlias = Side | Sequence[Side]  # for every layer, or one a layer
_MISMATCH = "{} codecs of {} for {} layers; pass one codec, or one for each layer."


def freeze(
    layers: Iterable[LayerKV],
    *,
    keys: Codecs,
    values: Codecs,
    n_sink: int = 4,
    kept: Sequence[Sequence[KeptTokens]] | None = None,
    document_ids: Int[Tensor, "1 token"] | None = None,
    n_q_heads: int | None = None,
    owner: dict[str, str] | None = None,
    cache_factory: CacheFactory | None = None,
) -> SharedKVPool:
    """Compress every layer once: evict, then quantise.

    Args:
        layers: keys and values of the document (batch 1), first layer first; may be a generator.
        keys: codec of the keys, or one for each layer.
        values: codec of the values, or one for each layer.
        n_sink: first tokens of the document held in full precision, keys and values. They receive
            much of the attention (arXiv:2309.17453), so their rounding costs most.
        kept: for each layer and KV head the tokens it keeps, ascending; None keeps all.
        document_ids: the document's tokens.
        n_q_heads: query heads of the model, where they differ from the KV heads.
        owner: model and tokenizer fingerprints, checked when the pool is opened again.
        cache_factory: what `agent_cache` calls.

    Raises:
        PoolError: no layer, tensors of other shapes, NaN or infinity in keys or values, codecs for
            another number of layers, or kept tokens that are not the document's.
        ValueError: what is no codec.
    """
    check_codecs(keys, values)
    if not isinstance(n_sink, Integral) or n_sink < 0:
        raise PoolError(
            f"n_sink={n_sink!r}; pass the number of first tokens to protect, 0 for none."
        )
    frozen = []
    shape: tuple[int, ...] = ()
    for i, layer in enumerate(layers):
        _check_finite(layer, i)
        shape = _checked_shape(layer, i, shape)
        heads_kept = None if kept is None else _checked_kept(kept, i, shape)
        own = _of_layer(keys, "keys", i), _of_layer(values, "values", i)
        frozen.append(tuple(pieces_of(layer, *own, n_sink, heads_kept)))
    for name, codecs in (("keys", keys), ("values", values)):
        if isinstance(codecs, Sequence) and frozen and len(codecs) != len(frozen):
            raise PoolError(_MISMATCH.format(len(codecs), name, len(frozen)))
    if not frozen:
        raise PoolError(
            "there is no layer to freeze; pass one LayerKV for each layer of the model."
        )
    _, n_heads, n_tokens, head_dim = shape
    ids = torch.zeros(1, 0) if document_ids is None else document_ids
    if document_ids is not None and ids.shape != (1, n_tokens):
        raise PoolError(
            f"document_ids have shape {list(ids.shape)} for a document of {n_tokens} tokens; pass "
            f"its token ids as [1, {n_tokens}]."
        )
    return SharedKVPool(
        layers=tuple(frozen),
        geometry=Geometry(
            n_layers=len(frozen),
            n_q_heads=n_q_heads or n_heads,
            n_kv_heads=n_heads,
            head_dim=head_dim,
        ),
        n_tokens=n_tokens,
        document_ids=ids[0].to(torch.int32).cpu(),
        owner=owner or {},
        cache_factory=cache_factory,
    )


def check_codecs(keys: object, values: object) -> None:
    """Refuse what is no codec, nor a list of them.

    Raises:
        ValueError: names the side and what was given.
    """
    for name, codecs in (("keys", keys), ("values", values)):
        for codec in codecs if isinstance(codecs, list | tuple) else (codecs,):
            if not isinstance(codec, Tiered):
                check_codec(codec, name)


def _checked_kept(
    kept: Sequence[Sequence[KeptTokens]], index: int, shape: tuple[int, ...]
) -> Sequence[KeptTokens]:
    """What each head of a layer keeps; refused where it names other tokens than there are."""
    _, n_heads, n_tokens, _ = shape
    heads = kept[index] if index < len(kept) else ()
    if isinstance(heads, torch.Tensor) or len(heads) != n_heads:
        raise PoolError(
            f"kept names {len(kept)} layers, and {len(heads)} heads of layer {index}; pass for "
            f"every layer the tokens that each of its {n_heads} heads keeps."
        )
    for head, tokens in enumerate(heads):
        inside = len(tokens) and int(tokens[0]) >= 0 and int(tokens[-1]) < n_tokens
        if not inside or bool((tokens.diff() <= 0).any()):
            raise PoolError(
                f"head {head} of layer {index} keeps {len(tokens)} tokens that do not ascend "
                f"within the document's {n_tokens}."
            )
    return heads


def _of_layer(codecs: Codecs, name: str, index: int) -> Side:
    if not isinstance(codecs, Sequence):
        return codecs
    if index >= len(codecs):
        raise PoolError(_MISMATCH.format(len(codecs), name, f"at least {index + 1}"))
    return codecs[index]


def _checked_shape(layer: LayerKV, index: int, before: tuple[int, ...]) -> tuple[int, ...]:
    shapes = tuple(layer.keys.shape), tuple(layer.values.shape)
    of_one = shapes[0] == shapes[1] and len(shapes[0]) == 4 and shapes[0][0] == 1
    if not of_one or 0 in shapes[0]:
        raise PoolError(
            f"layer {index} has keys {list(shapes[0])} and values {list(shapes[1])}; a pool takes "
            "both as [1, head, token, dim], one document of at least one token, of one shape."
        )
    if before and shapes[0] != before:
        raise PoolError(
            f"layer {index} has shape {list(shapes[0])}, the layers before it {list(before)}; "
            "all layers of a document have one shape (evict with `kept`)."
        )
    return shapes[0]


def _check_finite(layer: LayerKV, index: int) -> None:
    for name, x in (("keys", layer.keys), ("values", layer.values)):
        if not all_finite(x):
            raise PoolError(
                f"the {name} of layer {index} hold NaN or infinity ({x.dtype}), which no codec can "
                "store. The model overflowed: load it with dtype=torch.float32."
            )


def pieces_of(
    layer: LayerKV,
    key_codec: Side,
    value_codec: Side,
    n_sink: int,
    kept: Sequence[KeptTokens] | None,
) -> Iterator[Piece]:
    """A layer's tokens, cut into pieces: sinks, tiers of the rest, heads that keep equally many."""
    _, n_heads, n_tokens, _ = layer.keys.shape
    if is_lossless(key_codec, value_codec):
        n_sink = 0
    ranked = isinstance(key_codec, Tiered) or isinstance(value_codec, Tiered)
    if ranked and layer.attention is None:
        raise PoolError(
            "codecs in tiers rank tokens by the attention that they received, which this layer "
            "does not say. The layers that `read_document` and `evict_document` return do."
        )
    if kept is None:
        kept = [torch.arange(n_tokens, device=layer.keys.device)] * n_heads
    groups: dict[tuple[int, int], list[int]] = {}
    for head, tokens in enumerate(kept):
        n_sinks_kept = int((tokens < n_sink).sum())
        groups.setdefault((n_sinks_kept, len(tokens)), []).append(head)
    for (n_sinks_kept, n_kept), heads in groups.items():
        positions = torch.stack([kept[head] for head in heads])
        sinks, rest = positions.split([n_sinks_kept, n_kept - n_sinks_kept], dim=1)
        if ranked:
            assert layer.attention is not None
            received = layer.attention[0, heads].gather(1, rest)
            rest = rest.gather(1, received.argsort(dim=-1, descending=True, stable=True))
        evicted = n_kept < n_tokens  # else tokens are consecutive, but in tiers: nothing to note
        parts = [(sinks, evicted, FullPrecision(), FullPrecision())]
        for start, stop, *codecs in tiers(key_codec, value_codec, rest.shape[1]):
            chosen = rest[:, start:stop].sort(-1).values if ranked else rest
            parts.append((chosen, evicted or ranked, *codecs))
        for chosen, noted, *codecs in parts:
            if chosen.shape[1]:
                yield _piece(layer, heads if len(heads) < n_heads else None, chosen, noted, *codecs)


def _taken(
    x: Float[Tensor, "head token dim"], positions: Int[Tensor, "head kept"]
) -> Float[Tensor, "head kept dim"]:
    """Each head's own tokens; whole rows, which is several times faster than `gather`."""
    heads = zip(x, positions, strict=True)
    return torch.stack([own.index_select(0, places) for own, places in heads])


def _piece(
    layer: LayerKV,
    heads: Sequence[int] | None,
    positions: Int[Tensor, "head token"],
    noted: bool,
    key_codec: Quantizer,
    value_codec: Quantizer,
) -> Piece:
    """The tokens at these positions; views where they are consecutive and of all heads."""
    own = slice(None) if heads is None else list(heads)
    keys, values = layer.keys[0, own], layer.values[0, own]
    if noted:
        keys, values = _taken(keys, positions), _taken(values, positions)
    else:
        first, n = int(positions[0, 0]), positions.shape[1]
        keys, values = keys[:, first : first + n], values[:, first : first + n]
    moments = None if layer.moments is None else layer.moments[0, own]
    return Piece(
        heads=None if heads is None else tuple(heads),
        keys=Stored(codec=key_codec, data=encode(key_codec, keys, moments)),
        values=Stored(codec=value_codec, data=value_codec.quantize(values)),
        where=located(positions, layer.keys.shape[2]) if noted else None,
    )
