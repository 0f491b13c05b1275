"""Held-out items under many plans: how close each plan's answers are to the full cache's."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from polykv_lib.calibration import EncodedItem, PlanScore
from polykv_lib.evict import Plan
from polykv_lib.hf.baselines import full_cache
from polykv_lib.hf.build import evict_document, held_cache, share
from polykv_lib.hf.checks import check_length
from polykv_lib.hf.suffix import answer_logits, answer_nll
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.quantize import FullPrecision, Quantizer

PlanFor: TypeAlias = Plan | Callable[[int], Plan]  # fixed, or made for a number of tokens
LOSSLESS = FullPrecision()


@torch.no_grad()
def evaluate_plans(
    model: PreTrainedModel,
    items: Sequence[EncodedItem],
    plans: Mapping[str, PlanFor],
    *,
    keys: Quantizer = LOSSLESS,
    values: Quantizer = LOSSLESS,
    n_sink: int = 4,
    say: Callable[[str], None] | None = None,
) -> list[PlanScore]:
    """Each item's answer under each plan, scored by teacher forcing; one prefill serves all plans.

    Under a plan with a decode phase the answer is fed token by token. Its first token is predicted
    before that phase evicts anything.

    Args:
        model: a prepared model.
        items: held out, of any length; the question is read after the eviction.
        plans: by name; a function gets the item's context length, and returns its plan.
        keys: codec of the kept keys.
        values: codec of the kept values.
        n_sink: first tokens held in full precision, where a plan keeps them.
        say: told after each item.

    Returns:
        Rows in the order of items, then of plans.

    Raises:
        ValueError: an item too long for the model, a plan of another model, or a codec beside a
            plan with a decode phase.
    """
    lossless = keys == values == LOSSLESS
    scores = []
    for done, item in enumerate(items, 1):
        n_tokens = len(item.context_ids)
        check_length(model, n_tokens + len(item.tail_ids), f"item {item.id!r}")
        ids = torch.tensor([item.context_ids])
        made = [plan if isinstance(plan, Plan) else plan(n_tokens) for plan in plans.values()]
        layers, kept = evict_document(model, ids, made)
        targets = torch.tensor(item.answer_ids, device=model.device)
        full = answer_logits(model, full_cache(layers), item)
        for name, plan, of_plan in zip(plans, made, kept, strict=True):
            if lossless:
                cache = held_cache(model, plan, layers, of_plan)
            elif plan.decode is None:
                pool = share(
                    model, layers, ids, keys=keys, values=values, n_sink=n_sink, kept=of_plan
                )
                cache = pool.agent_cache(1)
            else:
                raise ValueError(
                    f"plan {name!r} evicts while decoding, but a pool of quantised tokens does "
                    "not change; score it with keys and values in full precision."
                )
            held = sum(map(sum, cache.kept_per_head))
            logits = answer_logits(model, cache, item, stepwise=plan.decode is not None)
            if plan.decode is not None:
                cache.check()
            scores.append(
                PlanScore(
                    item=item.id,
                    family=item.family,
                    plan=name,
                    kl=float(kl_nats(full, logits).mean()),
                    nll=answer_nll(logits, item),
                    full_nll=answer_nll(full, item),
                    exact=bool((logits.argmax(-1) == targets).all()),
                    full_exact=bool((full.argmax(-1) == targets).all()),
                    kept=held,
                    n_tokens=n_tokens,
                )
            )
        if say is not None:
            say(f"{done} of {len(items)} items scored under {len(plans)} plans")
    return scores
