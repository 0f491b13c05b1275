"""Plans that share a layer's observation keep what each keeps alone, for one scoring a policy."""

from typing import Any

import torch

from polykv_lib.evict import H2O, KeyDiff, Plan, evict_each
from polykv_lib.kv import LayerKV, Scores


def test_equal_policies_score_once_and_every_plan_keeps_what_it_keeps_alone() -> None:
    torch.manual_seed(0)
    layer = LayerKV(
        keys=torch.randn(1, 2, 40, 8),
        values=torch.randn(1, 2, 40, 8),
        queries=torch.randn(1, 4, 40, 8),
    )
    calls = []

    class Counting(H2O):
        def score(self, layer: LayerKV) -> Scores:
            calls.append(layer)
            return super().score(layer)

    def plans(h2o: type[H2O]) -> list[Any]:
        made = [Plan.uniform(policy, n, 1) for n in (10, 20) for policy in (h2o(), KeyDiff())]
        return [plan.layers[0] for plan in made]

    together = evict_each(plans(Counting), layer)
    for (kept, _), own in zip(together, plans(H2O), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, own.keep(layer), strict=True))
    assert len(calls) == 1
