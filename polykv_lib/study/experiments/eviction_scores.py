"""Answers under plans and codecs: one prefill an item, then a pool for each method and codec."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polykv_lib import hf, presets
from polykv_lib.hf.suffix import answer_logits
from polykv_lib.metrics import answers
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.pool import SharedKVPool
from polykv_lib.quantize import FullPrecision
from polykv_lib.study.experiments.eviction_items import Asked, PlanFor

FULL = "FullKV"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One item's answer under one method and codec, with a share of its tokens kept."""

    item: str
    family: str
    keep: float
    method: str
    codec: str
    kl: float  # nats an answer token to the full cache
    nll_delta: float  # nats an answer token above the full cache
    exact: bool  # every answer token is the most likely one
    score: float | None  # of the generated answer; None where nothing was generated
    answer: str | None
    n_kept: int  # tokens of all layers and KV heads
    pool_bytes: int  # with whatever is not quantised in bf16
    full_bytes: int  # of the whole context in bf16


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to evict at one budget; a finalist takes every codec, and answers freely."""

    keep: float
    name: str
    plan: PlanFor
    is_finalist: bool = False


@torch.no_grad()
def results(
    model: Any,
    tokenizer: Any,
    asked: Asked,
    methods: Sequence[Method],
    codecs: Sequence[str],
    *,
    max_new_tokens: int,
) -> Iterator[Result]:
    """The item under the full cache and every method; one prefill serves all methods and budgets.

    Args:
        model: prepared.
        tokenizer: of the model.
        asked: the item.
        methods: at any number of budgets.
        codecs: names of `presets`; all for finalists and the full cache, else the first.
        max_new_tokens: of a finalist's free answer, through the first codec; 0: none is generated.

    Raises:
        RuntimeError: a plan evicted nothing, or plans of a budget keep different totals.
    """
    item = asked.encoded
    ids = torch.tensor([item.context_ids])
    made = [method.plan(len(item.context_ids)) for method in methods]
    layers, of_plans = hf.evict_document(model, ids, made)
    whole = sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in layers)
    for keep in dict.fromkeys(m.keep for m in methods):
        own = {m.name: kept for m, kept in zip(methods, of_plans, strict=True) if m.keep == keep}
        check_evicted(item.id, whole, {name: _n_kept(kept) for name, kept in own.items()})
    targets = torch.tensor(item.answer_ids, device=model.device)
    full = answer_logits(model, hf.full_cache(layers), item)
    nll_full = token_nll(full, targets).mean().item()

    def answered(kept: Any, name: str, *, freely: bool, **named: Any) -> Result:
        codec = presets.codec(name)
        pool = hf.share(
            model,
            layers,
            ids,
            keys=codec.keys,
            values=codec.values,
            n_sink=codec.n_sink,
            kept=kept,
        )
        logits = answer_logits(model, pool.agent_cache(1), item)
        answer = None
        if freely and name == codecs[0] and max_new_tokens:
            answer = generate(model, tokenizer, asked, pool.agent_cache(1), max_new_tokens)
        return Result(
            item=item.id,
            family=item.family,
            codec=name,
            kl=kl_nats(full, logits).mean().item(),
            nll_delta=token_nll(logits, targets).mean().item() - nll_full,
            exact=bool((logits.argmax(-1) == targets).all()),
            score=None if answer is None else score(asked, answer),
            answer=answer,
            n_kept=sum(map(sum, pool.kept_per_head)),
            pool_bytes=bytes_in_bf16(pool),
            full_bytes=pool.full_nbytes(),
            **named,
        )

    in_full = [answered(None, name, freely=True, keep=1.0, method=FULL) for name in codecs]
    for keep in dict.fromkeys(m.keep for m in methods):
        yield from (replace(result, keep=keep) for result in in_full)
    for m, kept in zip(methods, of_plans, strict=True):
        for name in codecs if m.is_finalist else codecs[:1]:
            yield answered(kept, name, freely=m.is_finalist, keep=m.keep, method=m.name)


def bytes_in_bf16(pool: SharedKVPool) -> int:
    """Bytes of the pool if what is not quantised were held in bf16, whatever the model runs in."""
    plain = [
        side.data
        for pieces in pool.layers
        for piece in pieces
        for side in (piece.keys, piece.values)
        if isinstance(side.codec, FullPrecision)
    ]
    return pool.nbytes - sum(data.nbytes - 2 * math.prod(data.shape) for data in plain)


def _n_kept(kept: Sequence[Sequence[Any]]) -> int:
    return sum(len(tokens) for layer in kept for tokens in layer)


def check_evicted(item: str, whole: int, kept: Mapping[str, int]) -> None:
    """Refuse a comparison in which something was not evicted, or not as much as elsewhere.

    Raises:
        RuntimeError: as said.
    """
    idle = [name for name, n in kept.items() if n >= whole]
    if idle:
        raise RuntimeError(f"nothing of {item!r} was evicted by {', '.join(idle)}; lower KEEP.")
    if len(set(kept.values())) > 1:
        raise RuntimeError(f"plans keep different totals of {item!r}: {dict(kept)}.")


def generate(model: Any, tokenizer: Any, asked: Asked, cache: Any, max_new_tokens: int) -> str:
    """The greedy answer after the item's question and answer prefix."""
    [ids] = hf.greedy(
        model,
        cache,
        [asked.encoded.question_ids],
        n_seen=len(asked.encoded.context_ids),
        max_new_tokens=min(max_new_tokens, asked.item.max_new_tokens),
        stop_ids=hf.stop_ids(tokenizer, model.generation_config.eos_token_id),
    )
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text[:1] + text[1:].partition("\n")[0] if asked.item.stop_at_newline else text


def score(asked: Asked, answer: str) -> float:
    """The answer by its task's metric."""
    item = asked.item
    return answers.score(
        item.metric, answer, item.answers, classes=item.classes, first_line=item.first_line
    )


def protocol(question: str, n_boot: int) -> dict[str, Any]:
    """How both eviction experiments score, for the point's provenance."""
    return {
        "question_visible_when_compressing": question == "visible",
        "first_scored_token": "is read from the compressed cache, and so is every later one",
        "scored": "the reference, up to 16 tokens, 64 where text goes on; teacher-forced",
        "protected": "4 first and 16 last tokens, inside the budget of every policy",
        "interval": f"paired percentile bootstrap over items inside families, {n_boot} resamples",
    }
