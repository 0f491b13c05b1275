"""Which codec each layer gets: the least summed error under one total of bytes."""

from collections.abc import Sequence
from itertools import pairwise

from polykv_lib.evict.budgets import equal_slopes

Options = Sequence[tuple[int, float]]  # (bytes, error) of each codec, ascending in bytes


def choose_codecs(units: Sequence[Options], total: int) -> list[int]:
    """The option of each unit (a layer's keys, or its values), at equal slopes of the curves.

    Errors are taken to add up over units. Codecs come whole, so that what is left of the total is
    less than the longest step of one unit; of the options that a unit can pay, it gets the best.

    Raises:
        ValueError: the total pays not even for the smallest options, or a unit's options do not
            ascend in bytes.
    """
    if any(a[0] >= b[0] for options in units for a, b in pairwise(options)):
        raise ValueError("a unit's options do not ascend in bytes; list cheaper codecs first.")
    most = sum(options[-1][0] for options in units)
    budgets = equal_slopes(units, min(total, most))
    return [
        min(
            (o for o, (cost, _) in enumerate(options) if cost <= budget),
            key=lambda o: options[o][1],
        )
        for options, budget in zip(units, budgets, strict=True)
    ]
