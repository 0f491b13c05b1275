"""What is refused before any compute, in one sentence each."""

from numbers import Integral

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polykv_lib.evict import Plan
from polykv_lib.hf import compat
from polykv_lib.hf.attention import NAME
from polykv_lib.hf.models import model_fingerprint, tokenizer_fingerprint
from polykv_lib.hf.models.footprint import geometry_of
from polykv_lib.pool import PoolError, SharedKVPool


def check_prepared(model: PreTrainedModel) -> None:
    """Refuse a model whose attention can not read a pool."""
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f"the model's attention is {model.config._attn_implementation!r}, which can not read a "
            "pool. Call polykv_lib.prepare(model) first."
        )


def check_document(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse, before any compute, what is not one document's token ids."""
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"document_ids are a {type(ids).__name__}; pass token ids as an int64 tensor [1, T]."
        )
    if not _are_ids(ids) or ids.shape[0] != 1:
        raise ValueError(
            f"document_ids are {ids.dtype} of shape {list(ids.shape)}; pass token ids as int64 "
            "[1, T], one document a pool."
        )
    if ids.shape[1] == 0:
        raise ValueError("document_ids are empty; a pool needs at least one token.")
    _check_vocabulary(model, ids, "document_ids")
    check_length(model, ids.shape[1], "the document")


def _are_ids(x: Tensor) -> bool:
    return x.dtype in (torch.int64, torch.int32) and x.dim() == 2


def _check_vocabulary(model: PreTrainedModel, ids: Tensor, name: str) -> None:
    largest, vocabulary = int(ids.max()), model.get_input_embeddings().num_embeddings
    if largest >= vocabulary or int(ids.min()) < 0:
        raise ValueError(
            f"{name} reach {largest}, but the model's vocabulary has {vocabulary} tokens; "
            "tokenise the text with this model's tokenizer."
        )


def check_ids(model: PreTrainedModel, ids: object, mask: object = None) -> None:
    """Refuse what is no row of the model's token ids, or a mask of another shape."""
    if not isinstance(ids, Tensor) or not _are_ids(ids) or not ids.numel():
        found = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise ValueError(f"ids are {found}; pass token ids as an int64 tensor [rows, T].")
    _check_vocabulary(model, ids, "ids")
    if isinstance(mask, Tensor) and mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, ids {list(ids.shape)}; pass 1 for each "
            "token and 0 for padding, of the same shape."
        )


def check_chunk(chunk: object) -> None:
    """Refuse what is no number of tokens to read at a time."""
    if chunk is not None and (not isinstance(chunk, Integral) or chunk < 1):
        raise ValueError(f"chunk={chunk!r}; pass tokens to prefill at a time, 1 or more.")


def check_plan(plan: object) -> None:
    """Refuse what is no plan."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan={plan!r}; pass a Plan. Plan.load(path) reads one from a file.")


def check_length(model: PreTrainedModel, n_tokens: int, what: str) -> None:
    """Refuse, before any compute, what the model's positions or window can not hold."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and n_tokens > positions:
        raise ValueError(
            f"{what} has {n_tokens} tokens, but the model has {positions} positions. Shorten it."
        )
    window = compat.attention_window(model)
    if window is not None and n_tokens > window:
        raise ValueError(
            f"{what} has {n_tokens} tokens, but {model.config.model_type} has layers with a window "
            f"of {window}, and a pool is exact only within it. Shorten it."
        )


def check_owner(
    pool: SharedKVPool,
    what: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Refuse a pool that another model, or another tokenizer, built."""
    theirs = {"model_fingerprint": model_fingerprint(model)}
    if tokenizer is not None:
        theirs["tokenizer_fingerprint"] = tokenizer_fingerprint(tokenizer)
    for name, found in theirs.items():
        if pool.owner.get(name, found) != found:
            raise PoolError(
                f"{what} belongs to {pool.owner.get('model') or 'another model'} with {name} "
                f"{pool.owner[name][:12]}, this one has {found[:12]} (other weights, or the same "
                "in another dtype). Build the pool again."
            )


def check_geometry(pool: SharedKVPool, model: PreTrainedModel, what: str) -> None:
    """Refuse a pool of another shape than the model's cache."""
    expected, found = (
        (own.n_layers, own.n_kv_heads, own.head_dim)
        for own in (geometry_of(model.config), pool.geometry)
    )
    if expected != found:
        raise PoolError(
            f"{what} holds (layers, KV heads, head_dim) = {found}, but the model has {expected}. "
            "Open it with the model that built it."
        )
