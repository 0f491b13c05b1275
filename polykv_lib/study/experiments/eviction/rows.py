"""Scored answers -> rows: means with intervals, regrets by family, plans, what was chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np

from polykv_lib.metrics.intervals import Interval, stratified
from polykv_lib.study.experiments.common import row
from polykv_lib.study.experiments.eviction.items import POLICIES
from polykv_lib.study.experiments.eviction.plans import BUDGETS_ALONE, OURS, SHUFFLED, Compared
from polykv_lib.study.experiments.eviction.scores import Result
from polykv_lib.study.record import Row

MACRO: Final = "macro"  # the mean over families
BEST: Final = "best single"
CONTINUES: Final = "SnapKV"  # the policy to compare with where text only goes on


@dataclass(frozen=True, kw_only=True)
class Point:
    """What the rows of a point share."""

    dims: Mapping[str, Any]
    codec: str  # the first one, which every method has
    n_tokens: int  # mean length of the test contexts
    sampling: Mapping[str, Any]  # of the intervals

    def at(self, own: Compared) -> dict[str, Any]:
        """Dimensions of a budget."""
        return {**self.dims, "keep": own.keep}


def rows(scored: Sequence[Result], own: Compared, point: Point) -> Iterator[Row]:
    """All rows of one budget."""
    table: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in scored:
        if result.keep == own.keep:
            families = table.setdefault((result.method, result.codec), {})
            families.setdefault(result.family, []).append(result)
    base = table[own.best, point.codec]
    for (method, codec), families in table.items():
        dims = point.at(own) | {"method": method, "role": own.role(method), "codec": codec}
        yield from _recovery(families, base, dims, point)
        yield from _bytes([r for family in families.values() for r in family], dims)
    plain = {method: own for (method, codec), own in table.items() if codec == point.codec}
    yield from _regrets(plain, own, point)
    yield from _plans(own, point)
    yield from _choice(own, point)


def groups_of(families: Mapping[str, Any]) -> dict[str, list[str]]:
    """Each family by itself, and all of them together."""
    return {**{f: [f] for f in families}, MACRO: list(families)}


def _recovery(
    families: Mapping[str, Sequence[Result]],
    base: Mapping[str, Sequence[Result]],
    dims: Mapping[str, Any],
    point: Point,
) -> Iterator[Row]:
    """Means by family and over all; the gap is that of the best single policy's KL."""
    for name, group in groups_of(families).items():
        means = _means([families[f] for f in group], [base[f] for f in group], point)
        for metric, (unit, value) in means.items():
            yield row("recovery", metric, value, unit, {**dims, "family": name})
            if name == MACRO and metric in ("kl_nats", "nll_delta_nats"):
                yield row("quality_bytes", metric, value, unit, dims)


def _means(
    own: Sequence[Sequence[Result]], base: Sequence[Sequence[Result]], point: Point
) -> dict[str, tuple[str, Interval]]:
    values = {
        "kl_nats": ("nats", [[[r.kl] for r in family] for family in own]),
        "nll_delta_nats": ("nats", [[[r.nll_delta] for r in family] for family in own]),
        "exact": ("share", [[[float(r.exact)] for r in family] for family in own]),
    }
    answered = [[[r.score] for r in family if r.score is not None] for family in own]
    if all(answered):
        values["score"] = ("share", answered)
    means = {
        name: (unit, stratified(_arrays(columns), lambda m: m[..., 0], **point.sampling))
        for name, (unit, columns) in values.items()
    }
    paired = _paired(own, base)
    gap = stratified(paired, lambda m: 100 * (1 - m[..., 0] / m[..., 1]), **point.sampling)
    return means | {"gap_recovered_pct": ("%", gap)}


def _bytes(results: Sequence[Result], dims: Mapping[str, Any]) -> Iterator[Row]:
    n = len(results)
    ratio = sum(r.full_bytes for r in results) / sum(r.pool_bytes for r in results)
    yield row("quality_bytes", "pool_bytes", fmean(r.pool_bytes for r in results), "B", dims, n=n)
    yield row("quality_bytes", "memory_ratio", ratio, "x", dims, n=n)


def _regrets(
    of: Mapping[str, Mapping[str, Sequence[Result]]], own: Compared, point: Point
) -> Iterator[Row]:
    """KL of a plan minus KL of what it is measured against: above zero, a family lost by it."""
    pairs = [(method, BEST, own.best) for method in (*own.made, OURS)]
    pairs += [(OURS, name, name) for name in (BUDGETS_ALONE, SHUFFLED, CONTINUES) if name in of]
    for method, against, baseline in pairs:
        dims = point.at(own) | {"method": method, "against": against}
        for name, group in groups_of(of[method]).items():
            paired = _paired([of[method][f] for f in group], [of[baseline][f] for f in group])
            over = stratified(paired, lambda m: m[..., 0] - m[..., 1], **point.sampling)
            yield row("regret", "kl_over_nats", over, "nats", {**dims, "family": name})


def _plans(own: Compared, point: Point) -> Iterator[Row]:
    """Each layer's policy and tokens a head, in the plans for a document of the mean length."""
    names = {policy: name for name, policy in POLICIES.items()}
    for method, plan_for in own.made.items():
        for i, layer in enumerate(plan_for(point.n_tokens).layers):
            dims = point.at(own) | {
                "method": method,
                "layer": i,
                "policy": names[layer.policy],
                "context_tokens": point.n_tokens,
            }
            budget = float(np.mean(layer.budget))
            yield row("plan", "budget", budget, "tokens", dims, kind="computed")


def _choice(own: Compared, point: Point) -> Iterator[Row]:
    """KL of the contenders on calibration items that their plan was not made from."""
    of: dict[str, dict[str, list[list[float]]]] = {}
    for score in own.held_out:
        of.setdefault(score.plan, {}).setdefault(score.family, []).append([score.kl])
    for method, families in of.items():
        role = "chosen" if method == own.chosen else "contender"
        value = stratified(_arrays(families.values()), lambda m: m[..., 0], **point.sampling)
        yield row(
            "choice", "kl_nats", value, "nats", point.at(own) | {"method": method, "role": role}
        )


def _paired(own: Sequence[Sequence[Result]], base: Sequence[Sequence[Result]]) -> list[np.ndarray]:
    return _arrays(
        [[[a.kl, b.kl] for a, b in zip(*both, strict=True)] for both in zip(own, base, strict=True)]
    )


def _arrays(families: Any) -> list[np.ndarray]:
    return [np.asarray(family, dtype=np.float64) for family in families]
