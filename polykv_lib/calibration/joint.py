"""One total of bytes -> tokens and codec of every layer: eviction and quantisation in one plan.

A layer that keeps t tokens in codec c is taken to cost

    loss(t, c) = gain x error(t) + kl(c)

nats: the gain curve of the eviction alone (`solve`), plus the KL of the whole layer stored alone by
c. What rounding adds to an output is nearly uncorrelated with what evicting takes away, so that
squares add, and KL is a square of the output's change to second order.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from jaxtyping import Float
from numpy import ndarray

from polykv_lib.calibration.allocate import Curve
from polykv_lib.calibration.measured import Measurements
from polykv_lib.calibration.solve import Recipe, plan_of, problem_of, signals, spend
from polykv_lib.evict import Plan
from polykv_lib.evict.budgets import lower_hull

Sizes: TypeAlias = Callable[[int, int], int]  # heads, tokens a head -> bytes
Codecs: TypeAlias = Mapping[str, Float[ndarray, " layer"]]  # KL of each layer stored alone, nats


@dataclass(frozen=True, kw_only=True)
class Option:
    """A unit's tokens in one codec: the estimated loss, and the exact bytes, of any number."""

    codec: str
    curve: Curve  # (tokens, loss) by ascending tokens; lines between the points
    nbytes: Callable[[int], int]  # never less for more tokens, but for the whole document


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a unit is given."""

    codec: str
    tokens: int
    loss: float
    nbytes: int


def share_out(units: Sequence[Sequence[Option]], total: int) -> list[Held]:
    """Codec and tokens of each unit: the least summed loss under a total of bytes.

    On the lower convex hull of every unit's points (bytes, loss) the steepest remaining segment is
    spent first; ties go to the earlier unit. A segment that the rest of the total does not pay gets
    the unit the least loss that it does pay, between the points too. So the sum of losses exceeds
    the least possible by less than one segment, and the total is never exceeded.

    Raises:
        ValueError: the total does not pay for the cheapest point of every unit.
    """
    convex = [[replace(own, curve=lower_hull(own.curve)) for own in options] for options in units]
    hulls = [_hull(options) for options in convex]
    held = [hull[0] for hull in hulls]
    left = total - sum(own.nbytes for own in held)
    if left < 0:
        raise ValueError(
            f"total={total} bytes, but the cheapest options of the {len(units)} units take "
            f"{total - left}; raise the total, lower the floor, or offer smaller codecs."
        )
    segments = sorted(
        ((b.loss - a.loss) / (b.nbytes - a.nbytes), unit, place)
        for unit, hull in enumerate(hulls)
        for place, (a, b) in enumerate(pairwise(hull))
    )
    for _, unit, place in segments:
        before, wanted = held[unit], hulls[unit][place + 1]
        payable = before.nbytes + left
        if wanted.nbytes > payable:
            wanted = _best(convex[unit], payable)
        if wanted.loss <= before.loss:
            held[unit], left = wanted, payable - wanted.nbytes
    return held


def joint(
    measured: Measurements,
    codecs: Codecs,
    sizes: Mapping[str, Sizes],
    recipe: Recipe | None = None,
    *,
    n_heads: int,
    n_tokens: int,
    total: int,
) -> Plan:
    """Each layer's policy, tokens and codec, for documents of a length, under a total of bytes.

    Where budgets are by head, a layer's codec is that of the plan by layers, and the heads then
    share out the bytes again, each counted as if no other held as many tokens.

    Args:
        measured: what the passes with one layer evicted returned.
        codecs: single-layer KL of each codec on offer; one alone makes this the gain-curve plan.
        sizes: bytes of so many heads of a layer, by codec.
        recipe: as for `solve`; its budget signal must be a curve.
        n_heads: KV heads of a layer.
        n_tokens: of the documents.
        total: bytes of all layers.

    Raises:
        ValueError: budgets by another signal, or a total too small for the floor.
    """
    recipe = recipe or Recipe()
    if "curve" not in recipe.budget_signal:
        raise ValueError(
            f"budget_signal={recipe.budget_signal!r} has no curve to spend bytes on; pass "
            "gain_curve or curve."
        )
    found = signals(measured)
    n_layers = len(found["entropy"])
    share = total // n_layers
    mean = max(most_tokens(partial(of, n_heads), share, n_tokens) for of in sizes.values())
    if not mean:
        raise ValueError(f"total={total} bytes do not pay for one token a head; raise the total.")
    chosen: list[str] = []

    def by_layer(curves: Sequence[Curve]) -> list[int]:
        menus = [
            [_option(name, curve, kl[i], sizes[name], n_heads) for name, kl in codecs.items()]
            for i, curve in enumerate(curves)
        ]
        held = share_out(menus, total)
        chosen[:] = [own.codec for own in held]
        return [own.tokens for own in held]

    def by_head(curves: Sequence[Curve]) -> list[int]:
        names = [chosen[i // n_heads] for i in range(len(curves))]
        menus = [[_option(n, c, 0.0, sizes[n], 1)] for n, c in zip(names, curves, strict=True)]
        return [own.tokens for own in share_out(menus, total)]

    by_layers = replace(recipe, level="layer")
    problem = problem_of(measured, by_layers, found, n_tokens, mean)
    budgets, choice, _ = spend(measured, replace(problem, allocate=by_layer), by_layers, found)
    if recipe.level == "head":
        problem = problem_of(measured, recipe, found, n_tokens, mean)
        budgets, choice, _ = spend(measured, replace(problem, allocate=by_head), recipe, found)
    plan = plan_of(measured, recipe, budgets, choice)
    named = zip(plan.layers, chosen, strict=True)
    return replace(plan, layers=tuple(replace(own, codec=name) for own, name in named))


def _option(name: str, curve: Curve, kl: float, sizes: Sizes, n_heads: int) -> Option:
    shifted = [(tokens, float(loss + kl)) for tokens, loss in curve]
    return Option(codec=name, curve=shifted, nbytes=partial(sizes, n_heads))


def _hull(options: Sequence[Option]) -> list[Held]:
    """A unit's points that no mixture of others beats, by ascending bytes and falling loss."""
    points = [_held(own, tokens, loss) for own in options for tokens, loss in own.curve]
    front: list[Held] = []
    for point in sorted(points, key=lambda p: (p.nbytes, p.loss)):
        if not front or point.loss < front[-1].loss:
            front.append(point)
    corners = set(lower_hull([(p.nbytes, p.loss) for p in front]))
    return [p for p in front if (p.nbytes, p.loss) in corners]


def _best(options: Sequence[Option], payable: int) -> Held:
    """The least loss that so many bytes pay for; ties go to fewer bytes, then the earlier codec."""
    affordable = []
    for own in options:
        (least, _), (whole, _) = own.curve[0], own.curve[-1]
        tokens = most_tokens(own.nbytes, payable, whole)
        if tokens >= least:
            affordable.append(_held(own, tokens, _at(own.curve, tokens)))
    return min(affordable, key=lambda held: (held.loss, held.nbytes))


def _held(option: Option, tokens: int, loss: float) -> Held:
    return Held(codec=option.codec, tokens=tokens, loss=loss, nbytes=option.nbytes(tokens))


def most_tokens(nbytes: Callable[[int], int], payable: int, most: int) -> int:
    """The most tokens, up to `most`, that so many bytes pay for."""
    if nbytes(most) <= payable:  # a whole document holds no positions, and may take fewer bytes
        return most
    return bisect_right(range(1, most + 1), payable, key=nbytes)


def _at(curve: Curve, tokens: int) -> float:
    place = bisect_right(curve, tokens, key=lambda point: point[0])
    (before, high), (after, low) = curve[place - 1], curve[min(place, len(curve) - 1)]
    if after == before:
        return high
    return high + (low - high) * (tokens - before) / (after - before)
