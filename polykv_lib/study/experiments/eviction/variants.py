"""The plans that the ablations compare: a signal and its opposite, parts of ours, placements."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from polykv_lib.calibration import Measurements, Recipe, shuffled, solve
from polykv_lib.calibration.solve import BudgetSignal, PatternSignal
from polykv_lib.study.experiments.eviction.items import POLICIES, RETRIEVAL, Kept, PlanFor, n_kept

What: TypeAlias = Literal["policies", "budgets"]
PATTERNS: Final[tuple[PatternSignal, ...]] = ("cosine", "ppl", "error")
BUDGETS: Final[tuple[BudgetSignal, ...]] = ("entropy", "ppl", "curve", "gain_curve")
OURS: Final = "error + gain_curve"
SHUFFLED: Final[dict[What, str]] = {"policies": "cosine", "budgets": "gain_curve"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One plan of the table: what of it was varied, by which signal, and how."""

    group: str
    signal: str
    direction: str
    plan: PlanFor
    phase: str = "prefill"

    @property
    def name(self) -> str:
        """Its name among the plans."""
        return f"{self.group} by {self.signal}, {self.direction} at {self.phase}"


def solved(measured: Measurements, recipe: Recipe, kept: Kept) -> PlanFor:
    """The recipe's plan for any number of tokens."""
    return lambda n: solve(measured, recipe, n_tokens=n, budget=n_kept(kept, n)).plan


def direction(recipe: Recipe) -> str:
    """Whether the signal is followed or turned round."""
    return "inverse" if recipe.inverse_patterns or recipe.inverse_budgets else "forward"


def variants(measured: Measurements, best: str, uniform: PlanFor, kept: Kept) -> Iterator[Variant]:
    """Every plan but the shuffled ones; the best single policy comes first."""
    policy = POLICIES[best]

    def by(group: str, signal: str, recipe: Recipe, of: Measurements = measured) -> Variant:
        plan = solved(of, recipe, kept)
        return Variant(group=group, signal=signal, direction=direction(recipe), plan=plan)

    yield Variant(group="single", signal=best, direction="uniform", plan=uniform)
    for pattern in PATTERNS:
        recipe = Recipe(pattern_signal=pattern, budget_signal="uniform")
        yield by("policies", pattern, recipe)
        yield by("policies", pattern, replace(recipe, inverse_patterns=True))
    for budget in BUDGETS:
        recipe = Recipe(policy=policy, budget_signal=budget)
        yield by("budgets", budget, recipe)
        yield by("budgets", budget, replace(recipe, inverse_budgets=True))
    yield by("both", "cosine + ppl", Recipe(pattern_signal="cosine", budget_signal="ppl"))
    yield by("both", "cosine + gain_curve", Recipe(pattern_signal="cosine"))
    yield by("both", OURS, Recipe())
    yield by("head budgets", "gain_curve", Recipe(policy=policy, level="head"))
    yield by("both, head budgets", OURS, Recipe(level="head"))
    for content, wanted in (("no retrieval", False), ("retrieval alone", True)):
        chosen = tuple(i for i in measured.items if (i.family in RETRIEVAL) == wanted)
        if 0 < len(chosen) < len(measured.items):
            part = replace(measured, items=chosen)
            yield by(f"both, calibrated on {content}", OURS, Recipe(), part)


def placements(made: Sequence[Variant], counts: Mapping[What, int], seed: int) -> Iterator[Variant]:
    """The same policies in other layers, and the same budgets in other layers, so many of each."""
    named = {(v.group, v.signal): v for v in made if v.direction == "forward"}
    for what, signal in SHUFFLED.items():
        for i in range(counts[what]):
            plan = _shuffled(named[what, signal].plan, what, seed + i)
            yield Variant(group=what, signal=signal, direction=f"shuffle {i}", plan=plan)


def _shuffled(plan: PlanFor, what: What, seed: int) -> PlanFor:
    return lambda n_tokens: shuffled(plan(n_tokens), what, seed)
