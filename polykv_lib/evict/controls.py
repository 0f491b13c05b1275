"""What policies are measured against: keeping everything, keeping by chance, structure alone."""

from dataclasses import dataclass

import torch

from polykv_lib.evict.base import EvictionPolicy, Protected, check_counts
from polykv_lib.kv import LayerKV, Scores


@dataclass(frozen=True, kw_only=True)
class FullKV:
    """Keeps every token of its layer, whatever the budget, at prefill and while generating."""

    def score(self, layer: LayerKV) -> Scores:
        """The same for every token."""
        return torch.zeros(layer.keys.shape[:3], device=layer.keys.device)

    def protect(self, budget: int) -> Protected:
        """Nothing: the plan gives such a layer the document's length."""
        return Protected()


@dataclass(frozen=True, kw_only=True)
class Random:
    """Keeps tokens by chance, the same on every machine for a seed."""

    seed: int = 0

    def score(self, layer: LayerKV) -> Scores:
        """Uniform numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(layer.keys.shape[:3], generator=generator).to(layer.keys.device)

    def protect(self, budget: int) -> Protected:
        """Nothing."""
        return Protected()


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """Another policy with the first and last tokens protected, which every policy profits from.

    At prefill and while generating the other policy scores as it does alone.
    """

    policy: EvictionPolicy
    first: int = 4
    last: int = 16

    def __post_init__(self) -> None:
        check_counts(self, first=0, last=0)

    def score(self, layer: LayerKV) -> Scores:
        """The policy's own."""
        return self.policy.score(layer)

    def protect(self, budget: int) -> Protected:
        """At least these, or what the policy itself protects."""
        own = self.policy.protect(budget)
        return Protected(first=max(self.first, own.first), last=max(self.last, own.last))
