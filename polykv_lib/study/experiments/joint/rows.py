"""Scores at equal bytes -> rows: means, the joint plan beside each method, and points won."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from polykv_lib.metrics.intervals import stratified
from polykv_lib.study.experiments.common import row
from polykv_lib.study.experiments.eviction.items import POLICIES
from polykv_lib.study.experiments.eviction.rows import MACRO, groups_of
from polykv_lib.study.experiments.eviction.scores import Result
from polykv_lib.study.experiments.joint.methods import JOINT, SINGLE, Stored
from polykv_lib.study.record import Row

BASE = f"{SINGLE}, full"  # what a gap is measured from


@dataclass(frozen=True, kw_only=True)
class Point:
    """What the rows of a point share."""

    dims: Mapping[str, Any]
    sampling: Mapping[str, Any]  # of the intervals
    n_tokens: int  # mean length of the test contexts


Table = dict[str, dict[str, list[Result]]]  # method -> family -> items, in their order


def rows(results: Sequence[Result], point: Point) -> Iterator[Row]:
    """All rows of the scores; those of a method that fits no codec at a budget are missing."""
    tables: dict[float, Table] = {}
    for result in results:
        families = tables.setdefault(result.keep, {}).setdefault(_kind(result.method), {})
        families.setdefault(result.family, []).append(result)
    won: dict[str, list[bool]] = {}
    for share, table in tables.items():
        dims = {**point.dims, "bytes_share": share}
        for method, families in table.items():
            yield from _means(families, table[BASE], dims | {"method": method}, point)
            if method != JOINT:
                for over in _over(table[JOINT], families, dims | {"against": method}, point):
                    yield over
                    if over.dims["family"] == MACRO:
                        won.setdefault(method, []).append(over.hi is not None and over.hi < 0)
    for method, each in won.items():
        dims = {**point.dims, "method": JOINT, "against": method}
        yield row("joint_wins", "points_won_pct", 100 * fmean(each), "%", dims, n=len(each))


def plan_rows(methods: Sequence[Stored], point: Point) -> Iterator[Row]:
    """Policy, codec and mean tokens a head of each layer of the joint plans, at the mean length."""
    names = {policy: name for name, policy in POLICIES.items()}
    for method in methods:
        if method.name == JOINT:
            for i, layer in enumerate(method.plan(point.n_tokens).layers):
                dims = {
                    **point.dims,
                    "bytes_share": method.share,
                    "context_tokens": point.n_tokens,
                    "layer": i,
                    "policy": names[layer.policy],
                    "codec": layer.codec,
                }
                tokens = float(np.mean(layer.budget))
                yield row("joint_plan", "budget", tokens, "tokens", dims, kind="computed")


def _kind(method: str) -> str:
    """The name that a method has at every budget: the quantised single's codec may change."""
    quantised = method.startswith(SINGLE) and method != BASE
    return f"{SINGLE}, quantised" if quantised else method


def _means(
    families: Mapping[str, Sequence[Result]],
    base: Mapping[str, Sequence[Result]],
    dims: Mapping[str, Any],
    point: Point,
) -> Iterator[Row]:
    everything = [r for own in families.values() for r in own]
    dims = {**dims, "codec": everything[0].codec}
    for name, group in groups_of(families).items():
        columns = [_columns(families[f], base[f]) for f in group]
        values = {
            "kl_nats": ("nats", lambda m: m[..., 0]),
            "nll_delta_nats": ("nats", lambda m: m[..., 1]),
            "gap_recovered_pct": ("%", lambda m: 100 * (1 - m[..., 0] / m[..., 2])),
        }
        for metric, (unit, of_means) in values.items():
            value = stratified(columns, of_means, **point.sampling)
            yield row("joint", metric, value, unit, {**dims, "family": name})
    n, of = len(everything), {**dims, "family": MACRO}
    nbytes = fmean(r.pool_bytes for r in everything)
    ratio = sum(r.full_bytes for r in everything) / sum(r.pool_bytes for r in everything)
    yield row("joint", "pool_bytes", nbytes, "B", of, n=n)
    yield row("joint", "memory_ratio", ratio, "x", of, n=n)


def _over(
    own: Mapping[str, Sequence[Result]],
    other: Mapping[str, Sequence[Result]],
    dims: Mapping[str, Any],
    point: Point,
) -> Iterator[Row]:
    """KL of the joint plan minus KL of another method, paired by item: below 0 it is better."""
    for name, group in groups_of(own).items():
        columns = [_columns(own[f], other[f]) for f in group]
        over = stratified(columns, lambda m: m[..., 0] - m[..., 2], **point.sampling)
        named = {**dims, "method": JOINT, "family": name}
        yield row("joint_regret", "kl_over_nats", over, "nats", named)


def _columns(own: Sequence[Result], base: Sequence[Result]) -> Float[ndarray, "item three"]:
    return np.array([(a.kl, a.nll_delta, b.kl) for a, b in zip(own, base, strict=True)])
