"""How many tokens each unit (a layer, or a KV head) may keep. Totals are spent exactly."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from numpy import ndarray


def uniform(n_units: int, total: int) -> list[int]:
    """The same for every unit; a remainder goes to the first ones."""
    return apportion(np.ones(n_units), total)


def pyramid(n_layers: int, total: int, beta: float = 20.0) -> list[int]:
    """Linearly fewer tokens in deeper layers (PyramidKV, arXiv:2406.02069).

    The last layer's share is 1 / beta of the mean, the first one's 2 - 1 / beta of it. Departure:
    the total is exact; the authors' integer steps overspend by up to 7 %.
    """
    return apportion(np.linspace(2 - 1 / beta, 1 / beta, n_layers), total)


def proportional(
    signal: Sequence[float], total: int, b_min: int, epsilon: float = 1e-6
) -> list[int]:
    """b_min for each unit, the rest by its share of a signal (arXiv:2606.15157, equation 6).

    Negative signals, which the paper does not treat, count as 0.
    """
    n_units = len(signal)
    _check_total(n_units, total, b_min)
    shares = np.clip(np.asarray(signal, dtype=np.float64), 0, None) + epsilon
    return [b_min + extra for extra in apportion(shares, total - n_units * b_min)]


def equal_slopes(curves: Sequence[Sequence[tuple[int, float]]], total: int) -> list[int]:
    """The budgets that minimise the sum of error curves under a total.

    Each unit's curve lists (tokens, error) by ascending tokens; its first point is the unit's
    floor, its last one the most it may get. On the lower convex hull of every curve the steepest
    remaining segment is spent first, so that all units end at equal slopes; ties go to the earlier
    unit.
    """
    hulls = [lower_hull(curve) for curve in curves]
    budgets = [hull[0][0] for hull in hulls]
    _check_total(len(curves), total, max(budgets), spent=sum(budgets))
    most = sum(hull[-1][0] for hull in hulls)
    if total > most:
        raise ValueError(f"total={total} tokens, but the units can hold {most}; keep everything.")
    segments = sorted(
        ((e1 - e0) / (b1 - b0), unit, place, b1 - b0)
        for unit, hull in enumerate(hulls)
        for place, ((b0, e0), (b1, e1)) in enumerate(pairwise(hull))
    )
    left = total - sum(budgets)
    for _, unit, _, length in segments:
        step = min(length, left)
        budgets[unit] += step
        left -= step
    return budgets


def apportion(shares: Sequence[float] | Float[ndarray, " unit"], total: int) -> list[int]:
    """Integers proportional to shares that sum to total: largest remainders win what is left."""
    exact = np.asarray(shares, dtype=np.float64) / np.sum(shares) * total
    floor = np.floor(exact).astype(int)
    order = np.argsort(-(exact - floor), kind="stable")
    floor[order[: total - int(floor.sum())]] += 1
    return [int(b) for b in floor]


def lower_hull(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points below which no line between two others passes, of points ascending in x."""
    hull: list[tuple[int, float]] = []
    for point in curve:
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_up(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _check_total(n_units: int, total: int, b_min: int, spent: int | None = None) -> None:
    needed = n_units * b_min if spent is None else spent
    if total < needed:
        raise ValueError(
            f"total={total} tokens for {n_units} units that need {needed} at least; raise the "
            "total or lower the floor."
        )
