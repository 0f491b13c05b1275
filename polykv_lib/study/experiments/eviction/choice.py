"""Everything that is decided before a test item is read: best policy, plans, and which is ours.

Our plan is used only where it earns its place. The calibration items are cut into halves; a plan
made from one half is scored on the other, so that every item has a score under a plan that was not
made from it. The better of the plans by layer and by head is chosen, unless the best single policy
does as well, with a uniform budget or with the plans' budgets: then that is chosen. The plan itself
is then made from all items.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from polykv_lib import hf
from polykv_lib.calibration import EncodedItem, Measurements, PlanScore, choose
from polykv_lib.hf.calibration import FRACTIONS, measure
from polykv_lib.study.experiments.common import Say
from polykv_lib.study.experiments.eviction.items import POLICIES, PYRAMID, Kept, PlanFor, single
from polykv_lib.study.experiments.eviction.plans import (
    BUDGETS_ALONE,
    LEVELS,
    PAPER_B,
    SHUFFLED,
    Compared,
    budgets_of,
    gain_curve,
    least,
    paper_b,
    shuffled_budgets,
)
from polykv_lib.study.parts import part

Plans: TypeAlias = Mapping[str, PlanFor]
Scores: TypeAlias = dict[float, list[PlanScore]]  # by the share that is kept


@dataclass(frozen=True, kw_only=True)
class Considered:
    """What a point compares: `plans` are `PAPER_B` and names in `LEVELS`."""

    keeps: Sequence[float]
    policies: Sequence[str]  # compared, and what paper B's plan chooses from
    candidates: Sequence[str]  # what our plans choose from
    plans: Sequence[str]
    seed: int  # of the shuffled control
    kept: Callable[[float], Kept] = lambda keep: keep  # what a share stands for
    answering: Sequence[str] = ()  # freely, beside the best single policy and ours

    @property
    def levels(self) -> list[str]:
        """Our plans."""
        return [name for name in self.plans if name in LEVELS]

    @property
    def uniform(self) -> list[str]:
        """The policies that take a uniform budget."""
        return [name for name in self.policies if name != PYRAMID]


def compared(
    model: Any, items: Sequence[EncodedItem], considered: Considered, say: Say
) -> list[Compared]:
    """Single policies, the best of them, plans and controls at each budget, from these items alone.

    Outputs of single layers are measured for every policy. The passes with a single layer evicted,
    which cost most, are made for the candidates at the first budget alone: gains serve all budgets.
    """
    keeps = considered.keeps
    n_layers = model.config.get_text_config().num_hidden_layers
    singles = {
        k: {n: single(n, considered.kept(k), n_layers) for n in considered.policies} for k in keeps
    }
    uniform = {k: {n: own[n] for n in considered.uniform} for k, own in singles.items()}
    scores = part("singles", scores_of, model, items, uniform, say)
    best = {k: least(scores[k], uniform[k]) for k in keeps}
    routed, gains = part("measured", measured, model, items, considered, say)
    for i, (own, others) in enumerate(_halves(items)):
        rivals = {k: _rivals(_part(gains, others), k, best[k], considered) for k in keeps}
        held_out = part(f"half-{i}", scores_of, model, own, rivals, say)
        for k, more in held_out.items():
            scores[k] += more
    return [_compared(k, best[k], singles[k], routed, gains, scores[k], considered) for k in keeps]


def measured(
    model: Any, items: Sequence[EncodedItem], considered: Considered, say: Say
) -> tuple[Measurements, Measurements]:
    """Outputs under every policy at every budget; gains and error curves of the candidates."""
    keeps = considered.keeps
    routed = measure(
        model,
        items,
        target=keeps[0],
        fractions=keeps,
        policies=[POLICIES[name] for name in considered.uniform],
        single_layer=False,
        say=say,
    )
    gains = measure(
        model,
        items,
        target=keeps[0],
        fractions=[*FRACTIONS, *keeps, min(*FRACTIONS, min(keeps) / 2)],
        policies=[POLICIES[name] for name in considered.candidates],
        say=say,
    )
    return routed, gains


def _compared(
    keep: float,
    best: str,
    each: Plans,
    routed: Measurements,
    gains: Measurements,
    scores: Sequence[PlanScore],
    considered: Considered,
) -> Compared:
    rivals = _rivals(gains, keep, best, considered)
    held_out = [s for s in scores if s.plan == best or s.plan in rivals]
    chosen = best
    if {s.plan for s in held_out} > {best}:
        fallbacks = [best, *(name for name in rivals if name not in LEVELS)]
        chosen = choose(held_out, least(held_out, considered.levels), fallbacks)
    ours = {**each, **rivals}[chosen]
    made = {name: rivals[name] for name in considered.levels}
    if PAPER_B in considered.plans:
        made = paper_b(replace(routed, target=keep), gains, considered.kept(keep)) | made
    return Compared(
        keep=keep,
        best=best,
        chosen=chosen,
        single=each,
        made=made,
        controls={
            BUDGETS_ALONE: budgets_of(ours, best),
            SHUFFLED: shuffled_budgets(ours, considered.seed),
        },
        held_out=held_out,
        answering=considered.answering,
    )


def _rivals(
    gains: Measurements, keep: float, best: str, considered: Considered
) -> dict[str, PlanFor]:
    """Our plans, and the best single policy under the budgets of each."""
    plans = {n: gain_curve(n, gains, considered.kept(keep)) for n in considered.levels}
    return plans | {f"best single, {n} budgets": budgets_of(p, best) for n, p in plans.items()}


def _halves(
    items: Sequence[EncodedItem],
) -> Iterator[tuple[list[EncodedItem], list[EncodedItem]]]:
    """Each half beside the other: every second item of a family, or of all where each has one.

    A single item has no other half, and nothing is held out.
    """
    seen: Counter[str] = Counter()
    places = []
    for item in items:
        places.append(seen[item.family])
        seen[item.family] += 1
    if max(places) == 0:
        places = list(range(len(items)))
    first, second = (
        [item for item, place in zip(items, places, strict=True) if place % 2 == half]
        for half in (0, 1)
    )
    if second:
        yield first, second
        yield second, first


def _part(measured: Measurements, items: Sequence[EncodedItem]) -> Measurements:
    ids = {item.id for item in items}
    return replace(measured, items=tuple(i for i in measured.items if i.item in ids))


def scores_of(
    model: Any, items: Sequence[EncodedItem], plans: Mapping[float, Plans], say: Say
) -> Scores:
    """Scores by budget; one prefill of an item serves all plans of all budgets."""
    named = {f"{n} at {k}": (k, n) for k, own in plans.items() for n in own}
    everything = {text: plans[k][n] for text, (k, n) in named.items()}
    found: Scores = {k: [] for k in plans}
    if everything:
        for score in hf.evaluate_plans(model, items, everything, say=say):
            keep, name = named[score.plan]
            found[keep].append(replace(score, plan=name))
    return found
