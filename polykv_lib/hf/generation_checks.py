"""What transformers' `generate()` may be given with a pool: the document's tokens come first.

`generate()` drops as many ids as a cache has seen, whatever they are; the wrong ones would be lost
without a word.
"""

from functools import wraps
from inspect import signature
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from polykv_lib.hf.caches import AgentCache
from polykv_lib.pool import PoolError


def check_generation(model: PreTrainedModel) -> None:
    """Have a model look at what it is given with an agent's cache before it prepares a step."""
    if not model.can_generate():
        return
    plain = type(model).prepare_inputs_for_generation
    says_how_many = "next_sequence_length" in signature(plain).parameters  # else all ids are fed

    @wraps(plain)
    def prepare_inputs_for_generation(
        model: PreTrainedModel, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        given = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(given, AgentCache) and kwargs.get("inputs_embeds") is None:
            if says_how_many and kwargs.get("next_sequence_length") is None:
                _check_whole(given, input_ids)
            else:
                _check_inputs(given, input_ids, kwargs.get("is_first_iteration"))
        return plain(model, input_ids, *args, **kwargs)

    model.prepare_inputs_for_generation = MethodType(prepare_inputs_for_generation, model)


def _check_inputs(cache: AgentCache, ids: Tensor, first: bool | None) -> None:
    """Refuse ids that do not begin with the document's, or of which none is new.

    `first` says whether this is a call's first step; None where the release does not say.
    """
    seen, n = cache.get_seq_length(), len(cache.document_ids)
    wrong = ids.shape[1] <= seen
    if not wrong and (seen == n if first is None else first):
        wrong = not _begins(cache, ids)
    if wrong:
        raise PoolError(
            f"generate() got ids of shape {list(ids.shape)}, of which it drops the {seen} that "
            f"the cache has seen; pass the document's {n} tokens, pool.document_ids, and after "
            "them each agent's own, with a new cache or all that this one has seen; or use "
            "polykv_lib.ask."
        )


def _check_whole(cache: AgentCache, ids: Tensor) -> None:
    """Refuse the document's tokens where all ids would be fed, as in assisted decoding."""
    if ids.shape[1] > len(cache.document_ids) and _begins(cache, ids):
        raise PoolError(
            "this way of generating feeds the document's tokens again, which the pool holds "
            "already; generate greedily, by sampling or by beams, without an assistant."
        )


def _begins(cache: AgentCache, ids: Tensor) -> bool:
    document = cache.document_ids.to(ids.device)
    return bool((ids[:, : len(document)] == document).all())
