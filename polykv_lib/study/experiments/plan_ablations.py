"""What makes a per-layer plan good: which signal, policies or budgets, placement, content, heads?

The first rows follow Table 3 of arXiv:2606.15157: a signal's choice beside its opposite. All plans
keep equally many tokens, are made from calibration items, and are scored on others by KL from the
full cache. Plans act on the prefill alone; nothing is evicted while an answer is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from polykv_lib import hf
from polykv_lib.calibration import Measurements, PlanScore, Recipe, macro_kl, shuffled, solve
from polykv_lib.calibration.solve import BudgetSignal, PatternSignal
from polykv_lib.hf.calibration import measure
from polykv_lib.metrics.intervals import stratified
from polykv_lib.study.experiments.common import Say, Timer, facts, row, settings
from polykv_lib.study.experiments.eviction_items import (
    POLICIES,
    RETRIEVAL,
    PlanFor,
    Wanted,
    single,
)
from polykv_lib.study.experiments.eviction_plans import best_single
from polykv_lib.study.experiments.eviction_scores import (
    check_evicted,
    protocol,
    sharing,
)
from polykv_lib.study.record import Outcome, Row

What: TypeAlias = Literal["policies", "budgets"]
PATTERNS: Final[tuple[PatternSignal, ...]] = ("cosine", "ppl", "error")
BUDGETS: Final[tuple[BudgetSignal, ...]] = ("entropy", "ppl", "curve", "gain_curve")
OURS: Final = "error + gain_curve"
SHUFFLED: Final[dict[What, str]] = {"policies": "cosine", "budgets": "gain_curve"}


@dataclass(frozen=True, kw_only=True)
class Settings(Wanted):
    """One point; `n_shuffles` placements are drawn of the policies, and as many of the budgets."""

    model: str
    keep: float
    candidates: Sequence[str]
    n_shuffles: int
    n_boot: int


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One plan of the table: what of it was varied, by which signal, and how."""

    group: str
    signal: str
    direction: str
    plan: PlanFor

    @property
    def name(self) -> str:
        """Its name among the plans."""
        return f"{self.group} by {self.signal}, {self.direction}"


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Macro KL of every variant with its difference from the best single policy.

    Raises:
        RuntimeError: A test text is a calibration text, or something was not evicted as planned.
    """
    timer, point = Timer(), settings(Settings, params)
    model, tokenizer = hf.load_model(point.model)
    calibration, test = point.both(tokenizer)
    items = [a.encoded for a in calibration]
    n_layers = model.config.get_text_config().num_hidden_layers
    each = {name: single(name, point.keep, n_layers) for name in point.candidates}
    best = best_single(model, items, each, say)
    policies = [POLICIES[name] for name in point.candidates]
    measured = measure(model, items, target=point.keep, policies=policies, say=say)
    made = list(variants(measured, best, each[best]))
    drawn = list(placements(made, point))
    plans = {v.name: v.plan for v in [*made, *drawn]}
    scores = hf.evaluate_plans(model, [a.encoded for a in test], sharing(plans), say=say)
    _check(scores, model)
    return Outcome(
        rows=list(rows(scores, made, drawn, point)),
        samples=[_sample(s) for s in scores],
        protocol={
            **facts(model, tokenizer),
            **protocol(point.question, point.n_boot),
            "phase": "prefill",
            "best_single": best,
            "calibration_items": [a.item.id for a in calibration],
            "seconds": timer.seconds,
        },
    )


def variants(measured: Measurements, best: str, uniform: PlanFor) -> Iterator[Variant]:
    """Every plan but the shuffled ones; the best single policy comes first."""
    policy = POLICIES[best]

    def by(group: str, signal: str, recipe: Recipe, of: Measurements = measured) -> Variant:
        inverse = recipe.inverse_patterns or recipe.inverse_budgets
        return Variant(
            group=group,
            signal=signal,
            direction="inverse" if inverse else "forward",
            plan=lambda n_tokens: solve(of, recipe, n_tokens=n_tokens).plan,
        )

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


def placements(made: Sequence[Variant], point: Settings) -> Iterator[Variant]:
    """The same policies in other layers, and the same budgets in other layers."""
    named = {(v.group, v.signal): v for v in made if v.direction == "forward"}
    for what, signal in SHUFFLED.items():
        for i in range(point.n_shuffles):
            plan = _shuffled(named[what, signal].plan, what, point.seed + i)
            yield Variant(group=what, signal=signal, direction=f"shuffle {i}", plan=plan)


def _shuffled(plan: PlanFor, what: What, seed: int) -> PlanFor:
    return lambda n_tokens: shuffled(plan(n_tokens), what, seed)


def _check(scores: Sequence[PlanScore], model: Any) -> None:
    """Everything was evicted, equally much under all plans."""
    config = model.config.get_text_config()
    n_heads = config.num_hidden_layers * config.num_key_value_heads
    kept: dict[str, dict[str, int]] = {}
    for s in scores:
        kept.setdefault(s.item, {})[s.plan] = s.kept
    whole = {s.item: n_heads * s.n_tokens for s in scores}
    for item, of_plans in kept.items():
        check_evicted(item, whole[item], of_plans)


def rows(
    scores: Sequence[PlanScore],
    made: Sequence[Variant],
    drawn: Sequence[Variant],
    point: Settings,
) -> Iterator[Row]:
    """Each variant's macro means; then all placements of a kind together, and the plan's rank."""
    of: dict[str, dict[str, list[PlanScore]]] = {}
    for s in scores:
        of.setdefault(s.plan, {}).setdefault(s.family, []).append(s)
    base = of[made[0].name]
    for v in made:
        yield from _means(v, [of[v.name]], base, point)
    for group in dict.fromkeys(v.group for v in drawn):
        same = [v for v in drawn if v.group == group]
        together = replace(same[0], direction=f"{len(same)} shuffles, mean")
        yield from _means(together, [of[v.name] for v in same], base, point)
        own = macro_kl(scores, replace(same[0], direction="forward").name)
        rank = 1 + sum(macro_kl(scores, v.name) < own for v in same)
        dims = _dims(together, point)
        yield row("ablations", "rank_among_shuffles", rank, "place", dims, n=len(same) + 1)


def _means(
    variant: Variant,
    plans: Sequence[Mapping[str, Sequence[PlanScore]]],
    base: Mapping[str, Sequence[PlanScore]],
    point: Settings,
) -> Iterator[Row]:
    """Means over plans of one kind, then as everywhere: items, families, all paired."""
    columns = [
        np.array(
            [
                (
                    fmean(s.kl for s in same),
                    fmean(s.nll - s.full_nll for s in same),
                    fmean(float(s.exact) for s in same),
                    best.kl,
                )
                for best, *same in zip(base[family], *(p[family] for p in plans), strict=True)
            ]
        )
        for family in base
    ]
    values = {
        "kl_nats": ("nats", lambda m: m[..., 0]),
        "kl_over_single_nats": ("nats", lambda m: m[..., 0] - m[..., 3]),
        "nll_delta_nats": ("nats", lambda m: m[..., 1]),
        "exact": ("share", lambda m: m[..., 2]),
        "gap_recovered_pct": ("%", lambda m: 100 * (1 - m[..., 0] / m[..., 3])),
    }
    for metric, (unit, of_means) in values.items():
        value = stratified(columns, of_means, seed=point.seed, n_resamples=point.n_boot)
        yield row("ablations", metric, value, unit, _dims(variant, point))


def _dims(variant: Variant, point: Settings) -> dict[str, Any]:
    return {
        "model": point.model,
        "suite": point.suite,
        "question": point.question,
        "keep": point.keep,
        "varied": variant.group,
        "signal": variant.signal,
        "direction": variant.direction,
    }


def _sample(score: PlanScore) -> dict[str, Any]:
    rounded = {"kl": round(score.kl, 6), "nll_delta": round(score.nll - score.full_nll, 6)}
    named = {"item": score.item, "family": score.family, "plan": score.plan}
    return named | rounded | {"exact": score.exact, "n_kept": score.kept}
