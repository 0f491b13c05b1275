"""How much of what eviction costs do per-layer plans win back, at equal numbers of kept tokens?

Every plan is made from calibration items and scored on others. The single policy that plans are
measured against is the best uniform one on the calibration items. Contexts are compressed before
the first token that is scored, so no answer is read from a full cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np

from polykv_lib import hf
from polykv_lib.metrics.intervals import Interval
from polykv_lib.study.experiments import eviction_plans
from polykv_lib.study.experiments.common import Say, Timer, facts, row, settings
from polykv_lib.study.experiments.eviction_items import POLICIES, Asked, Wanted
from polykv_lib.study.experiments.eviction_plans import Compared
from polykv_lib.study.experiments.eviction_scores import (
    FULL,
    Result,
    protocol,
    results,
    sharing,
    stratified,
)
from polykv_lib.study.record import Outcome, Row

MACRO: Final = "macro"  # the mean over families


@dataclass(frozen=True, kw_only=True)
class Settings(Wanted):
    """One point. `policies` are compared, and are what paper B's plan chooses from.

    Passes with a single layer evicted, which cost most, are made for the `candidates` and the best
    single policy alone.
    """

    model: str
    keep: Sequence[float]
    policies: Sequence[str]
    candidates: Sequence[str]
    plans: Sequence[str]
    codecs: Sequence[str]
    max_new_tokens: int
    n_boot: int


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Quality under every method and codec, the gap that plans win back, and the plans.

    Raises:
        RuntimeError: A test text is a calibration text, or something was not evicted as planned.
    """
    timer, point = Timer(), settings(Settings, params)
    model, tokenizer = hf.load_model(point.model)
    calibration, test = point.both(tokenizer)
    found: list[Row] = []
    samples: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    for keep in point.keep:
        compared = eviction_plans.compared(
            model,
            [a.encoded for a in calibration],
            keep=keep,
            policies=point.policies,
            candidates=point.candidates,
            plans=point.plans,
            say=say,
        )
        best[str(keep)] = compared.best
        scored = list(_score(model, tokenizer, test, compared, point, say))
        found += rows(scored, compared, point)
        found += plan_rows(compared, round(fmean(len(a.encoded.context_ids) for a in test)), point)
        samples += [_sample(r, keep) for r in scored]
    return Outcome(
        rows=found,
        samples=samples,
        protocol={
            **facts(model, tokenizer),
            **protocol(point.question, point.n_boot),
            "decoding": f"greedy, up to {point.max_new_tokens} tokens, nothing evicted meanwhile",
            "best_single": best,
            "calibration_items": [a.item.id for a in calibration],
            "seconds": timer.seconds,
        },
    )


def _score(
    model: Any,
    tokenizer: Any,
    test: Sequence[Asked],
    compared: Compared,
    point: Settings,
    say: Say,
) -> Iterator[Result]:
    everything = sharing({**compared.single, **compared.made})
    in_full = {FULL, compared.best, *compared.made}
    for i, asked in enumerate(test, 1):
        yield from results(
            model,
            tokenizer,
            asked,
            everything,
            point.codecs,
            in_full=in_full,
            max_new_tokens=point.max_new_tokens,
        )
        say(f"{i} of {len(test)} test items scored at {compared.keep:.0%} of the context")


def rows(scored: Sequence[Result], compared: Compared, point: Settings) -> Iterator[Row]:
    """Means of each method and codec, by family and over all, and bytes beside quality."""
    table: dict[tuple[str, str, str], list[Result]] = {}
    for result in scored:
        table.setdefault((result.method, result.codec, result.family), []).append(result)
    families = list(dict.fromkeys(r.family for r in scored))
    for method, codec in dict.fromkeys((r.method, r.codec) for r in scored):
        dims = _dims(compared, point) | {
            "method": method,
            "role": compared.role(method),
            "codec": codec,
        }
        for name, chosen in [(f, [f]) for f in families] + [(MACRO, families)]:
            own = [table[method, codec, family] for family in chosen]
            base = [table[compared.best, point.codecs[0], family] for family in chosen]
            for metric, (unit, value) in _means(own, base, point).items():
                yield row("recovery", metric, value, unit, dims | {"family": name})
                if name == MACRO and metric in ("kl_nats", "nll_delta_nats"):
                    yield row("quality_bytes", metric, value, unit, dims)
        everything = [r for family in families for r in table[method, codec, family]]
        n_bytes = fmean(r.pool_bytes for r in everything)
        ratio = sum(r.full_bytes for r in everything) / sum(r.pool_bytes for r in everything)
        n = len(everything)
        yield row("quality_bytes", "pool_bytes", n_bytes, "B", dims, n=n)
        yield row("quality_bytes", "memory_ratio", ratio, "x", dims, n=n)


def _means(
    own: Sequence[Sequence[Result]], base: Sequence[Sequence[Result]], point: Settings
) -> dict[str, tuple[str, Interval]]:
    """Each metric over some families; the gap is that of the best single policy's KL."""
    values = {
        "kl_nats": ("nats", [[[r.kl] for r in family] for family in own]),
        "nll_delta_nats": ("nats", [[[r.nll_delta] for r in family] for family in own]),
        "exact": ("share", [[[float(r.exact)] for r in family] for family in own]),
    }
    answered = [[[r.score] for r in family if r.score is not None] for family in own]
    if all(answered):
        values["score"] = ("share", answered)
    sampling: dict[str, Any] = {"seed": point.seed, "n_resamples": point.n_boot}
    means = {
        name: (unit, stratified(_arrays(columns), lambda m: m[..., 0], **sampling))
        for name, (unit, columns) in values.items()
    }
    paired = _arrays(
        [[[a.kl, b.kl] for a, b in zip(*both, strict=True)] for both in zip(own, base, strict=True)]
    )
    gap = stratified(paired, lambda m: 100 * (1 - m[..., 0] / m[..., 1]), **sampling)
    return means | {"gap_recovered_pct": ("%", gap)}


def _arrays(families: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(family, dtype=np.float64) for family in families]


def plan_rows(compared: Compared, n_tokens: int, point: Settings) -> Iterator[Row]:
    """Each layer's policy and tokens a head, in the plans for a document of the mean length."""
    names = {policy: name for name, policy in POLICIES.items()}
    for method, plan_for in compared.made.items():
        for i, layer in enumerate(plan_for(n_tokens).layers):
            dims = _dims(compared, point) | {
                "method": method,
                "layer": i,
                "policy": names[layer.policy],
                "context_tokens": n_tokens,
            }
            yield row(
                "plan", "budget", float(np.mean(layer.budget)), "tokens", dims, kind="computed"
            )


def _dims(compared: Compared, point: Settings) -> dict[str, Any]:
    return {
        "model": point.model,
        "suite": point.suite,
        "question": point.question,
        "keep": compared.keep,
    }


def _sample(result: Result, keep: float) -> dict[str, Any]:
    return {
        "item": result.item,
        "family": result.family,
        "keep": keep,
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
