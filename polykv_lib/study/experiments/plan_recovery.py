"""How much of what eviction costs do per-layer plans win back, at equal numbers of kept tokens?

Every plan is made from calibration items and scored on others. The single policy that plans are
measured against is the best uniform one on the calibration items. Contexts are compressed before
the first token that is scored, so no answer is read from a full cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from polykv_lib import hf
from polykv_lib.calibration import macro_kl
from polykv_lib.study.experiments.common import Say, Timer, facts, settings
from polykv_lib.study.experiments.eviction import choice
from polykv_lib.study.experiments.eviction.choice import Considered
from polykv_lib.study.experiments.eviction.items import Asked, Wanted
from polykv_lib.study.experiments.eviction.plans import OURS, Compared
from polykv_lib.study.experiments.eviction.rows import Point, rows
from polykv_lib.study.experiments.eviction.scores import Result, protocol, results
from polykv_lib.study.parts import part
from polykv_lib.study.record import Outcome


@dataclass(frozen=True, kw_only=True)
class Settings(Wanted):
    """One point. `policies` are compared, and are what paper B's plan chooses from.

    Passes with a single layer evicted, which cost most, are made for the `candidates` alone, at the
    first `keep`. The methods in `answering` answer freely, as the best single policy and ours do.
    """

    model: str
    keep: Sequence[float]
    policies: Sequence[str]
    candidates: Sequence[str]
    plans: Sequence[str]
    codecs: Sequence[str]
    max_new_tokens: int
    n_boot: int
    answering: Sequence[str] = ()


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Quality under every method and codec, the gap that plans win back, and the plans.

    Raises:
        RuntimeError: A test text is a calibration text, or something was not evicted as planned.
    """
    timer, point = Timer(), settings(Settings, params)
    model, tokenizer = hf.load_model(point.model)
    calibration, test = point.both(tokenizer)
    considered = Considered(
        keeps=point.keep,
        policies=point.policies,
        candidates=point.candidates,
        plans=point.plans,
        seed=point.seed,
        kept=point.kept,
        answering=point.answering,
    )
    chosen = choice.compared(model, [a.encoded for a in calibration], considered, say)
    calibrated = timer.seconds
    scored = list(_score(model, tokenizer, test, chosen, point, say))
    shown = Point(
        dims={"model": point.model, "suite": point.suite, "question": point.question},
        codec=point.codecs[0],
        n_tokens=round(fmean(len(a.encoded.context_ids) for a in test)),
        sampling={"seed": point.seed, "n_resamples": point.n_boot},
    )
    return Outcome(
        rows=[row for own in chosen for row in rows(scored, own, shown)],
        samples=[_sample(r) for r in scored if r.method != OURS],
        protocol={
            **facts(model, tokenizer),
            **protocol(point.question, point.n_boot),
            "decoding": f"greedy, up to {point.max_new_tokens} tokens, nothing evicted meanwhile",
            "best_single": {str(own.keep): own.best for own in chosen},
            "ours": {str(own.keep): own.chosen for own in chosen},
            "ours_is_chosen_by": "macro KL on calibration items, each under plans made from the "
            "other half; the best single policy stays unless a plan's is lower",
            "held_out_macro_kl": {str(own.keep): _held_out(own) for own in chosen},
            "calibration_items": [a.item.id for a in calibration],
            "calibration_seconds": calibrated,
            "seconds": timer.seconds,
        },
    )


def _held_out(own: Compared) -> dict[str, Any]:
    names = dict.fromkeys(score.plan for score in own.held_out)
    return {name: round(macro_kl(own.held_out, name), 6) for name in names}


def _score(
    model: Any,
    tokenizer: Any,
    test: Sequence[Asked],
    chosen: Sequence[Compared],
    point: Settings,
    say: Say,
) -> Iterator[Result]:
    """Every method of every budget; what is chosen as ours appears under that name too."""
    methods = [method for own in chosen for method in own.methods]
    ours = {own.keep: own.ours for own in chosen}
    for i, asked in enumerate(test, 1):
        computed = results(
            model,
            tokenizer,
            asked,
            methods,
            point.codecs,
            max_new_tokens=point.max_new_tokens,
        )
        found: list[Result] = part(f"test-{i}", list, computed)
        for result in found:
            yield result
            if result.method == ours[result.keep]:
                yield replace(result, method=OURS)
        say(f"{i} of {len(test)} test items scored")


def _sample(result: Result) -> dict[str, Any]:
    return {
        "item": result.item,
        "family": result.family,
        "keep": result.keep,
        "method": result.method,
        "codec": result.codec,
        "kl": round(result.kl, 6),
        "nll_delta": round(result.nll_delta, 6),
        "exact": result.exact,
        "score": result.score,
        "answer": result.answer,
        "n_kept": result.n_kept,
        "pool_bytes": result.pool_bytes,
    }
