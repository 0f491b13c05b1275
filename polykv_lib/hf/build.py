"""Document -> pool, over a transformers model: prefill, compress, freeze; open a saved one."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polykv_lib.evict import Plan
from polykv_lib.hf import compat
from polykv_lib.hf.caches import AgentCache
from polykv_lib.hf.checks import (
    check_chunk,
    check_geometry,
    check_ids,
    check_length,
    check_owner,
    check_plan,
    check_prepared,
)
from polykv_lib.hf.evicting import EvictingCache, evicting_prefill
from polykv_lib.hf.models import model_fingerprint, tokenizer_fingerprint
from polykv_lib.hf.reading import KeptByPlan, evict_document, read_document
from polykv_lib.kv import KeptTokens, LayerKV
from polykv_lib.pool import Codecs, SharedKVPool, check_codecs, freeze, load
from polykv_lib.quantize import FullPrecision

Kept = Sequence[Sequence[KeptTokens]]  # of each layer and KV head


def build_pool(
    model: PreTrainedModel,
    document_ids: Tensor,
    *,
    keys: Codecs,
    values: Codecs,
    n_sink: int = 4,
    plan: Plan | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chunk: int | None = None,
) -> SharedKVPool:
    """Prefill the document once, evict by the plan, compress what is kept, and freeze a pool.

    Args:
        model: a prepared model (`load_model` prepares; else `prepare`).
        document_ids: int64 [1, T]; `document_ids(tokenizer, text)` opens a chat turn for them.
        keys: codec of the keys, or one for each layer.
        values: codec of the values, or one for each layer.
        n_sink: first tokens held in full precision, where the plan keeps them.
        plan: what each layer keeps; None keeps everything. No question is visible to it. A pool
            does not change, so the plan's decode phase is `prefill`'s alone.
        tokenizer: if given, its fingerprint is stored with the pool.
        chunk: tokens to prefill at a time, which bounds the memory of reading; None: all at once.

    Raises:
        ValueError: no codec, no plan or another model's, ids that `read_document` refuses, or a
            chunk with a plan, whose policies see the whole document at once.
    """
    check_codecs(keys, values)
    if plan is not None:
        check_plan(plan)
    named = plan is not None and any(layer.codec for layer in plan.layers)
    if named and not isinstance(keys, list | tuple):
        raise ValueError(
            "the plan names each layer's codec, but one codec is given for all; pass what "
            "polykv_lib.presets.of_plan(plan) returns: keys, values and n_sink."
        )
    if plan is not None and chunk is not None:
        raise ValueError(
            f"chunk={chunk} with a plan, whose policies see the whole document at once; leave out "
            "one, or evict after each chunk with polykv_lib.prefill(model, ids, plan, chunk=…)."
        )
    kept = None
    if plan is None:
        layers = read_document(model, document_ids, chunk=chunk)
    else:
        layers, [kept] = evict_document(model, document_ids, [plan])
    return share(
        model,
        layers,
        document_ids,
        keys=keys,
        values=values,
        n_sink=n_sink,
        kept=kept,
        tokenizer=tokenizer,
    )


def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    plan: Plan,
    *,
    attention_mask: Tensor | None = None,
    chunk: int | None = None,
) -> AgentCache | EvictingCache:
    """A cache whose layers hold what the plan keeps, and nothing else, before the first new token.

    Positions go on from the tokens seen, layers and heads may hold different numbers of tokens, and
    several tokens may be fed at once. With one row and a plan for the prefill alone it is the cache
    of one agent over a lossless pool; else one that goes on evicting by `plan.decode`.

    Args:
        model: a prepared model.
        ids: int64 [rows, T].
        plan: made for this model.
        attention_mask: 1 for tokens, 0 for padding, where rows differ in length.
        chunk: tokens to prefill at a time; the policies evict after each chunk.

    Raises:
        ValueError: ids or a chunk that are none, no plan, or another model's.
    """
    check_prepared(model)
    check_plan(plan)
    check_ids(model, ids, attention_mask)
    check_chunk(chunk)
    if plan.decode is None and attention_mask is None and chunk is None and ids.shape[0] == 1:
        lossless = FullPrecision()
        cache: AgentCache = build_pool(
            model, ids, keys=lossless, values=lossless, plan=plan
        ).agent_cache(1)
        return cache
    check_length(model, ids.shape[1], "the document")
    return evicting_prefill(model, ids, plan, attention_mask, chunk)


def share(
    model: PreTrainedModel,
    layers: Sequence[LayerKV],
    document_ids: Tensor,
    *,
    keys: Codecs,
    values: Codecs,
    n_sink: int = 4,
    kept: Kept | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> SharedKVPool:
    """A pool from what `read_document` or `evict_document` returned: one prefill, many pools."""
    merged = getattr(kept, "merged", {})
    layers = [
        replace(merged.get(i, own), moments=own.moments, attention=own.attention)
        for i, own in enumerate(layers)
    ]
    owner = {"model": model.config.name_or_path, "model_fingerprint": model_fingerprint(model)}
    if tokenizer is not None:
        owner["tokenizer_fingerprint"] = tokenizer_fingerprint(tokenizer)
    return freeze(
        layers,
        keys=keys,
        values=values,
        n_sink=n_sink,
        kept=kept,
        document_ids=document_ids,
        n_q_heads=model.config.get_text_config().num_attention_heads,
        owner=owner,
        cache_factory=_cache_factory(model),
    )


def _cache_factory(model: PreTrainedModel) -> Any:
    return partial(AgentCache, window=compat.attention_window(model))


def held_cache(
    model: PreTrainedModel, plan: Plan, layers: Sequence[LayerKV], *kept: KeptByPlan
) -> EvictingCache:
    """The cache that `evicting_prefill` returns for a plan, from one `evict_document` for many.

    What several plans keep becomes a row each. Their heads must be alike where `plan`'s are, and
    its decode phase is every row's.
    """
    cache = EvictingCache(model, plan)
    for i, own in enumerate(cache.layers):
        own.hold([(replace(k.merged.get(i, layers[i]), tallies=k.tallies[i]), k[i]) for k in kept])
    return cache


def load_pool(
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> SharedKVPool:
    """Open a saved pool for the model that built it; the file is mapped, not copied, on a CPU.

    Raises:
        PoolError: another model's or tokenizer's pool, or a file that is damaged or too new.
    """
    check_prepared(model)
    pool = load(path, cache_factory=_cache_factory(model))
    check_geometry(pool, model, str(path))
    check_owner(pool, str(path), model, tokenizer)
    return pool.to(compat.layer_devices(model))
