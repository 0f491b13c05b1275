"""Answers under plans and codecs: one prefill an item, then a pool for each method and codec."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import bootstrap

from polykv_lib import hf, presets
from polykv_lib.evict import EvictionPolicy, Plan, Protected
from polykv_lib.hf.suffix import answer_logits
from polykv_lib.kv import LayerKV, Scores
from polykv_lib.metrics import answers
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.metrics.intervals import CONFIDENCE, Interval
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.study.experiments.eviction_items import SCORED_TOKENS, Asked, PlanFor

FULL = "FullKV"


@dataclass
class ScoredOnce:
    """A policy that many plans of one prefill share: it scores each layer once."""

    policy: EvictionPolicy
    last: tuple[LayerKV, Scores] | None = field(default=None, repr=False)

    def score(self, layer: LayerKV) -> Scores:
        """The policy's own scores."""
        if self.last is None or self.last[0] is not layer:
            self.last = layer, self.policy.score(layer)
        return self.last[1]

    def protect(self, budget: int) -> Protected:
        """What the policy protects."""
        return self.policy.protect(budget)


def sharing(plans: Mapping[str, PlanFor]) -> dict[str, PlanFor]:
    """The same plans; a policy that several of them use scores a layer once for all of them."""
    shared: dict[str, EvictionPolicy] = {}

    def once(plan: Plan) -> Plan:
        return Plan(
            layers=tuple(
                replace(own, policy=shared.setdefault(repr(own.policy), ScoredOnce(own.policy)))
                for own in plan.layers
            )
        )

    def of(plan_for: PlanFor) -> PlanFor:
        return lambda n_tokens: once(plan_for(n_tokens))

    return {name: of(plan_for) for name, plan_for in plans.items()}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One item's answer under one method and codec."""

    item: str
    family: str
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


@torch.no_grad()
def results(
    model: Any,
    tokenizer: Any,
    asked: Asked,
    plans: Mapping[str, PlanFor],
    codecs: Sequence[str],
    *,
    in_full: Set[str],
    max_new_tokens: int,
) -> Iterator[Result]:
    """The item under the full cache and every plan, with the first codec or with all.

    Args:
        model: prepared.
        tokenizer: of the model.
        asked: the item.
        plans: by method.
        codecs: names of `presets`.
        in_full: methods that take every codec, and answer freely through the first.
        max_new_tokens: of a free answer; 0: none is generated.

    Raises:
        RuntimeError: a plan evicted nothing, or plans keep different totals.
    """
    item = asked.encoded
    ids = torch.tensor([item.context_ids])
    made = [plan(len(item.context_ids)) for plan in plans.values()]
    layers, of_plans = hf.evict_document(model, ids, made)
    halves = [LayerKV(keys=a.keys.bfloat16(), values=a.values.bfloat16()) for a in layers]
    targets = torch.tensor(item.answer_ids, device=model.device)
    full = answer_logits(model, hf.full_cache(layers), item)
    nll_full = token_nll(full, targets).mean().item()
    whole = sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in layers)
    check_evicted(
        item.id, whole, {n: _n_kept(kept) for n, kept in zip(plans, of_plans, strict=True)}
    )
    for method, kept in {FULL: None, **dict(zip(plans, of_plans, strict=True))}.items():
        for name in codecs if method in in_full else codecs[:1]:
            codec = presets.codec(name)
            build = partial(
                hf.share, model, keys=codec.keys, values=codec.values, n_sink=codec.n_sink
            )
            pool = build(layers, ids, kept=kept)
            counted = None if kept is None else list(kept)  # bytes do not depend on merging
            weighed = build(halves, ids, kept=counted)
            logits = answer_logits(model, pool.agent_cache(1), item)
            answer = None
            if name == codecs[0] and method in in_full and max_new_tokens:
                answer = generate(model, tokenizer, asked, pool.agent_cache(1), max_new_tokens)
            yield Result(
                item=item.id,
                family=item.family,
                method=method,
                codec=name,
                kl=kl_nats(full, logits).mean().item(),
                nll_delta=token_nll(logits, targets).mean().item() - nll_full,
                exact=bool((logits.argmax(-1) == targets).all()),
                score=None if answer is None else score(asked, answer),
                answer=answer,
                n_kept=sum(map(sum, pool.kept_per_head)),
                pool_bytes=weighed.nbytes,
                full_bytes=pool.full_nbytes(),
            )


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
        "scored": f"the reference, up to {SCORED_TOKENS} tokens; teacher-forced",
        "protected": "4 first and 16 last tokens, inside the budget of every policy",
        "interval": f"paired percentile bootstrap over items inside families, {n_boot} resamples",
    }


def stratified(
    families: Sequence[Float[ndarray, "_ column"]],
    of_means: Callable[[Float[ndarray, "... column"]], Any],
    *,
    seed: int,
    n_resamples: int,
) -> Interval:
    """A function of the columns' means over families, with items resampled inside each family.

    All columns of an item are resampled together, so that differences and ratios are paired. No
    interval is given where a family has a single item.
    """
    n = sum(map(len, families))

    def statistic(*drawn: Any, axis: int = -1) -> Any:
        means = [own[i.astype(int)].mean(-2) for own, i in zip(families, drawn, strict=True)]
        return of_means(np.mean(means, axis=0))

    value = float(statistic(*(np.arange(len(own)) for own in families)))
    if min(map(len, families)) < 2:
        return Interval(value=value, lo=None, hi=None, n=n)
    spread = bootstrap(
        [np.arange(len(own)) for own in families],
        statistic,
        n_resamples=n_resamples,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value=value, lo=float(spread.low), hi=float(spread.high), n=n)
