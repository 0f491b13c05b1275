"""Times of calls that are compared: interleaved, warmed up, waited for."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from polykv_lib.metrics.intervals import Interval, median_interval

K = TypeVar("K", bound=Hashable)


def interleaved_ms(
    calls: Mapping[K, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[K, list[float]]:
    """Milliseconds of each call in each round: every call's turn comes once a round.

    The first round warms up and is not counted. So that a drift of the machine meets all alike,
    calls that are compared belong into one call of this function.
    """
    times_ms: dict[K, list[float]] = {name: [] for name in calls}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            synchronize(device)
            start_s = time.perf_counter()
            call()
            synchronize(device)
            times_ms[name].append(1000 * (time.perf_counter() - start_s))
    return {name: times[1:] for name, times in times_ms.items()}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def per_second(amount: int | float, ms: Interval) -> Interval:
    """`amount` done in so many milliseconds, as a rate; the bounds change places."""
    return Interval(
        value=1000 * amount / ms.value,
        lo=None if ms.hi is None else 1000 * amount / ms.hi,
        hi=None if ms.lo is None else 1000 * amount / ms.lo,
        n=ms.n,
    )


def ratio(of: Sequence[float], to: Sequence[float]) -> Interval:
    """The median of times over other times, round by round, so that a slow round meets both."""
    return median_interval([one / other for one, other in zip(of, to, strict=True)])


@contextmanager
def torch_threads(n: int) -> Iterator[int]:
    """Torch on `n` CPU threads inside (0: as many as it has); yields how many those are."""
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
