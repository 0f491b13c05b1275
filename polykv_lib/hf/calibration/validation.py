"""Held-out items under many plans: how close each plan's answers are to the full cache's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from polykv_lib.calibration import EncodedItem, PlanScore
from polykv_lib.evict import Plan
from polykv_lib.hf.baselines import full_cache
from polykv_lib.hf.build import held_cache, share
from polykv_lib.hf.calibration.suffix import (
    answer_logits,
    answer_logits_of_rows,
    answer_nll,
    decoded_logits,
)
from polykv_lib.hf.checks import check_length
from polykv_lib.hf.reading import KeptByPlan, evict_document
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.quantize import FullPrecision, Quantizer

PlanFor: TypeAlias = Plan | Callable[[int], Plan]  # fixed, or made for a number of tokens
LOSSLESS = FullPrecision()
ROWS: Final = 8  # plans that are scored in one batch


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
        if lossless:
            answers = _answers(model, item, layers, made, kept)
        else:
            _refuse_decoding(dict(zip(plans, made, strict=True)))
            pools = (
                share(model, layers, ids, keys=keys, values=values, n_sink=n_sink, kept=own)
                for own in kept
            )
            answers = (answer_logits(model, pool.agent_cache(1), item) for pool in pools)
        for name, own, logits in zip(plans, kept, answers, strict=True):
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
                    kept=sum(len(tokens) for heads in own for tokens in heads),
                    n_tokens=n_tokens,
                )
            )
        if say is not None:
            say(f"{done} of {len(items)} items scored under {len(plans)} plans")
    return scores


def _answers(
    model: PreTrainedModel,
    item: EncodedItem,
    layers: Sequence[LayerKV],
    plans: Sequence[Plan],
    kept: Sequence[KeptByPlan],
) -> Iterator[Float[Tensor, "answer vocab"]]:
    """The answer's logits under each plan; plans that only differ by layer are rows of a batch."""
    for alike, group in groupby(zip(plans, kept, strict=True), key=lambda own: _by_layer(own[0])):
        members = list(group)
        n_rows = ROWS if alike else 1
        for start in range(0, len(members), n_rows):
            made, of_plans = zip(*members[start : start + n_rows], strict=True)
            cache = held_cache(model, made[0], layers, *of_plans)
            if made[0].decode is None:
                yield from answer_logits_of_rows(model, cache, item, len(made))
            else:
                yield decoded_logits(model, cache, item)
                cache.check()


def _by_layer(plan: Plan) -> bool:
    """Whether a plan ends with the prefill and treats a layer's heads alike."""
    return plan.decode is None and all(isinstance(layer.budget, int) for layer in plan.layers)


def _refuse_decoding(plans: Mapping[str, Plan]) -> None:
    for name, plan in plans.items():
        if plan.decode is not None:
            raise ValueError(
                f"plan {name!r} evicts while decoding, but a pool of quantised tokens does not "
                "change; score it with keys and values in full precision."
            )
