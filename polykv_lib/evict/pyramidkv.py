"""PyramidKV (arXiv:2406.02069): SnapKV's scores, with more tokens in lower layers."""

from typing import Literal

from polykv_lib.evict.budgets import pyramid
from polykv_lib.evict.plan import Plan
from polykv_lib.evict.snapkv import SnapKV


def pyramidkv(
    budget: int,
    n_layers: int,
    *,
    window: int = 8,
    kernel: int = 7,
    pooling: Literal["average", "maximum"] = "maximum",
    beta: float = 20.0,
) -> Plan:
    """A plan of mean `budget` tokens a layer: the window everywhere, the rest in a pyramid.

    At prefill and while generating the policy is `SnapKV`, the pyramid lies in the budgets; the
    authors do not evict while generating (`Plan.decoding` adds a phase). Departures: the total is
    exact (`budgets.pyramid`); a document shorter than twice the mean keeps
    the pyramid, where the authors fall back to equal budgets without saying so.

    Raises:
        ValueError: a budget that does not exceed the window.
    """
    if budget <= window:
        raise ValueError(
            f"budget={budget} tokens, but the window alone takes {window}; raise the budget."
        )
    rest = pyramid(n_layers, (budget - window) * n_layers, beta)
    policy = SnapKV(window=window, kernel=kernel, pooling=pooling)
    return Plan.of(policy, [window + tokens for tokens in rest])
