"""Score, then keep: every policy ranks tokens, and one function applies the ranking.

A policy sees one layer's observation (keys, values, queries after RoPE), never a model. Scores are
for each KV head; query heads that share one are averaged, unless the policy says otherwise.

A plan's prefill phase applies a policy once, to the whole prompt (or to each chunk of it); its
decode phase applies one after every later forward, to the tokens held and the new ones, of which
the new ones have queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from polykv_lib.kv import KeptTokens, LayerKV, Queries, Scores

KeptIndex = Int[Tensor, "batch head kept"]  # ascending in time; every head keeps equally many


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


@runtime_checkable
class Merging(Protocol):
    """A policy that folds evicted tokens into kept ones instead of dropping them."""

    def merge(self, layer: LayerKV, kept: KeptIndex) -> LayerKV:
        """Keys and values of the kept tokens alone, and the threshold to remember, if any."""
        ...


def parts(policy: EvictionPolicy) -> Iterator[EvictionPolicy]:
    """The policy and those that it is made of."""
    yield policy
    if is_dataclass(policy):
        for field in fields(policy):
            value = getattr(policy, field.name)
            if isinstance(value, EvictionPolicy):
                yield from parts(value)


def merger_of(policy: EvictionPolicy) -> Merging | None:
    """What merges in a policy: itself, or the first of its parts that does."""
    return next((part for part in parts(policy) if isinstance(part, Merging)), None)


def check_counts(policy: object, **least: int) -> None:
    """Refuse arguments that are no whole numbers of at least so many.

    Raises:
        ValueError: names the argument, its value and what it may be.
    """
    for name, smallest in least.items():
        value = getattr(policy, name)
        if not isinstance(value, int) or value < smallest:
            raise ValueError(
                f"{type(policy).__name__}({name}={value!r}); pass a whole number from {smallest}."
            )


def check_odd(policy: object, name: str) -> None:
    """Refuse an even number of neighbours: it has no middle.

    Raises:
        ValueError: names the argument and its value.
    """
    value = getattr(policy, name)
    if value % 2 == 0:
        raise ValueError(f"{type(policy).__name__}({name}={value}); pass an odd number.")


def check_shares(policy: object, *names: str) -> None:
    """Refuse arguments outside 0 … 1.

    Raises:
        ValueError: names the argument and its value.
    """
    for name in names:
        value = getattr(policy, name)
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(
                f"{type(policy).__name__}({name}={value!r}); pass a share of the budget, 0 to 1."
            )


def queries_of(layer: LayerKV, policy: object) -> Queries:
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
    scores = policy.score(layer)[:1].float()
    return tuple(
        kept_of(scores[:, head : head + 1], min(budget, n_tokens), policy.protect(budget))[0, 0]
        for head, budget in enumerate(budgets)
    )


def kept_of(scores: Scores, budget: int, protected: Protected) -> KeptIndex:
    """The protected tokens, then those with the highest scores; ties go to the earlier token."""
    n_tokens = scores.shape[-1]
    first = min(protected.first, budget)
    last = min(protected.last, budget - first)
    free = scores[..., first : n_tokens - last].float().sort(dim=-1, descending=True, stable=True)
    best = free.indices[..., : budget - first - last] + first
    tokens = torch.arange(n_tokens, device=scores.device).expand_as(scores)
    kept = torch.cat([tokens[..., :first], best, tokens[..., n_tokens - last :]], -1)
    return kept.sort(-1).values
