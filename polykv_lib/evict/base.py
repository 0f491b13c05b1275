"""Score, then keep: every policy ranks tokens, and one function applies the ranking.

A policy sees one layer's observation (keys, values, queries after RoPE), never a model. Scores are
for each KV head; query heads that share one are averaged, unless the policy says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from polykv_lib.kv import KeptTokens, LayerKV, Queries, Scores


@dataclass(frozen=True)
class Protected:
    """Tokens that are kept whatever their score; they count towards the budget."""

    first: int = 0
    last: int = 0


@runtime_checkable
class EvictionPolicy(Protocol):
    """Says how much each token matters; never touches a cache."""

    def score(self, layer: LayerKV) -> Scores:
        """One number for each KV head and token; higher is kept."""
        ...

    def protect(self, budget: int) -> Protected:
        """The tokens that a head with this budget keeps in any case."""
        ...


def queries_of(layer: LayerKV, policy: EvictionPolicy) -> Queries:
    """The observation's queries.

    Raises:
        ValueError: the observation has none.
    """
    if layer.queries is None:
        raise ValueError(
            f"{type(policy).__name__} scores by attention, but the observation holds no queries; "
            "pass LayerKV(queries=…), or use a key-based policy such as KeyDiff."
        )
    return layer.queries


def keep(policy: EvictionPolicy, layer: LayerKV, budgets: Sequence[int]) -> tuple[KeptTokens, ...]:
    """The tokens that each KV head keeps, in the order in which they were written.

    Args:
        policy: ranks the tokens; ties go to the earlier token.
        layer: one document's observation (batch 1).
        budgets: tokens for each KV head; one that exceeds the document keeps all of it.

    Raises:
        ValueError: a budget below 1, or not one budget for each head.
    """
    _, n_heads, n_tokens, _ = layer.keys.shape
    if len(budgets) != n_heads or min(budgets) < 1:
        raise ValueError(
            f"budgets {list(budgets)} for {n_heads} KV heads; pass one positive number of tokens "
            "for each head. For a fraction use round(keep_fraction * n_tokens)."
        )
    if min(budgets) >= n_tokens:
        everything = torch.arange(n_tokens, device=layer.keys.device)
        return (everything,) * n_heads
    scores = policy.score(layer)[0].float()
    return tuple(
        _keep_head(scores[head], min(budget, n_tokens), policy.protect(budget))
        for head, budget in enumerate(budgets)
    )


def _keep_head(scores: torch.Tensor, budget: int, protected: Protected) -> KeptTokens:
    n_tokens = len(scores)
    first = min(protected.first, budget)
    last = min(protected.last, budget - first)
    chosen = torch.zeros(n_tokens, dtype=torch.bool, device=scores.device)
    chosen[:first] = True
    chosen[n_tokens - last :] = True
    free = torch.where(chosen, -torch.inf, scores).sort(descending=True, stable=True).indices
    chosen[free[: budget - first - last]] = True
    return chosen.nonzero()[:, 0]
