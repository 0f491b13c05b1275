"""One pass of question and answer over the full cache, taken up again at any layer.

When a single layer is evicted, nothing before it changes, so a pass begins there, with what that
layer's attention then returns; the layers behind it read their full caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from polykv_lib.calibration import EncodedItem
from polykv_lib.calibration.recompute import Parts
from polykv_lib.hf.calibration.suffix import Hidden, logits_from, tail_states
from polykv_lib.hf.observe import observed_cache
from polykv_lib.kv import LayerKV


@dataclass(frozen=True, kw_only=True)
class FullPass:
    """Question and answer over the full cache, and what entered each layer and its attention."""

    item: EncodedItem
    context: Sequence[LayerKV]
    seen: Sequence[LayerKV]  # keys and values of context and tail, queries of the tail
    entering: Sequence[Hidden]
    logits: Float[Tensor, "answer vocab"]


class FullLayer(DynamicLayer):
    """A context that new tokens read and never join, so that it serves any number of passes."""

    def __init__(self, context: LayerKV):
        """`context` is not copied."""
        super().__init__()
        self.keys, self.values = context.keys, context.values
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Context and new tokens; one context may serve several rows."""
        rows = (key_states.shape[0], -1, -1, -1)
        keys, values = self.keys.expand(rows), self.values.expand(rows)
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


class GivenLayer(FullLayer):
    """A layer whose attention is known."""

    def __init__(self, context: LayerKV, parts: Parts):
        """`parts`: the attention's output, query heads of a KV head side by side as channels."""
        super().__init__(context)
        self.out = parts.unflatten(2, (-1, context.keys.shape[-1])).transpose(0, 1).flatten(1, 2)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are; the keys carry the handle."""
        handle: Any = key_states
        handle.polykv_layer = self
        return key_states, value_states

    def attend(self, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Called by the attention function instead of an attention."""
        return self.out[None].to(query.dtype)


def full_pass(model: PreTrainedModel, item: EncodedItem, context: Sequence[LayerKV]) -> FullPass:
    """The pass over the context's full cache."""
    seen: dict[int, LayerKV] = {}
    cache = observed_cache(context, lambda i, layer: seen.update({i: layer}))
    logits, entering = tail_states(model, cache, item)
    return FullPass(
        item=item,
        context=context,
        seen=[seen[i] for i in range(len(context))],
        entering=entering,
        logits=logits,
    )


def resumed(
    model: PreTrainedModel, full: FullPass, layer: int, parts: Parts
) -> Float[Tensor, "answer vocab"]:
    """The answer's logits if this layer's attention returns `parts`."""
    cache = Cache(layers=[FullLayer(own) for own in full.context])
    cache.layers[layer] = GivenLayer(full.context[layer], parts)
    return logits_from(model, layer, full.entering[layer], cache, full.item)[0]
