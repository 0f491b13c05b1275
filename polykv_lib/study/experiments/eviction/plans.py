"""Per-layer plans from calibration items: paper B's, ours, and the single policy to beat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from polykv_lib import hf
from polykv_lib.calibration import (
    EncodedItem,
    Measurements,
    PlanScore,
    Recipe,
    macro_kl,
    shuffled,
    solve,
)
from polykv_lib.evict import Plan
from polykv_lib.study.experiments.common import Say
from polykv_lib.study.experiments.eviction.items import POLICIES, PYRAMID, Kept, PlanFor, n_kept
from polykv_lib.study.experiments.eviction.scores import FULL, Method

PAPER_B: Final = "paper-b"
PPL_BUDGETS: Final = f"{PAPER_B}, ppl budgets"
LEVELS: Final[dict[str, Literal["layer", "head"]]] = {
    "gain-curve": "layer",
    "gain-curve-heads": "head",
}
OURS: Final = (
    "ours"  # what held-out calibration items chose among the plans of LEVELS and fallbacks
)
BUDGETS_ALONE: Final = "best single, our budgets"
SHUFFLED: Final = "ours, budgets shuffled"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """All methods at one budget, and the single policy that plans are measured against.

    `chosen` is what `ours` stands for, `held_out` the scores that chose it. The methods in
    `answering` answer freely beside the best single policy and ours.
    """

    keep: float
    best: str
    chosen: str
    single: Mapping[str, PlanFor]
    made: Mapping[str, PlanFor]
    controls: Mapping[str, PlanFor]
    held_out: Sequence[PlanScore]
    answering: Sequence[str] = ()

    @property
    def ours(self) -> str:
        """The method whose results are those of `ours`."""
        return self.chosen if self.chosen in {**self.single, **self.made} else BUDGETS_ALONE

    @property
    def methods(self) -> list[Method]:
        """Everything that is scored on test items."""
        everything = {**self.single, **self.made, **self.controls}
        return [
            Method(
                keep=self.keep,
                name=name,
                plan=plan,
                is_finalist=name in (self.best, self.ours),
                answers=name in self.answering,
            )
            for name, plan in everything.items()
        ]

    def role(self, method: str) -> str:
        """What kind of method it is."""
        if method in self.controls:
            return "control"
        if method in self.made or method == OURS:
            return "plan"
        return {FULL: "full cache", self.best: "best single"}.get(method, "single")


def best_single(
    model: Any, items: Sequence[EncodedItem], each: Mapping[str, PlanFor], say: Say
) -> str:
    """The policy of least macro KL among uniform ones, on calibration items."""
    rivals = {name: plan for name, plan in each.items() if name != PYRAMID}
    scores = hf.evaluate_plans(model, items, rivals, say=say)
    return least(scores, rivals)


def least(scores: Sequence[PlanScore], plans: Mapping[str, PlanFor] | Sequence[str]) -> str:
    """The plan of least macro KL; ties go to the earlier one."""
    return min(plans, key=lambda name: macro_kl(scores, name))


def paper_b(routed: Measurements, sensitivity: Measurements, keep: Kept) -> dict[str, PlanFor]:
    """arXiv:2606.15157: each layer's policy by cosine, budgets equal or by perplexity.

    Departure: how much a layer's eviction may cost is the most over the candidates, not over all
    policies, and is measured at the first budget of a point.
    """

    def cosine(n_tokens: int) -> Plan:
        recipe = Recipe(pattern_signal="cosine", budget_signal="uniform")
        return solve(routed, recipe, n_tokens=n_tokens, budget=n_kept(keep, n_tokens)).plan

    def with_budgets(n_tokens: int) -> Plan:
        recipe, budget = Recipe(budget_signal="ppl"), n_kept(keep, n_tokens)
        shares = solve(sensitivity, recipe, n_tokens=n_tokens, budget=budget).plan.layers
        return Plan(
            layers=tuple(
                replace(own, budget=other.budget)
                for own, other in zip(cosine(n_tokens).layers, shares, strict=True)
            )
        )

    return {PAPER_B: cosine, PPL_BUDGETS: with_budgets}


def gain_curve(name: str, gains: Measurements, keep: Kept) -> PlanFor:
    """Budgets by gain x error curve; each layer's policy is the candidate of least error there."""
    recipe = Recipe(level=LEVELS[name])
    return lambda n: solve(gains, recipe, n_tokens=n, budget=n_kept(keep, n)).plan


def budgets_of(plan: PlanFor, policy: str) -> PlanFor:
    """One policy in every layer, under a plan's budgets."""
    return lambda n: Plan.of(POLICIES[policy], [layer.budget for layer in plan(n).layers])


def shuffled_budgets(plan: PlanFor, seed: int) -> PlanFor:
    """The plan with its budgets in other layers."""
    return lambda n: shuffled(plan(n), "budgets", seed)
