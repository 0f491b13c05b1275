"""Free answers under the plans of one signal: the scores of arXiv:2606.15157, Table 3, at prefill.

Answers are greedy and nothing is evicted while one is written. Routing while decoding is scored by
KL alone (`phases`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from polykv_lib.metrics.intervals import stratified
from polykv_lib.study.experiments.common import Say, row
from polykv_lib.study.experiments.eviction.items import Asked
from polykv_lib.study.experiments.eviction.scores import FULL, Method, Result, results
from polykv_lib.study.experiments.eviction.variants import Variant
from polykv_lib.study.parts import part
from polykv_lib.study.record import Row

PUBLISHED: Final = {"policies": ("cosine", "ppl"), "budgets": ("entropy", "ppl")}


def published(made: Sequence[Variant]) -> list[Variant]:
    """The best single policy, and the plans by a published signal, forward and inverse."""
    return [v for v in made if v.group == "single" or v.signal in PUBLISHED.get(v.group, ())]


def answered(
    model: Any,
    tokenizer: Any,
    test: Sequence[Asked],
    made: Sequence[Variant],
    say: Say,
    *,
    keep: float,
    max_new_tokens: int,
) -> list[Result]:
    """Every test item's free answer over the full cache and under each of these plans.

    Raises:
        RuntimeError: something was not evicted as planned.
    """
    methods = [Method(keep=keep, name=v.name, plan=v.plan, answers=True) for v in published(made)]
    found: list[Result] = []
    for i, asked in enumerate(test, 1):
        own = results(model, tokenizer, asked, methods, ["full"], max_new_tokens=max_new_tokens)
        found += part(f"answers-{i}", list, own)
        say(f"{i} of {len(test)} test items answered freely")
    return found


def rows(
    answers: Sequence[Result], made: Sequence[Variant], dims: Mapping[str, Any], **sampling: Any
) -> Iterator[Row]:
    """Each plan's mean score over tasks, with items resampled inside them."""
    of: dict[str, dict[str, list[Any]]] = {}
    for a in answers:
        of.setdefault(a.method, {}).setdefault(a.family, []).append([a.score])
    named = {v.name: (v.group, v.signal, v.direction) for v in published(made)}
    named[FULL] = ("full cache", FULL, "uniform")
    for method, families in of.items():
        columns = [np.asarray(scores, dtype=np.float64) for scores in families.values()]
        score = stratified(columns, lambda m: m[..., 0], **sampling)
        own = dict(zip(("varied", "signal", "direction"), named[method], strict=True))
        yield row("signal_answers", "score", score, "share", {**dims, **own})


def samples(answers: Sequence[Result]) -> list[dict[str, Any]]:
    """One entry an item and plan."""
    return [
        {
            "item": a.item,
            "family": a.family,
            "plan": a.method,
            "score": a.score,
            "answer": a.answer,
            "n_kept": a.n_kept,
        }
        for a in answers
    ]
