"""Does one plan of policies, tokens and bits beat either paper's way at equal bytes?

Budgets are shares of one bf16 copy of a document. Everything is chosen on calibration items, then
scored on others; every method's pool is counted from its tensors, and none may take more bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

from polykv_lib import hf, presets
from polykv_lib.calibration import EncodedItem
from polykv_lib.study.experiments.common import Say, Timer, facts, settings
from polykv_lib.study.experiments.eviction import choice
from polykv_lib.study.experiments.eviction.choice import Considered
from polykv_lib.study.experiments.eviction.items import Wanted, single
from polykv_lib.study.experiments.eviction.plans import PAPER_B
from polykv_lib.study.experiments.eviction.plans import least as least_single
from polykv_lib.study.experiments.eviction.scores import Result, protocol
from polykv_lib.study.experiments.joint.methods import (
    ByteBudget,
    Calibrated,
    Stored,
    alone,
    least,
    planned,
    scored,
    singles,
)
from polykv_lib.study.experiments.joint.rows import Point, plan_rows, rows
from polykv_lib.study.parts import part
from polykv_lib.study.record import Outcome


@dataclass(frozen=True, kw_only=True)
class Settings(Wanted):
    """One point. `family` are the codecs without eviction, the largest first.

    `fixed` are the codecs of plans with one codec, `menu` those that the joint plan chooses from.
    """

    model: str
    shares: Sequence[float]
    policies: Sequence[str]
    candidates: Sequence[str]
    level: Literal["layer", "head"]
    family: Sequence[str]
    fixed: Sequence[str]
    menu: Sequence[str]
    n_boot: int


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """KL and likelihood under every method at every budget, and the joint plan beside each.

    Raises:
        RuntimeError: A test text is a calibration text, or a pool is larger than its budget.
    """
    timer, point = Timer(), settings(Settings, params)
    model, tokenizer = hf.load_model(point.model)
    calibration, test = ([a.encoded for a in own] for own in point.both(tokenizer))
    geometry = hf.geometry_of(model.config)
    budgets = {share: ByteBudget(share=share, geometry=geometry) for share in point.shares}
    shortest = min(len(item.context_ids) for item in test)
    methods = list(_methods(model, calibration, budgets, shortest, point, say))
    calibrated = timer.seconds
    results: list[Result] = []
    for i, item in enumerate(test, 1):
        results += part(f"test-{i}", list, scored(model, item, methods, budgets))
        say(f"{i} of {len(test)} test items scored, {timer.seconds:.0f} s")
    shown = Point(
        dims={"model": point.model, "suite": point.suite, "question": point.question},
        sampling={"seed": point.seed, "n_resamples": point.n_boot},
        n_tokens=round(fmean(len(item.context_ids) for item in test)),
    )
    return Outcome(
        rows=[*rows(results, shown), *plan_rows(methods, shown)],
        samples=[_sample(r) for r in results],
        protocol={
            **facts(model, tokenizer),
            **protocol(point.question, point.n_boot),
            "bytes": "every tensor of a pool: codes, scales, norms, sinks, positions, ids; bf16 "
            "where nothing is quantised",
            "loss": "gain x output error of the eviction + KL of the layer stored alone",
            "calibration_items": [item.id for item in calibration],
            "calibration_seconds": calibrated,
            "seconds": timer.seconds,
        },
    )


def _methods(
    model: Any,
    items: Sequence[EncodedItem],
    budgets: Mapping[float, ByteBudget],
    shortest: int,
    point: Settings,
    say: Say,
) -> Iterator[Stored]:
    """Everything that is scored on test items."""
    considered = Considered(
        keeps=point.shares,
        policies=point.policies,
        candidates=point.candidates,
        plans=[PAPER_B],
        seed=point.seed,
    )
    uniform = {
        share: {
            name: single(name, partial(own.tokens, "full"), own.geometry.n_layers)
            for name in considered.uniform
        }
        for share, own in budgets.items()
    }
    scores = part("singles", choice.scores_of, model, items, uniform, say)
    best = {share: least_single(scores[share], list(uniform[share])) for share in budgets}
    routed, gains = part("measured", choice.measured, model, items, considered, say)
    each_family = {item.family: item for item in items}
    offered = {name: presets.codec(name) for name in point.menu}
    codecs = part("codecs", hf.codec_kl, model, list(each_family.values()), offered, say)
    known = Calibrated(routed=routed, gains=gains, codecs=codecs, level=point.level)
    quantised = [s for b in budgets.values() for s in singles(b, best[b.share], point.fixed)]
    tried: list[Result] = []
    for i, item in enumerate(items):
        tried += part(f"tried-{i}", list, scored(model, item, quantised, budgets))
    for share, budget in budgets.items():
        yield from alone(budget, point.family, shortest)
        yield from singles(budget, best[share], ["full"])
        yield least(tried, [own for own in quantised if own.share == share])
        yield from planned(budget, known, point.fixed, point.menu)


def _sample(result: Result) -> dict[str, Any]:
    return {
        "item": result.item,
        "family": result.family,
        "bytes_share": result.keep,
        "method": result.method,
        "codec": result.codec,
        "kl": round(result.kl, 6),
        "nll_delta": round(result.nll_delta, 6),
        "exact": result.exact,
        "n_kept": result.n_kept,
        "pool_bytes": result.pool_bytes,
    }
