"""What evicting one layer changes, for one item, at the cost of few passes.

The context is read once. One pass of question and answer over the full cache gives every layer's
output under every policy and budget, since what enters a layer does not change when it alone is
evicted. Perplexity and KL take a pass of question and answer for each layer and policy, through
that layer and those after it, over the same cache with its keys and values swapped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from polykv_lib.calibration import EncodedItem, Measured, compare, tail_output
from polykv_lib.calibration.recompute import Difference, Parts
from polykv_lib.evict import EvictionPolicy, Protected, keep
from polykv_lib.evict.attention import column_sums
from polykv_lib.evict.merging import at, merged
from polykv_lib.hf.build import share
from polykv_lib.hf.checks import check_length
from polykv_lib.hf.observe import observe, observed_cache
from polykv_lib.hf.suffix import answer_logits, logits_from, tail_states
from polykv_lib.kv import LayerKV, Scores
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.quantize import FullPrecision


@dataclass(frozen=True, kw_only=True)
class Held:
    """What an eviction left of a layer's context; every head holds equally many tokens."""

    index: Int[Tensor, "1 head kept"]
    merged: LayerKV | None  # the kept tokens, where a merging policy changed them


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
    activation: Literal["o_proj", "heads"] = "o_proj"
    single_layer: bool = True


@dataclass(frozen=True)
class _Scored:
    """A policy whose scores are known: one scoring serves every budget."""

    policy: EvictionPolicy
    scores: Scores

    def score(self, layer: LayerKV) -> Scores:
        return self.scores

    def protect(self, budget: int) -> Protected:
        return self.policy.protect(budget)


@torch.no_grad()
def measure_item(model: PreTrainedModel, item: EncodedItem, settings: Settings) -> Measured:
    """Every measurement of one item; the model must be prepared.

    Raises:
        ValueError: the item is longer than the model's positions or window.
    """
    n_tokens = len(item.context_ids)
    check_length(model, n_tokens + len(item.tail_ids), f"item {item.id!r}")
    ids = torch.tensor([item.context_ids])
    layers, seen = observe(model, ids, lambda _, layer: (_entropy(layer), _held(layer, settings)))
    held = [of_layer for _, of_layer in seen]
    full, differences = _recompute(model, item, layers, held, settings.activation)
    grid = (len(layers), len(settings.policies), len(settings.fractions))
    flat = [d for of_layer in differences for d in of_layer]
    heads = np.array([d.head_errors for d in flat]).reshape(*grid, -1)
    nll, kl = _swap(model, item, settings, layers, held) if settings.single_layer else (None, None)
    return Measured(
        item=item.id,
        family=item.family,
        n_tokens=n_tokens,
        full_nll=_nll(full, item),
        entropy=np.array([entropy for entropy, _ in seen]),
        cosine=np.array([d.cosine for d in flat]).reshape(grid),
        error=np.array([d.error for d in flat]).reshape(grid),
        head_error=np.moveaxis(heads, -1, 1),
        nll=nll,
        kl=kl,
    )


def _nll(logits: Float[Tensor, "answer vocab"], item: EncodedItem) -> float:
    return float(token_nll(logits, torch.tensor(item.answer_ids, device=logits.device)).mean())


def _entropy(layer: LayerKV) -> float:
    """Of the attention averaged over heads and queries of the context (arXiv:2606.15157), nats."""
    assert layer.queries is not None
    mass = column_sums(layer.queries, layer.keys, layer.softmax_scale)[0].mean(0).double()
    return float(torch.special.entr(mass / mass.sum()).sum())


def _held(layer: LayerKV, settings: Settings) -> list[Held]:
    """What each policy leaves at each fraction, policy by policy."""
    _, n_heads, n_tokens, _ = layer.keys.shape
    found = []
    for policy in settings.policies:
        scored = _Scored(policy, policy.score(layer))
        for fraction in settings.fractions:
            kept = keep(scored, layer, (_tokens(fraction, n_tokens),) * n_heads)
            index, changed = torch.stack(kept)[None], merged(policy, layer, kept)
            if changed is not None:
                changed = LayerKV(keys=at(changed.keys, index), values=at(changed.values, index))
            found.append(Held(index=index, merged=changed))
    return found


def _tokens(fraction: float, n_tokens: int) -> int:
    return max(1, round(fraction * n_tokens))


def _recompute(
    model: PreTrainedModel,
    item: EncodedItem,
    layers: Sequence[LayerKV],
    held: Sequence[Sequence[Held]],
    activation: str,
) -> tuple[Float[Tensor, "answer vocab"], list[list[Difference]]]:
    """The full cache's logits, and each layer's differences by policy, then point."""
    differences: list[list[Difference]] = [[] for _ in layers]

    def see(index: int, layer: LayerKV) -> None:
        full = _output(model, index, tail_output(layer), activation)
        for own in held[index]:
            evicted = tail_output(_evicted(layer, own, len(item.context_ids)))
            differences[index].append(compare(full, _output(model, index, evicted, activation)))

    return answer_logits(model, observed_cache(layers, see), item), differences


def _evicted(layer: LayerKV, held: Held, n_context: int) -> LayerKV:
    """The layer with its context as it is held; the tail stays."""
    context = _context(layer, held)
    return replace(
        layer,
        keys=torch.cat([context.keys, layer.keys[:, :, n_context:]], 2),
        values=torch.cat([context.values, layer.values[:, :, n_context:]], 2),
    )


def _context(layer: LayerKV, held: Held) -> LayerKV:
    """The context as it is held."""
    return held.merged or LayerKV(
        keys=at(layer.keys, held.index), values=at(layer.values, held.index)
    )


def _output(
    model: PreTrainedModel, index: int, parts: Parts, activation: str
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


def _swap(
    model: PreTrainedModel,
    item: EncodedItem,
    settings: Settings,
    layers: Sequence[LayerKV],
    held: Sequence[Sequence[Held]],
) -> tuple[Float[np.ndarray, "layer policy"], Float[np.ndarray, "layer policy"]]:
    """NLL and KL of the answer with one layer evicted to the target, for each layer and policy."""
    ids = torch.tensor([item.context_ids])
    pool = partial(share, model, document_ids=ids, keys=FullPrecision(), values=FullPrecision())
    whole = pool(layers)
    full, entering = tail_states(model, whole.agent_cache(1), item)
    nll, kl = np.zeros((2, len(layers), len(settings.policies)))
    first = settings.fractions.index(settings.target)
    for policy in range(len(settings.policies)):
        at_target = [of_layer[first + policy * len(settings.fractions)] for of_layer in held]
        evicted = pool([_context(layer, h) for layer, h in zip(layers, at_target, strict=True)])
        for i in range(len(layers)):
            mixed = whole.layers[:i] + evicted.layers[i : i + 1] + whole.layers[i + 1 :]
            cache = replace(whole, layers=mixed).agent_cache(1)
            logits = logits_from(model, i, entering[i], cache, item)
            nll[i, policy] = _nll(logits, item)
            kl[i, policy] = float(kl_nats(full, logits).mean())
    return nll, kl
