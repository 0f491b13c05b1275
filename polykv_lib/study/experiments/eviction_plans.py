"""Per-layer plans from calibration items: paper B's and ours, and the single policy to beat."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

from polykv_lib import hf
from polykv_lib.calibration import EncodedItem, Measurements, Recipe, macro_kl, solve
from polykv_lib.evict import Plan
from polykv_lib.hf.calibration import measure
from polykv_lib.study.experiments.common import Say
from polykv_lib.study.experiments.eviction_items import POLICIES, PYRAMID, PlanFor, single
from polykv_lib.study.experiments.eviction_scores import FULL, sharing


@dataclass(frozen=True, kw_only=True)
class Compared:
    """All methods at one budget, and which of them the plans are measured against."""

    keep: float
    best: str
    single: Mapping[str, PlanFor]
    made: Mapping[str, PlanFor]

    def role(self, method: str) -> str:
        """What kind of method it is."""
        if method in self.made:
            return "plan"
        return {FULL: "full cache", self.best: "best single"}.get(method, "single")


def best_single(
    model: Any, items: Sequence[EncodedItem], each: Mapping[str, PlanFor], say: Say
) -> str:
    """The policy of least macro KL among uniform ones, on calibration items."""
    rivals = {name: plan for name, plan in each.items() if name != PYRAMID}
    scores = hf.evaluate_plans(model, items, sharing(rivals), say=say)
    return min(rivals, key=lambda name: macro_kl(scores, name))


def compared(
    model: Any,
    items: Sequence[EncodedItem],
    *,
    keep: float,
    policies: Sequence[str],
    candidates: Sequence[str],
    plans: Sequence[str],
    say: Say,
) -> Compared:
    """Single policies, the best of them, and the plans, from calibration items alone.

    Args:
        model: prepared.
        items: of the calibration split.
        keep: tokens to keep, as a share of the context.
        policies: compared, and what paper B's plan chooses from.
        candidates: what our plans choose from, with the best single policy; for these alone the
            costly passes with a single layer evicted are made.
        plans: names in `PLANS`.
        say: told about progress.
    """
    n_layers = model.config.get_text_config().num_hidden_layers
    each = {name: single(name, keep, n_layers) for name in policies}
    best = best_single(model, items, each, say)
    few = [POLICIES[name] for name in dict.fromkeys([*candidates, best])]
    everyone = [POLICIES[name] for name in policies if name != PYRAMID]
    routed = measure(model, items, target=keep, policies=everyone, single_layer=False, say=say)
    gains = measure(model, items, target=keep, policies=few, say=say)
    made = {n: p for plan in plans for n, p in PLANS[plan](routed, gains, best).items()}
    return Compared(keep=keep, best=best, single=each, made=made)


def paper_b(routed: Measurements, gains: Measurements, best: str) -> dict[str, PlanFor]:
    """arXiv:2606.15157: each layer's policy by cosine, budgets equal or by perplexity.

    Departure: how much a layer's eviction may cost is the most over the candidates and the best
    single policy, not over all policies.
    """

    def cosine(n_tokens: int) -> Plan:
        recipe = Recipe(pattern_signal="cosine", budget_signal="uniform")
        return solve(routed, recipe, n_tokens=n_tokens).plan

    def with_budgets(n_tokens: int) -> Plan:
        recipe = Recipe(policy=POLICIES[best], budget_signal="ppl")
        budgets = solve(gains, recipe, n_tokens=n_tokens).plan.layers
        return Plan(
            layers=tuple(
                replace(own, budget=other.budget)
                for own, other in zip(cosine(n_tokens).layers, budgets, strict=True)
            )
        )

    return {"paper-b": cosine, "paper-b, ppl budgets": with_budgets}


def ours(
    level: Literal["layer", "head"], routed: Measurements, gains: Measurements, best: str
) -> dict[str, PlanFor]:
    """Budgets by gain x error curve; each layer's policy is the candidate of least error there."""
    name = {"layer": "gain-curve", "head": "gain-curve-heads"}[level]
    return {name: lambda n: solve(gains, Recipe(level=level), n_tokens=n).plan}


PLANS: Final[dict[str, Callable[[Measurements, Measurements, str], dict[str, PlanFor]]]] = {
    "paper-b": paper_b,
    "gain-curve": partial(ours, "layer"),
    "gain-curve-heads": partial(ours, "head"),
}
