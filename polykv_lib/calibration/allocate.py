"""Error curves or signals -> integer budgets of every unit, and the policy that suits them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from polykv_lib.evict.budgets import equal_slopes, proportional

Curve: TypeAlias = list[tuple[int, float]]  # (tokens, weighted error), ascending
Budgets: TypeAlias = Int[ndarray, "layer unit"]
Choice: TypeAlias = Int[ndarray, " layer"]  # index of each layer's policy


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Units (one a layer, or one a KV head) that share `mean` tokens each."""

    errors: Float[ndarray, "layer unit policy point"]  # the last point is the whole document: 0
    points: Float[ndarray, " point"]  # fractions of the document, ascending to 1
    weights: Float[ndarray, " layer"]  # of each layer's errors
    n_tokens: int
    mean: int
    floor: int
    allocate: Callable[[Sequence[Curve]], list[int]] | None = None  # instead of `total` tokens

    @property
    def total(self) -> int:
        """Tokens of all units together."""
        return int(np.prod(self.errors.shape[:2])) * self.mean

    def by_curves(
        self, errors: Float[ndarray, "layer unit point"]
    ) -> tuple[Budgets, tuple[Curve, ...]]:
        """The budgets with the least weighted sum of errors, and the curves that were solved."""
        inner = [round(float(p) * self.n_tokens) for p in self.points[:-1]]
        tokens = sorted({self.floor, *(t for t in inner if t > self.floor), self.n_tokens})
        curves = tuple(
            [(t, float(weight * self._at(t, own))) for t in tokens]
            for layer, weight in zip(errors, self.weights, strict=True)
            for own in layer
        )
        budgets = (self.allocate or self._equal_slopes)(curves)
        return np.array(budgets).reshape(errors.shape[:2]), curves

    def _equal_slopes(self, curves: Sequence[Curve]) -> list[int]:
        return equal_slopes(curves, self.total)

    def by_shares(self, signal: Float[ndarray, " layer"]) -> Budgets:
        """The floor, and the rest by shares of a signal (arXiv:2606.15157, equation 6).

        Departure: the paper has no upper bound. A unit whose share exceeds the document gets the
        document, and the others share what is left, so that every token of the total is held.
        """
        n_units = self.errors.shape[1]
        budgets = np.zeros(len(signal), dtype=int)
        free = np.arange(len(signal))
        left = len(signal) * self.mean
        while len(free):  # every round but the last takes a unit out
            shares = np.array(proportional(signal[free].tolist(), left, self.floor))
            budgets[free] = np.minimum(shares, self.n_tokens)
            full = shares > self.n_tokens
            if not full.any():
                break
            left -= self.n_tokens * int(full.sum())
            free = free[~full]
        return np.repeat(budgets[:, None], n_units, axis=1)

    def best(self, budgets: Budgets, *, worst: bool = False) -> Choice:
        """The policy of least (or most) error in each layer at its budgets; ties: the earlier."""
        sums = np.array(
            [
                [
                    sum(self._at(b, own) for b, own in zip(given, policy, strict=True))
                    for policy in layer.transpose(1, 0, 2)
                ]
                for given, layer in zip(budgets.tolist(), self.errors, strict=True)
            ]
        )
        return sums.argmax(1) if worst else sums.argmin(1)

    def of(self, choice: Choice) -> Float[ndarray, "layer unit point"]:
        """The errors of each layer's chosen policy."""
        return self.errors[np.arange(len(choice)), :, choice]

    def _at(self, tokens: int, errors: Float[ndarray, " point"]) -> float:
        return float(np.interp(tokens / self.n_tokens, self.points, errors))


def opposite(budgets: Budgets) -> Budgets:
    """The same budgets in the opposite order: the largest goes where the smallest was."""
    flat = budgets.reshape(-1)
    order = np.argsort(flat, kind="stable")
    reversed_ = np.empty_like(flat)
    reversed_[order] = flat[order[::-1]]
    return reversed_.reshape(budgets.shape)
