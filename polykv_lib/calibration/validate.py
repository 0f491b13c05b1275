"""Held-out scores -> whether a plan earned its place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Literal

from polykv_lib.evict import Plan


@dataclass(frozen=True, kw_only=True)
class PlanScore:
    """One item's answer under one plan, against the full cache."""

    item: str
    family: str
    plan: str
    kl: float  # nats an answer token, KL(full || plan)
    nll: float  # nats an answer token
    full_nll: float
    exact: bool  # every answer token is the most likely one
    full_exact: bool
    kept: int  # tokens of all layers and KV heads
    n_tokens: int  # of the context


def by_family(scores: Sequence[PlanScore], plan: str) -> dict[str, float]:
    """Mean KL of a plan in each family."""
    found: dict[str, list[float]] = {}
    for score in scores:
        if score.plan == plan:
            found.setdefault(score.family, []).append(score.kl)
    if not found:
        raise ValueError(f"no score of plan {plan!r}; scored: {sorted({s.plan for s in scores})}.")
    return {family: fmean(values) for family, values in found.items()}


def macro_kl(scores: Sequence[PlanScore], plan: str) -> float:
    """Mean over families of a plan's mean KL."""
    return fmean(by_family(scores, plan).values())


def regrets(
    scores: Sequence[PlanScore], plan: str, baselines: Sequence[str]
) -> dict[str, dict[str, float]]:
    """By family, then baseline: mean KL of the plan minus that of the baseline (negative: better).

    The baselines are usually the best single policy at uniform budget, the same policy with the
    plan's budgets, and the plan with shuffled budgets.
    """
    own = by_family(scores, plan)
    theirs = {baseline: by_family(scores, baseline) for baseline in baselines}
    return {f: {b: own[f] - kl[f] for b, kl in theirs.items()} for f in own}


def choose(scores: Sequence[PlanScore], preferred: str, fallbacks: Sequence[str]) -> str:
    """The preferred plan, unless a fallback has no larger macro KL: then the best of these."""
    best = min(fallbacks, key=lambda plan: macro_kl(scores, plan))
    return preferred if macro_kl(scores, preferred) < macro_kl(scores, best) else best


def shuffled(plan: Plan, what: Literal["budgets", "policies"], seed: int) -> Plan:
    """The same budgets, or the same policies, in other layers: a control of placement alone."""
    order = list(range(len(plan.layers)))
    Random(seed).shuffle(order)
    drawn = [plan.layers[i] for i in order]
    layers = (
        replace(own, budget=other.budget)
        if what == "budgets"
        else replace(own, policy=other.policy)
        for own, other in zip(plan.layers, drawn, strict=True)
    )
    return Plan(layers=tuple(layers))
