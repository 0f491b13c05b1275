"""What evicting one layer changes, for one item, at the cost of few passes.

The context is read once. One pass of question and answer over the full cache gives every layer's
output under every policy and budget, since what enters a layer does not change when it alone is
evicted. Perplexity and KL take a pass of question and answer for each layer and policy, over the
same cache with that layer's keys and values swapped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from polykv_lib.calibration import Item, Measured, attend_visible, compare, tail_scores
from polykv_lib.calibration.recompute import Difference, Parts
from polykv_lib.evict import EvictionPolicy, Protected, keep
from polykv_lib.evict.attention import column_sums
from polykv_lib.hf import compat
from polykv_lib.hf.build import Kept, check_length, share
from polykv_lib.hf.observe import ObservedLayer, observe
from polykv_lib.kv import LayerKV, Scores
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.quantize import FullPrecision

Masks = Bool[Tensor, "policy point head context"]  # True where a token is kept


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


class _TailLayer(ObservedLayer):
    """Goes on from a context, and hands all of its keys to the watcher."""

    def update(
        self,
        key_states: Float[Tensor, "batch head new dim"],
        value_states: Float[Tensor, "batch head new dim"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "batch head token dim"], Float[Tensor, "batch head token dim"]]:
        keys, values = DynamicLayer.update(self, key_states, value_states, *args, **kwargs)
        keys.polykv_observer = self
        return keys, values


@torch.no_grad()
def measure_item(model: PreTrainedModel, item: Item, settings: Settings) -> Measured:
    """Every measurement of one item; the model must be prepared.

    Raises:
        ValueError: the item is longer than the model's positions or window.
    """
    n_tokens = len(item.context_ids)
    check_length(model, n_tokens + len(item.tail_ids), f"item {item.id!r}")
    ids = torch.tensor([item.context_ids])
    layers, seen = observe(model, ids, lambda _, layer: (_entropy(layer), _masks(layer, settings)))
    masks = [kept for _, kept in seen]
    full, differences = _recompute(model, item, layers, masks, settings.activation)
    grid = (len(layers), len(settings.policies), len(settings.fractions))
    flat = [d for of_layer in differences for d in of_layer]
    heads = np.array([d.head_errors for d in flat]).reshape(*grid, -1)
    target = settings.fractions.index(settings.target)
    nll, kl = None, None
    if settings.single_layer:
        at_target = [kept[:, target] for kept in masks]
        nll, kl = _swap(model, item, layers, at_target, full)
    return Measured(
        item=item.id,
        family=item.family,
        n_tokens=n_tokens,
        full_nll=_nll(full, item),
        entropy=np.array([entropy for entropy, _ in seen]),
        cosine=np.array([d.cosine for d in flat]).reshape(grid)[..., target],
        error=np.array([d.error for d in flat]).reshape(grid),
        head_error=np.moveaxis(heads, -1, 1),
        nll=nll,
        kl=kl,
    )


@torch.no_grad()
def answer_logits(model: PreTrainedModel, cache: Any, item: Item) -> Float[Tensor, "answer vocab"]:
    """Logits in fp32 that predict the answer, after a cache that has seen the item's context."""
    tail = torch.tensor([item.tail_ids], device=model.device)
    positions = len(item.context_ids) + torch.arange(tail.shape[1], device=model.device)
    output = compat.forward(
        model, tail, cache, position_ids=positions[None], logits_to_keep=len(item.answer_ids)
    )
    return output.logits[0].float()


def _nll(logits: Float[Tensor, "answer vocab"], item: Item) -> float:
    return float(token_nll(logits, torch.tensor(item.answer_ids, device=logits.device)).mean())


def _entropy(layer: LayerKV) -> float:
    """Of the attention averaged over heads and queries of the context (arXiv:2606.15157), nats."""
    assert layer.queries is not None
    mass = column_sums(layer.queries, layer.keys, layer.softmax_scale)[0].mean(0).double()
    return float(torch.special.entr(mass / mass.sum()).sum())


def _masks(layer: LayerKV, settings: Settings) -> Masks:
    _, n_heads, n_tokens, _ = layer.keys.shape
    grid = (len(settings.policies), len(settings.fractions), n_heads, n_tokens)
    masks = torch.zeros(grid, dtype=torch.bool, device=layer.keys.device)
    for of_policy, policy in zip(masks, settings.policies, strict=True):
        scored = _Scored(policy, policy.score(layer))
        for mask, fraction in zip(of_policy, settings.fractions, strict=True):
            budget = max(1, round(fraction * n_tokens))
            for row, kept in zip(mask, keep(scored, layer, (budget,) * n_heads), strict=True):
                row[kept] = True
    return masks


def _recompute(
    model: PreTrainedModel,
    item: Item,
    layers: Sequence[LayerKV],
    masks: Sequence[Masks],
    activation: str,
) -> tuple[Float[Tensor, "answer vocab"], list[list[Difference]]]:
    """The full cache's logits, and each layer's differences by policy, then point."""
    differences: list[list[Difference]] = [[] for _ in layers]

    def watch(index: int) -> Callable[[LayerKV], None]:
        def see(layer: LayerKV) -> None:
            scores = tail_scores(layer)
            full = _output(model, index, attend_visible(scores, layer), activation)
            differences[index] = [
                compare(
                    full, _output(model, index, attend_visible(scores, layer, kept), activation)
                )
                for kept in masks[index].flatten(0, 1)
            ]

        return see

    cache = Cache(layers=[_TailLayer(watch(i)) for i in range(len(layers))])
    for own, layer in zip(cache.layers, layers, strict=True):
        own.update(layer.keys, layer.values)
    return answer_logits(model, cache, item), differences


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
    item: Item,
    layers: Sequence[LayerKV],
    masks: Sequence[Bool[Tensor, "policy head context"]],
    full: Float[Tensor, "answer vocab"],
) -> tuple[Float[np.ndarray, "layer policy"], Float[np.ndarray, "layer policy"]]:
    """NLL and KL of the answer with one layer evicted, for each layer and policy."""
    lossless = FullPrecision()
    ids = torch.tensor([item.context_ids])

    def pool(kept: Kept | None) -> Any:
        return share(model, layers, ids, keys=lossless, values=lossless, kept=kept)

    whole = pool(None)
    nll, kl = np.zeros((2, len(layers), len(masks[0])))
    for policy in range(len(masks[0])):
        evicted = pool([[row.nonzero()[:, 0] for row in kept[policy]] for kept in masks])
        for i in range(len(layers)):
            mixed = whole.layers[:i] + evicted.layers[i : i + 1] + whole.layers[i + 1 :]
            cache = replace(whole, layers=mixed).agent_cache(1)
            logits = answer_logits(model, cache, item)
            nll[i, policy] = _nll(logits, item)
            kl[i, policy] = float(kl_nats(full, logits).mean())
    return nll, kl
