"""What policies are measured against: keeping everything, keeping by chance, structure alone."""

from dataclasses import dataclass

import torch

from polykv_lib.evict.base import EvictionPolicy, Protected, check_counts
from polykv_lib.evict.chance import mixed, uniform
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
    """Keeps tokens by chance.

    A token's number is a hash of its position, the signs of its key and the seed: layers, heads and
    documents differ, and the number stays the same at every step of a cache that generates.
    """

    seed: int = 0

    def score(self, layer: LayerKV) -> Scores:
        """Uniform numbers, as far apart as 24 bits tell."""
        keys, positions = layer.keys, layer.positions
        if positions is None:
            positions = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        salts = mixed(torch.arange(1, keys.shape[3] + 1, device=keys.device))
        signs = mixed(((keys > 0) * salts).sum(-1))
        return uniform(positions + signs, self.seed).float()

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
