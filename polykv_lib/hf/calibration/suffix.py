"""Question and answer after a cache: through the whole model, or through its layers from one on.

When only one layer's cache changes, what enters that layer does not. The pass may then begin there,
with the hidden states of an earlier pass: on average half the layers, and exactly the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polykv_lib.calibration import EncodedItem
from polykv_lib.hf import compat
from polykv_lib.metrics.perplexity import token_nll

Hidden = Float[Tensor, "row tail width"]


@torch.no_grad()
def answer_logits(
    model: PreTrainedModel, cache: Any, item: EncodedItem
) -> Float[Tensor, "answer vocab"]:
    """Logits in fp32 that predict the answer, after a cache that has seen the item's context."""
    return answer_logits_of_rows(model, cache, item, 1)[0]


@torch.no_grad()
def answer_logits_of_rows(
    model: PreTrainedModel, cache: Any, item: EncodedItem, n_rows: int
) -> Float[Tensor, "row answer vocab"]:
    """The same after a cache of several rows."""
    ids = torch.tensor([item.tail_ids], device=model.device)
    return _logits(model, cache, item, ids.expand(n_rows, -1))


@torch.no_grad()
def decoded_logits(
    model: PreTrainedModel, cache: Any, item: EncodedItem
) -> Float[Tensor, "answer vocab"]:
    """The same with the question fed at once and the answer token by token, as while generating.

    A cache that evicts after every step does so here.
    """
    tail = torch.tensor([item.tail_ids], device=model.device)
    positions = len(item.context_ids) + torch.arange(tail.shape[1], device=model.device)
    steps = [
        compat.forward(
            model,
            tail[:, start:stop],
            cache,
            position_ids=positions[None, start:stop],
            logits_to_keep=1,
        )
        for start, stop in item.steps
    ]
    return torch.cat([step.logits[0].float() for step in steps])


def answer_nll(logits: Float[Tensor, "answer vocab"], item: EncodedItem) -> float:
    """Mean over the answer, nats a token."""
    return float(token_nll(logits, torch.tensor(item.answer_ids, device=logits.device)).mean())


@torch.no_grad()
def tail_states(
    model: PreTrainedModel, cache: Any, item: EncodedItem
) -> tuple[Float[Tensor, "answer vocab"], list[Hidden]]:
    """The same logits, and the hidden states of question and answer that enter each layer."""
    entering: list[Hidden] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
        for layer in model.base_model.layers
    ]
    try:
        return answer_logits(model, cache, item), entering
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def logits_from(
    model: PreTrainedModel, start: int, hidden: Hidden, cache: Any, item: EncodedItem
) -> Float[Tensor, "row answer vocab"]:
    """The logits of a pass that begins at layer `start` with what enters it.

    The cache of the layers before is not read; that of the others must have seen the context.
    """
    ids = torch.tensor([item.tail_ids], device=model.device).expand(hidden.shape[0], -1)
    with _begun_at(model, start, hidden):
        return _logits(model, cache, item, ids)


def _logits(
    model: PreTrainedModel, cache: Any, item: EncodedItem, ids: Int[Tensor, "row tail"]
) -> Float[Tensor, "row answer vocab"]:
    n_tail = len(item.tail_ids)
    positions = len(item.context_ids) + torch.arange(n_tail, device=model.device)
    output = compat.forward(
        model,
        ids,
        cache,
        position_ids=positions[None],
        logits_to_keep=len(item.answer_ids),
    )
    return output.logits.float()


class _Passed(nn.Module):
    """Stands where a layer was and hands on what enters it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)  # models choose masks by it

    def forward(self, hidden_states: Hidden, *args: Any, **kwargs: Any) -> Hidden:
        return hidden_states


@contextmanager
def _begun_at(model: PreTrainedModel, start: int, hidden: Hidden) -> Iterator[None]:
    """The model with `hidden` entering its layer `start`, those before passed over.

    Not in the embeddings' place, which some models scale. Afterwards the model is as it was.
    """
    layers = model.base_model.layers
    hook = layers[start].register_forward_pre_hook(lambda _, inputs: (hidden, *inputs[1:]))
    model.base_model.layers = nn.ModuleList([*map(_Passed, layers[:start]), *layers[start:]])
    try:
        yield
    finally:
        model.base_model.layers = layers
        hook.remove()
