"""A prefill that policies can watch: each layer's queries, keys and values."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from polykv_lib.hf import compat
from polykv_lib.kv import LayerKV, Queries

T = TypeVar("T")


class ObservedLayer(DynamicLayer):
    """An ordinary cache layer that hands what its attention saw to a function, once."""

    def __init__(self, see: Callable[[LayerKV], Any]):
        """`see` is called after the layer's attention."""
        super().__init__()
        self.see = see

    def update(
        self,
        key_states: Float[Tensor, "batch head new dim"],
        value_states: Float[Tensor, "batch head new value_dim"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "batch head token dim"], Float[Tensor, "batch head token value_dim"]]:
        """Append and return keys and values; both carry the handle.

        They are other tensor objects than the layer's own: tensors that refer to what holds them
        would never be freed.
        """
        sides = super().update(key_states, value_states, *args, **kwargs)
        keys, values = (side.view(side.shape) for side in sides)
        keys.polykv_observer = values.polykv_observer = self
        return keys, values

    def after_attention(self, queries: Queries, scale: float | None) -> None:
        """Called by the attention function."""
        self.see(LayerKV(keys=self.keys, values=self.values, queries=queries, scale=scale))


@torch.no_grad()
def observe(
    model: PreTrainedModel,
    ids: Tensor,
    see: Callable[[int, LayerKV], T],
    chunk: int | None = None,
) -> tuple[list[LayerKV], list[T]]:
    """One prefill: every layer's keys and values, and what `see(layer, observation)` returned.

    Queries are held for one layer at a time. Given a `chunk`, so many tokens are read at a time:
    `see` meets every chunk's queries with the keys so far, and what it last returned is kept.

    Raises:
        ValueError: the model's attention gets other keys than its cache stored.
    """
    seen: dict[int, T] = {}
    n_layers = model.config.get_text_config().num_hidden_layers
    cache = _watched(n_layers, lambda i, layer: seen.update({i: see(i, layer)}))
    for part in ids.to(model.device).split(chunk or ids.shape[1], dim=1):
        compat.forward(model.base_model, part, cache)
    if len(seen) < n_layers:
        raise changed(model.config.model_type, "keys")
    layers = [LayerKV(keys=layer.keys, values=layer.values) for layer in cache.layers]
    return layers, [seen[i] for i in range(n_layers)]


def changed(who: str, side: str) -> ValueError:
    """The refusal of a model whose attention gets other tensors than its cache returned."""
    return ValueError(
        f"{who} changes {side} after its cache has stored them, which a pool can not read. "
        "Use a model that does not, such as Llama, Qwen, Mistral or Phi-3."
    )


def observed_cache(layers: Sequence[LayerKV], see: Callable[[int, LayerKV], Any]) -> Cache:
    """An ordinary cache of these layers that shows `see` each layer's attention to what is fed."""
    cache = _watched(len(layers), see)
    for own, layer in zip(cache.layers, layers, strict=True):
        own.update(layer.keys, layer.values)
    return cache


def _watched(n_layers: int, see: Callable[[int, LayerKV], Any]) -> Cache:
    return Cache(layers=[ObservedLayer(partial(see, i)) for i in range(n_layers)])
