"""What evicting one layer changes, for one item, at the cost of few passes.

The context is read once, then question and answer over the full cache. What enters a layer does not
change when it alone is evicted, so that one pass gives every layer's output under every policy and
budget, in either phase. Perplexity and KL take the rest of a pass, from that layer on, for each
layer and policy.

Phases (arXiv:2606.15157): at prefill the context is evicted once, before the question is read. In
decode the context is read whole; from the question on, each step leaves a layer at most its budget,
context and own tokens together. What a policy that was made for the prefill does there is its own
definition, on the newest queries (`evict/`): SnapKV's window is then the step's query alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from polykv_lib.calibration import (
    EncodedItem,
    Measured,
    Phase,
    compare,
    decoded_output,
    tail_output,
)
from polykv_lib.calibration.recompute import Parts
from polykv_lib.evict import EvictionPolicy, LayerPlan, counted, evict_each
from polykv_lib.evict.merging import at
from polykv_lib.evict.tallies import AttentionReceived, Tally
from polykv_lib.hf.calibration.resumed import FullPass, full_pass, resumed
from polykv_lib.hf.calibration.suffix import answer_nll
from polykv_lib.hf.checks import check_length
from polykv_lib.hf.observe import observe
from polykv_lib.kv import LayerKV, Scores
from polykv_lib.metrics.agreement import kl_nats


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured of each item.

    `activation` is what the cosine and the errors compare: the attention's output after its output
    projection without bias, or the heads' outputs before it. `single_layer`: also the passes that
    perplexity and KL need.
    """

    policies: tuple[EvictionPolicy, ...]
    fractions: tuple[float, ...]  # of the context; ascending, target among them
    target: float
    phase: Phase = "prefill"
    activation: Literal["o_proj", "heads"] = "o_proj"
    single_layer: bool = True

    def __post_init__(self) -> None:
        if self.activation not in ("o_proj", "heads"):
            raise ValueError(f"activation={self.activation!r}; choose one of: o_proj, heads.")

    def budgets(self, n_tokens: int) -> list[int]:
        """Tokens a head at each fraction of a context."""
        return [max(1, round(fraction * n_tokens)) for fraction in self.fractions]


@dataclass(frozen=True, kw_only=True)
class Held:
    """What an eviction left of a layer's context; every head holds equally many tokens."""

    index: Int[Tensor, "1 head kept"]
    merged: LayerKV | None  # the kept tokens, where a merging policy changed them


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What is kept of a layer's observation while the context is read."""

    entropy: float | None  # of the prefill phase
    held: Sequence[Held]  # policy by policy, then budget by budget; of the prefill phase
    tallies: dict[Tally, Scores]  # from which the decode phase goes on


@torch.no_grad()
def measure_item(model: PreTrainedModel, item: EncodedItem, settings: Settings) -> Measured:
    """Every measurement of one item; the model must be prepared.

    Raises:
        ValueError: the item is longer than the model's positions or window, or its answer too short
            for a decode phase.
    """
    n_tokens = len(item.context_ids)
    check_length(model, n_tokens + len(item.tail_ids), f"item {item.id!r}")
    decoding = settings.phase == "decode"
    if decoding and len(item.answer_ids) < 2:
        raise ValueError(
            f"the answer of item {item.id!r} has one token, which is read before anything is "
            "evicted while decoding; calibrate on answers of at least 2 tokens."
        )
    context, watched = observe(model, torch.tensor([item.context_ids]), partial(_watch, settings))
    full = full_pass(model, item, context)
    first = len(item.question_ids) if decoding else 0  # of the tail, to read an evicted layer
    plain = [tail_output(layer) for layer in full.seen]
    project = partial(_output, model, settings.activation)
    whole = [project(i, parts[:, first:]).sum(0) for i, parts in enumerate(plain)]
    shape = (len(context), len(settings.policies), len(settings.fractions))
    error, cosine = np.zeros((2, *shape))
    head_error = np.zeros((shape[0], context[0].keys.shape[1], *shape[1:]))
    nll, kl = np.zeros((2, *shape[:2]))
    evicted = _decoded if decoding else _prefilled
    for policy, point, layer, parts in evicted(full, watched, settings):
        found = compare(whole[layer], project(layer, (plain[layer] - parts)[:, first:]))
        error[layer, policy, point] = found.error
        head_error[layer, :, policy, point] = found.head_errors
        cosine[layer, policy, point] = found.cosine
        if settings.single_layer and settings.fractions[point] == settings.target:
            logits = resumed(model, full, layer, parts)
            nll[layer, policy] = answer_nll(logits, item)
            kl[layer, policy] = float(kl_nats(full.logits, logits).mean())
    return Measured(
        item=item.id,
        family=item.family,
        n_tokens=n_tokens,
        full_nll=answer_nll(full.logits, item),
        entropy=np.array(
            [
                own.entropy if own.entropy is not None else _entropy(_from(layer, first))
                for own, layer in zip(watched, full.seen, strict=True)
            ]
        ),
        cosine=cosine,
        error=error,
        head_error=head_error,
        nll=nll if settings.single_layer else None,
        kl=kl if settings.single_layer else None,
    )


def _watch(settings: Settings, _: int, layer: LayerKV) -> Watched:
    layer = counted(layer, settings.policies)
    if settings.phase == "decode":
        return Watched(entropy=None, held=(), tallies=dict(layer.tallies))
    plans = [
        LayerPlan(policy=policy, budget=budget)
        for policy in settings.policies
        for budget in settings.budgets(layer.keys.shape[2])
    ]
    held = []
    for kept, merged in evict_each(plans, layer):
        index = torch.stack(kept)[None]
        if merged is not None:
            merged = LayerKV(keys=at(merged.keys, index), values=at(merged.values, index))
        held.append(Held(index=index, merged=merged))
    return Watched(entropy=_entropy(layer), held=held, tallies={})


def _entropy(layer: LayerKV) -> float:
    """Of the queries' attention averaged over heads and queries (arXiv:2606.15157), nats."""
    tally = AttentionReceived()
    known = layer.tallies.get(tally)
    mass = (tally.after(layer, None) if known is None else known)[0].mean(0).double()
    return float(torch.special.entr(mass / mass.sum()).sum())


def _from(layer: LayerKV, first: int) -> LayerKV:
    """The layer with the queries of the tail from one on."""
    assert layer.queries is not None
    return replace(layer, queries=layer.queries[:, :, first:])


Evicted = Iterator[tuple[int, int, int, Parts]]  # policy, point, layer, its attention's output


def _prefilled(full: FullPass, watched: Sequence[Watched], settings: Settings) -> Evicted:
    n_points = len(settings.fractions)
    for i, (layer, own) in enumerate(zip(full.seen, watched, strict=True)):
        for place, held in enumerate(own.held):
            parts = tail_output(_evicted(layer, held, len(full.item.context_ids)))
            yield *divmod(place, n_points), i, parts


def _evicted(layer: LayerKV, held: Held, n_context: int) -> LayerKV:
    """The layer with its context as it is held; the tail stays."""
    context = held.merged or LayerKV(
        keys=at(layer.keys, held.index), values=at(layer.values, held.index)
    )
    return replace(
        layer,
        keys=torch.cat([context.keys, layer.keys[:, :, n_context:]], 2),
        values=torch.cat([context.values, layer.values[:, :, n_context:]], 2),
    )


def _decoded(full: FullPass, watched: Sequence[Watched], settings: Settings) -> Evicted:
    layers = _rows(full.seen, [own.tallies for own in watched])
    for p, policy in enumerate(settings.policies):
        for f, budget in enumerate(settings.budgets(len(full.item.context_ids))):
            outputs = decoded_output(layers, policy, budget, full.item.steps)
            for i, (parts, own) in enumerate(zip(outputs, full.seen, strict=True)):
                yield p, f, i, parts.to(own.keys.device)


def _rows(layers: Sequence[LayerKV], tallies: Sequence[dict[Tally, Scores]]) -> LayerKV:
    """Layers as rows of one batch, on the first one's device."""

    def cat(sides: Sequence[Tensor | None]) -> Tensor:
        return torch.cat([side.to(layers[0].keys.device) for side in sides if side is not None])

    keys = cat([layer.keys for layer in layers])
    return LayerKV(
        keys=keys,
        values=cat([layer.values for layer in layers]),
        queries=cat([layer.queries for layer in layers]),
        scale=layers[0].scale,
        tallies={
            tally: functional.pad(counts, (0, keys.shape[2] - counts.shape[2]))
            for tally in tallies[0]
            for counts in [cat([own[tally] for own in tallies])]
        },
    )


def _output(
    model: PreTrainedModel, activation: str, index: int, parts: Parts
) -> Float[Tensor, "head tail width"]:
    """What each KV head adds to the compared activation of a layer."""
    n_heads, n_tail, n_channels = parts.shape
    wide = parts.new_zeros(n_heads, n_tail, n_heads, n_channels)
    for head in range(n_heads):
        wide[head, :, head] = parts[head]
    if activation == "heads":
        return wide.flatten(2)
    project = model.base_model.layers[index].self_attn.o_proj
    bias = 0.0 if project.bias is None else project.bias.float()
    return project(wide.flatten(2).to(model.dtype)).float() - bias
