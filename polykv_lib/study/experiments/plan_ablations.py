"""What makes a per-layer plan good: which signal, policies or budgets, placement, content, heads?

The rows follow Table 3 of arXiv:2606.15157: a signal's choice beside its opposite, and for policies
the phases in which they act. All plans keep equally many tokens, are made from calibration items,
and are scored on others by KL from the full cache. Outside the table of phases plans act on the
prefill alone, and nothing is evicted while an answer is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from polykv_lib import hf
from polykv_lib.calibration import PlanScore, macro_kl
from polykv_lib.hf.calibration import measure, points_for
from polykv_lib.metrics.intervals import stratified
from polykv_lib.study.experiments.common import Say, Timer, facts, row, settings
from polykv_lib.study.experiments.eviction import answers as free
from polykv_lib.study.experiments.eviction import phases
from polykv_lib.study.experiments.eviction.items import POLICIES, Wanted, single
from polykv_lib.study.experiments.eviction.phases import long_answers
from polykv_lib.study.experiments.eviction.plans import best_single
from polykv_lib.study.experiments.eviction.scores import check_evicted, protocol
from polykv_lib.study.experiments.eviction.variants import Variant, What, placements, variants
from polykv_lib.study.parts import part
from polykv_lib.study.record import Outcome, Row


@dataclass(frozen=True, kw_only=True)
class Settings(Wanted):
    """One point; placements of the policies and of the budgets are drawn by chance.

    `phase_tasks` have answers long enough for a decode phase; none: no table of phases. Plans at
    prefill answer freely, up to `max_new_tokens`; 0: they do not.
    """

    model: str
    keep: float
    candidates: Sequence[str]
    n_shuffles: int  # of the policies
    n_budget_shuffles: int
    phase_tasks: Sequence[str]
    n_boot: int
    max_new_tokens: int = 0


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
    kept = point.kept(point.keep)
    each = {name: single(name, kept, n_layers) for name in point.candidates}
    best = part("best", best_single, model, items, each, say)
    measuring: dict[str, Any] = {
        "target": point.keep,
        "fractions": points_for(point.keep),
        "policies": [POLICIES[name] for name in point.candidates],
    }
    gains = part("measured", measure, model, items, say=say, **measuring)
    made = list(variants(gains, best, each[best], kept))
    counts: dict[What, int] = {"policies": point.n_shuffles, "budgets": point.n_budget_shuffles}
    drawn = list(placements(made, counts, point.seed))
    plans = {v.name: v.plan for v in [*made, *drawn]}
    tested = [a.encoded for a in test]
    scores = part("test", hf.evaluate_plans, model, tested, plans, say=say)
    _check(scores, model)
    found, samples = list(rows(scores, made, drawn, point)), _samples(scores, drawn)
    if point.max_new_tokens:
        limits: dict[str, Any] = {"keep": point.keep, "max_new_tokens": point.max_new_tokens}
        answers = free.answered(model, tokenizer, test, made, say, **limits)
        sampling = {"seed": point.seed, "n_resamples": point.n_boot}
        found += free.rows(answers, made, _shared(point), **sampling)
        samples += free.samples(answers)
    if point.phase_tasks:
        before, after = replace(point, tasks=point.phase_tasks).both(tokenizer)
        asked = long_answers(before), say
        of_phases = part("phases", phases.measured, model, *asked, **measuring)
        phased = list(phases.variants(of_phases, best, each[best], kept))
        plans = {v.name: v.plan for v in phased}
        scores = part("phases-test", hf.evaluate_plans, model, long_answers(after), plans, say=say)
        after_prefill = {v.name for v in phased if v.phase != "decode"}
        _check([s for s in scores if s.plan in after_prefill], model)
        found += phase_rows(scores, phased, point)
        samples += _samples(scores, ())
    return Outcome(
        rows=found,
        samples=samples,
        protocol={
            **facts(model, tokenizer),
            **protocol(point.question, point.n_boot),
            "phase": "prefill, but for the table of phases",
            "decode": (
                "token by token; a layer holds at most its budget, context and answer together, "
                "after every step; the first answer token is read before that"
            ),
            "best_single": best,
            "calibration_items": [a.item.id for a in calibration],
            "seconds": timer.seconds,
        },
    )


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
    of = _by_plan(scores)
    base = of[made[0].name]
    for v in made:
        yield from _means("ablations", [of[v.name]], base, _dims(v, point), point)
    for group in dict.fromkeys(v.group for v in drawn):
        same = [v for v in drawn if v.group == group]
        together = replace(same[0], direction=f"{len(same)} shuffles, mean")
        dims = _dims(together, point)
        yield from _means("ablations", [of[v.name] for v in same], base, dims, point)
        own = macro_kl(scores, replace(same[0], direction="forward").name)
        rank = 1 + sum(macro_kl(scores, v.name) < own for v in same)
        yield row("ablations", "rank_among_shuffles", rank, "place", dims, n=len(same) + 1)


def phase_rows(
    scores: Sequence[PlanScore], made: Sequence[Variant], point: Settings
) -> Iterator[Row]:
    """Each variant's macro means, beside the best single policy in the same phase."""
    of = _by_plan(scores)
    single_of = {v.phase: of[v.name] for v in made if v.group == "single"}
    for v in made:
        dims = _dims(v, point) | {"phase": v.phase}
        yield from _means("phases", [of[v.name]], single_of[v.phase], dims, point)


def _by_plan(scores: Sequence[PlanScore]) -> dict[str, dict[str, list[PlanScore]]]:
    of: dict[str, dict[str, list[PlanScore]]] = {}
    for s in scores:
        of.setdefault(s.plan, {}).setdefault(s.family, []).append(s)
    return of


def _means(
    table: str,
    plans: Sequence[Mapping[str, Sequence[PlanScore]]],
    base: Mapping[str, Sequence[PlanScore]],
    dims: Mapping[str, Any],
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
        yield row(table, metric, value, unit, dims)


def _dims(variant: Variant, point: Settings) -> dict[str, Any]:
    return _shared(point) | {
        "varied": variant.group,
        "signal": variant.signal,
        "direction": variant.direction,
    }


def _shared(point: Settings) -> dict[str, Any]:
    names = ("model", "suite", "question", "keep")
    return {name: getattr(point, name) for name in names}


def _samples(scores: Sequence[PlanScore], drawn: Sequence[Variant]) -> list[dict[str, Any]]:
    """One entry an item and plan; all placements of a kind in one, in the order of their seeds."""
    shuffles = {v.name: f"{v.group} by {v.signal}, shuffles" for v in drawn}
    found: list[dict[str, Any]] = []
    together: dict[tuple[str, str], dict[str, Any]] = {}
    for s in scores:
        rounded = {"kl": round(s.kl, 6), "nll_delta": round(s.nll - s.full_nll, 6)}
        named = {"item": s.item, "family": s.family, "plan": shuffles.get(s.plan, s.plan)}
        if s.plan not in shuffles:
            found.append(named | rounded | {"exact": s.exact, "n_kept": s.kept})
            continue
        key = (s.item, named["plan"])
        if key not in together:
            found.append(together.setdefault(key, named | {name: [] for name in rounded}))
        for name, value in rounded.items():
            together[key][name].append(value)
    return found
