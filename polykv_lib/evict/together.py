"""Many plans for one layer: equal policies score once, equal layer plans evict once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from polykv_lib.evict.base import EvictionPolicy, Protected
from polykv_lib.evict.controls import FullKV
from polykv_lib.evict.merging import merged
from polykv_lib.evict.plan import Evicted, LayerPlan
from polykv_lib.evict.tallies import tallies_of
from polykv_lib.kv import LayerKV, Scores


@dataclass(eq=False)
class _ScoredOnce:
    """A policy over one observation; its scores are computed when first asked for."""

    policy: EvictionPolicy
    scores: Scores | None = None

    def score(self, layer: LayerKV) -> Scores:
        if self.scores is None:
            self.scores = self.policy.score(layer)
        return self.scores

    def protect(self, budget: int) -> Protected:
        return self.policy.protect(budget)


def counted(layer: LayerKV, policies: Iterable[EvictionPolicy]) -> LayerKV:
    """The observation with the running numbers that these policies score by."""
    tallies = {tally for policy in policies for tally in tallies_of(policy)}
    return replace(layer, tallies={tally: tally.after(layer, None) for tally in tallies})


def evict_each(plans: Sequence[LayerPlan], layer: LayerKV) -> list[Evicted]:
    """What `LayerPlan.evict` returns for each plan; policies are told apart by equality.

    Running numbers that the observation holds (`counted`) are not counted again.
    """
    scored: dict[EvictionPolicy, _ScoredOnce] = {}
    done: dict[LayerPlan, Evicted] = {}
    for plan in plans:
        if plan not in done:
            policy = plan.policy
            if not isinstance(policy, FullKV):
                policy = scored.setdefault(policy, _ScoredOnce(policy))
            kept = replace(plan, policy=policy).keep(layer)
            done[plan] = kept, merged(plan.policy, layer, kept)
    return [done[plan] for plan in plans]
