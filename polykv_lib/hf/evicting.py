"""A transformers cache that evicts after the prefill, and after every step while generating.

Length means tokens seen, so that positions are right however few tokens are held.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, PreTrainedModel

from polykv_lib.evict import Plan
from polykv_lib.hf import compat
from polykv_lib.hf.evicting_layer import EvictingLayer, New
from polykv_lib.pool import PoolError


class EvictingCache(Cache):
    """Private cache of a batch of rows, each layer under its own policies and budgets.

    The first forward is the prefill, after which `plan.layers` evict; after every later forward, of
    one token or several, `plan.decode` does. Rows may be padded on either side, as transformers'
    2-D mask says, which covers all tokens seen; padding is never held. `model.generate` works, and
    so does any loop that passes position_ids where rows are padded.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan):
        """An empty cache for a prepared model.

        Raises:
            ValueError: a plan that was made for another model.
        """
        config = model.config.get_text_config()
        n_layers, n_heads = config.num_hidden_layers, config.num_key_value_heads
        plan.check(n_layers, n_heads)
        window = compat.attention_window(model)
        decode = plan.decode or (None,) * n_layers
        layers = [
            EvictingLayer(prefill, later, n_heads, window)
            for prefill, later in zip(plan.layers, decode, strict=True)
        ]
        super().__init__(layers=layers)
        self.last: EvictingLayer | None = None  # updated last: its attention must have evicted

    def update(
        self, key_states: New, value_states: New, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[New, New]:
        """Take one layer's new keys and values.

        Raises:
            PoolError: the attention in use does not read this cache.
        """
        self._check_read(self.last)
        self.last = self.layers[layer_idx]
        return self.last.update(key_states, value_states, *args, **kwargs)

    def _check_read(self, layer: EvictingLayer | None) -> None:
        if layer is not None and layer.unread:
            raise PoolError(
                "the model's attention did not read the cache, so nothing was evicted. Call "
                "polykv_lib.prepare(model) first, and do not change the attention afterwards."
            )

    def check(self) -> None:
        """Refuse a run in which a layer holds more than the budget of its phase.

        Raises:
            PoolError: nothing was evicted although the budget was exceeded.
        """
        self._check_read(self.last)
        for i, layer in enumerate(self.layers):
            for held, budget in zip(layer.kept_per_head, layer.budgets, strict=layer.seen > 0):
                if budget is not None and held > budget:
                    raise PoolError(
                        f"layer {i} holds {held} tokens in a head whose budget is {budget}: "
                        "nothing was evicted. Feed tokens through the model, not to the cache."
                    )

    def begin_prefill(self) -> None:
        """The next forward belongs to the prefill too: a prompt that is fed in chunks."""
        for layer in self.layers:
            layer.prefill_goes_on = True

    @property
    def kept_per_head(self) -> tuple[tuple[int, ...], ...]:
        """Tokens that the longest row holds, by layer and KV head."""
        return tuple(layer.kept_per_head for layer in self.layers)

    def positions(self, layer_idx: int, row: int = 0) -> list[Int[Tensor, " _"]]:
        """Which tokens each KV head holds for a row, in the order of time, counted from 0."""
        return self.layers[layer_idx].positions(row)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held."""
        return sum(layer.nbytes for layer in self.layers)


@torch.no_grad()
def evicting_prefill(
    model: PreTrainedModel,
    ids: Int[Tensor, "row token"],
    plan: Plan,
    attention_mask: Int[Tensor, "row token"] | None = None,
    chunk: int | None = None,
) -> EvictingCache:
    """An `EvictingCache` that has read a prompt, in chunks of so many tokens or at once.

    Chunks bound what is held on the way by budget + chunk; every chunk evicts by what its own
    queries attend to, so the kept tokens may differ from those of one piece.
    """
    cache = EvictingCache(model, plan)
    ids = ids.to(model.device)
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    n_tokens = ids.shape[1]
    for start in range(0, n_tokens, chunk or n_tokens):
        part = slice(start, start + (chunk or n_tokens))
        cache.begin_prefill()
        compat.forward(
            model.base_model,
            ids[:, part],
            cache,
            position_ids=positions[:, part],
            attention_mask=mask[:, : part.stop],
        )
    cache.check()
    return cache
