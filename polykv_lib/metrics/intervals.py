"""Values with 95 % intervals, by the bootstrap over documents (or samples)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import bootstrap

CONFIDENCE = 0.95
N_RESAMPLES = 2_000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean or median, its percentile interval, and how many values it was taken over.

    `lo` and `hi` are None where one value leaves no interval to give.
    """

    value: float
    lo: float | None
    hi: float | None
    n: int

    def mapped(self, unit: Callable[[float], float]) -> "Interval":
        """The same interval in another unit; percentiles follow any increasing function."""
        return Interval(
            value=unit(self.value),
            lo=None if self.lo is None else unit(self.lo),
            hi=None if self.hi is None else unit(self.hi),
            n=self.n,
        )


def mean_interval(
    values: Sequence[float], *, seed: int = 0, n_resamples: int = N_RESAMPLES
) -> Interval:
    """The mean with its percentile bootstrap interval.

    Pass paired differences (one a document) and the bootstrap is a paired one: resampling documents
    resamples both sides together.

    Raises:
        ValueError: There is no value.
    """
    return _interval(values, np.mean, seed, n_resamples)


def median_interval(
    values: Sequence[float], *, seed: int = 0, n_resamples: int = N_RESAMPLES
) -> Interval:
    """The median (of repeated timings, say) with its percentile bootstrap interval.

    Raises:
        ValueError: There is no value.
    """
    return _interval(values, np.median, seed, n_resamples)


def stratified(
    families: Sequence[Float[ndarray, "_ column"]],
    of_means: Callable[[Float[ndarray, "... column"]], Any],
    *,
    seed: int,
    n_resamples: int,
) -> Interval:
    """A function of the columns' means over families, with items resampled inside each family.

    All columns of an item are resampled together, so that differences and ratios are paired. No
    interval is given where a family has a single item.
    """
    n = sum(map(len, families))

    def statistic(*drawn: Any, axis: int = -1) -> Any:
        means = [own[i.astype(int)].mean(-2) for own, i in zip(families, drawn, strict=True)]
        return of_means(np.mean(means, axis=0))

    value = float(statistic(*(np.arange(len(own)) for own in families)))
    if min(map(len, families)) < 2:
        return Interval(value=value, lo=None, hi=None, n=n)
    spread = bootstrap(
        [np.arange(len(own)) for own in families],
        statistic,
        n_resamples=n_resamples,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value=value, lo=float(spread.low), hi=float(spread.high), n=n)


def _interval(
    values: Sequence[float], statistic: Callable[..., Any], seed: int, n_resamples: int
) -> Interval:
    if not values:
        raise ValueError("an interval needs at least one value, got none.")
    sample = np.asarray(values, dtype=np.float64)
    value = float(statistic(sample))
    if sample.size == 1:
        return Interval(value=value, lo=None, hi=None, n=1)
    spread = bootstrap(
        (sample,),
        statistic,
        n_resamples=n_resamples,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value=value, lo=float(spread.low), hi=float(spread.high), n=sample.size)
