"""Numbers a token that add up over time, so that no step looks at more than its new queries."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch.nn import functional

from polykv_lib.evict.attention import column_sums
from polykv_lib.evict.base import EvictionPolicy, parts, queries_of
from polykv_lib.kv import LayerKV, Scores


@runtime_checkable
class Tally(Protocol):
    """How a running number of each token grows. Equal tallies share their numbers."""

    def after(self, layer: LayerKV, before: Scores | None) -> Scores:
        """The numbers after the observation's queries; `before` covers its older tokens."""
        ...


@runtime_checkable
class Tallying(Protocol):
    """A policy that scores by a tally."""

    @property
    def tally(self) -> Tally:
        """What it counts."""
        ...


@dataclass(frozen=True)
class AttentionReceived:
    """Sum of the softmax weights of all queries so far, averaged over a KV head's query heads."""

    def after(self, layer: LayerKV, before: Scores | None) -> Scores:
        """Column sums of the new queries' attention added to the older ones."""
        sums = column_sums(queries_of(layer, self), layer.keys, layer.softmax_scale)
        return sums if before is None else sums + extended(before, sums)


def extended(before: Scores, like: Scores) -> Scores:
    """Numbers of the older tokens, and 0 for those that came since."""
    return functional.pad(before, (0, like.shape[-1] - before.shape[-1]))


def running(policy: Tallying, layer: LayerKV) -> Scores:
    """The policy's numbers: those that a cache kept up to date, or from the queries at hand."""
    queries_of(layer, policy)
    known: Scores | None = layer.tallies.get(policy.tally)
    return policy.tally.after(layer, None) if known is None else known


def tallies_of(policy: EvictionPolicy) -> set[Tally]:
    """The tallies that a policy and its parts score by."""
    return {part.tally for part in parts(policy) if isinstance(part, Tallying)}
