"""A document read once: every layer's keys and values, what its queries say, what plans keep."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polykv_lib.evict import Plan, Tally, counted, evict_each
from polykv_lib.evict.attention import recent_attention
from polykv_lib.evict.plan import Evicted
from polykv_lib.hf.checks import check_chunk, check_document, check_plan, check_prepared
from polykv_lib.hf.observe import observe
from polykv_lib.kv import KeptTokens, LayerKV, Scores
from polykv_lib.quantize.shaping import second_moments

Seen = tuple[Tensor, Scores]  # of a layer's queries: their second moments, where they look
WINDOW = 64  # last queries whose attention is noted


class KeptByPlan(list[Sequence[KeptTokens]]):
    """What a plan keeps, by layer and KV head.

    `merged` has the layers that merging changed; `tallies` each layer's running numbers, over the
    whole document, from which policies go on while a cache generates.
    """

    merged: dict[int, LayerKV]
    tallies: Sequence[Mapping[Tally, Scores]]


def read_document(
    model: PreTrainedModel, document_ids: Tensor, *, chunk: int | None = None
) -> list[LayerKV]:
    """Keys and values of every layer from one prefill, without the vocabulary's logits.

    What the document's queries say about it comes along: their second moments, for codecs with
    shaped=True, and the attention that each token received, for codecs in tiers. With a `chunk`,
    so many tokens are read at once and the same is gathered over the chunks.

    Raises:
        ValueError: ids of another type or shape, or longer than the model's positions or window;
            a chunk below 1.
    """
    check_prepared(model)
    check_document(model, document_ids)
    check_chunk(chunk)
    before: dict[int, tuple[Tensor, Tensor]] = {}  # moments so far and the last queries

    def see(i: int, layer: LayerKV) -> Seen:
        moments, attention = _seen(layer, before.get(i))
        if chunk is not None:
            before[i] = moments, _newest(layer, before.get(i)).clone()
        return moments, attention

    layers, seen = observe(model, document_ids, see, chunk)
    return _with(layers, seen)


def _seen(layer: LayerKV, before: tuple[Tensor, Tensor] | None = None) -> Seen:
    assert layer.queries is not None
    moments = second_moments(layer.queries, layer.keys.shape[1])
    if before is not None:
        moments = before[0].lerp(moments, layer.queries.shape[2] / layer.keys.shape[2])
    newest = _newest(layer, before)
    return moments, recent_attention(newest, layer.keys, layer.softmax_scale, WINDOW)


def _newest(layer: LayerKV, before: tuple[Tensor, Tensor] | None) -> Tensor:
    """The last queries so far, `WINDOW` or fewer."""
    assert layer.queries is not None
    new = layer.queries if before is None else torch.cat([before[1], layer.queries], dim=2)
    return new[:, :, -WINDOW:]


def _with(layers: Sequence[LayerKV], seen: Sequence[Seen]) -> list[LayerKV]:
    return [
        replace(layer, moments=moments, attention=attention)
        for layer, (moments, attention) in zip(layers, seen, strict=True)
    ]


def evict_document(
    model: PreTrainedModel, document_ids: Tensor, plans: Sequence[Plan]
) -> tuple[list[LayerKV], list[KeptByPlan]]:
    """Keys and values from one prefill, and what each plan keeps of them, layer by layer and head.

    Raises:
        ValueError: as `read_document`, or a plan that was made for another model.
    """
    check_prepared(model)
    check_document(model, document_ids)
    config = model.config.get_text_config()
    for plan in plans:
        check_plan(plan)
        plan.check(config.num_hidden_layers, config.num_key_value_heads)

    def see(i: int, layer: LayerKV) -> tuple[list[Evicted], Mapping[Tally, Scores], Seen]:
        layer = counted(layer, (own.policy for plan in plans for own in plan.phases_of(i)))
        evicted = evict_each([plan.layers[i] for plan in plans], layer)
        return evicted, layer.tallies, _seen(layer)

    layers, seen = observe(model, document_ids, see)
    of_layers, tallies, found = zip(*seen, strict=True)
    of_plans = zip(*of_layers, strict=True)
    return _with(layers, found), [_kept(of_plan, tallies) for of_plan in of_plans]


def _kept(of_layers: Sequence[Evicted], tallies: Sequence[Mapping[Tally, Scores]]) -> KeptByPlan:
    kept = KeptByPlan(tokens for tokens, _ in of_layers)
    kept.merged = {i: m for i, (_, m) in enumerate(of_layers) if m is not None}
    kept.tallies = tallies
    return kept
