"""Answers under plans and codecs: one prefill an item, then a pool for each method and codec."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib import hf, presets
from polykv_lib.calibration import EncodedItem
from polykv_lib.evict import Plan
from polykv_lib.hf.calibration.suffix import answer_logits
from polykv_lib.kv import LayerKV
from polykv_lib.metrics import answers
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.pool import Codecs, SharedKVPool
from polykv_lib.quantize import FullPrecision
from polykv_lib.study.experiments.eviction.items import Asked, PlanFor

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
    n_kept: int  # tokens of all layers and KV heads
    pool_bytes: int  # with whatever is not quantised in bf16
    full_bytes: int  # of the whole context in bf16
    score: float | None = None  # of the generated answer; None where nothing was generated
    answer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to evict at one budget; a finalist takes every codec, and answers freely too."""

    keep: float
    name: str
    plan: PlanFor
    is_finalist: bool = False
    answers: bool = False  # freely


@dataclass(frozen=True, kw_only=True)
class Read:
    """An item whose context was read once, and what each of many plans keeps of it."""

    model: Any
    item: EncodedItem
    layers: Sequence[LayerKV]
    of_plans: Sequence[Any]
    full: Float[Tensor, "answer vocab"]  # the answer's logits over the full cache

    @classmethod
    def of(cls, model: Any, item: EncodedItem, plans: Sequence[Plan]) -> "Read":
        """One prefill, and the answer over the full cache."""
        ids = torch.tensor([item.context_ids])
        layers, of_plans = hf.evict_document(model, ids, plans)
        full = answer_logits(model, hf.full_cache(layers), item)
        return cls(model=model, item=item, layers=layers, of_plans=of_plans, full=full)

    def pool(self, kept: Any, keys: Codecs, values: Codecs, n_sink: int) -> SharedKVPool:
        """The pool of what a plan keeps; None keeps everything."""
        return hf.share(
            self.model,
            self.layers,
            torch.tensor([self.item.context_ids]),
            keys=keys,
            values=values,
            n_sink=n_sink,
            kept=kept,
        )

    def result(self, pool: SharedKVPool, **named: Any) -> Result:
        """The reference answer after a pool; nothing is generated."""
        targets = torch.tensor(self.item.answer_ids, device=self.model.device)
        logits = answer_logits(self.model, pool.agent_cache(1), self.item)
        nll, nll_full = (token_nll(x, targets).mean().item() for x in (logits, self.full))
        return Result(
            item=self.item.id,
            family=self.item.family,
            kl=kl_nats(self.full, logits).mean().item(),
            nll_delta=nll - nll_full,
            exact=bool((logits.argmax(-1) == targets).all()),
            n_kept=sum(map(sum, pool.kept_per_head)),
            pool_bytes=bytes_in_bf16(pool),
            full_bytes=pool.full_nbytes(),
            **named,
        )


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
        max_new_tokens: of a free answer, through the first codec; 0: none is generated.

    Raises:
        RuntimeError: a plan evicted nothing, or plans of a budget keep different totals.
    """
    made = [method.plan(len(asked.encoded.context_ids)) for method in methods]
    read = Read.of(model, asked.encoded, made)
    whole = sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in read.layers)
    for keep in dict.fromkeys(m.keep for m in methods):
        kept_by = zip(methods, read.of_plans, strict=True)
        own = {m.name: _n_kept(kept) for m, kept in kept_by if m.keep == keep}
        check_evicted(asked.encoded.id, whole, own)

    def answered(kept: Any, name: str, *, freely: bool, **named: Any) -> Result:
        codec = presets.codec(name)
        pool = read.pool(kept, codec.keys, codec.values, codec.n_sink)
        result = read.result(pool, codec=name, **named)
        if not freely or name != codecs[0] or not max_new_tokens:
            return result
        answer = generate(model, tokenizer, asked, pool.agent_cache(1), max_new_tokens)
        return replace(result, answer=answer, score=score(asked, answer))

    in_full = [answered(None, name, freely=True, keep=1.0, method=FULL) for name in codecs]
    for keep in dict.fromkeys(m.keep for m in methods):
        yield from (replace(result, keep=keep) for result in in_full)
    for m, kept in zip(methods, read.of_plans, strict=True):
        for name in codecs if m.is_finalist else codecs[:1]:
            freely = m.is_finalist or m.answers
            yield answered(kept, name, freely=freely, keep=m.keep, method=m.name)


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
