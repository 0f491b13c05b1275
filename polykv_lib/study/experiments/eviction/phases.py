"""Policies routed at prefill, while decoding, or both: the phases of arXiv:2606.15157, Table 3.

Answers of 48 to 64 tokens leave the decode phase something to evict: articles that go on, and
passages of the context that are quoted. Everything is read and scored token by token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from polykv_lib.calibration import EncodedItem, Measurements, Recipe, both_phases
from polykv_lib.calibration.solve import PatternSignal
from polykv_lib.evict import FullKV, Plan
from polykv_lib.hf.calibration import measure
from polykv_lib.study.experiments.common import Say
from polykv_lib.study.experiments.eviction.items import Asked, Kept, PlanFor
from polykv_lib.study.experiments.eviction.variants import Variant, direction, solved

PHASES: Final = ("prefill", "decode", "both")
PATTERNS: Final[tuple[PatternSignal, ...]] = ("cosine", "ppl")
N_CUE: Final = 12  # tokens of a passage that are given
N_QUOTED: Final = 48  # tokens after them that are to follow


def long_answers(asked: Sequence[Asked]) -> list[EncodedItem]:
    """The items whose answers have two tokens at least, and a passage to quote from each context.

    A quotation repeats the first tokens of a passage; those that follow it are the answer.
    """
    items = [a.encoded for a in asked if len(a.encoded.answer_ids) > 1]
    long = [item for item in items if len(item.context_ids) > 4 * (N_CUE + N_QUOTED)]
    return [*items, *map(quotation, long)]


def quotation(item: EncodedItem) -> EncodedItem:
    """A passage from a third of the item's context on, to be quoted from its first tokens."""
    start = len(item.context_ids) // 3
    stop = start + N_CUE
    return EncodedItem(
        id=f"{item.id}/quotation",
        family="quotation",
        context_ids=item.context_ids,
        question_ids=item.context_ids[start:stop],
        answer_ids=item.context_ids[stop : stop + N_QUOTED],
    )


def measured(
    model: Any, items: Sequence[EncodedItem], say: Say, **settings: Any
) -> dict[str, Measurements]:
    """What single layers cost, by phase."""
    return {
        "prefill": measure(model, items, phase="prefill", say=say, **settings),
        "decode": measure(model, items, phase="decode", say=say, **settings),
    }


def variants(
    of: Mapping[str, Measurements], best: str, uniform: PlanFor, kept: Kept
) -> Iterator[Variant]:
    """By phase: the best single policy first, then each signal's routing and its opposite."""
    for phase in PHASES:
        yield Variant(
            group="single",
            signal=best,
            direction="uniform",
            phase=phase,
            plan=_in_phase({"prefill": uniform, "decode": _decoding(uniform)}, phase),
        )
        for pattern in PATTERNS:
            recipe = Recipe(pattern_signal=pattern, budget_signal="uniform")
            for own in (recipe, replace(recipe, inverse_patterns=True)):
                plans = {name: solved(m, own, kept) for name, m in of.items()}
                yield Variant(
                    group="policies",
                    signal=pattern,
                    direction=direction(own),
                    phase=phase,
                    plan=_in_phase(plans, phase),
                )


def _in_phase(plans: Mapping[str, PlanFor], phase: str) -> PlanFor:
    if phase != "both":
        return plans[phase]
    return lambda n_tokens: both_phases(plans["prefill"](n_tokens), plans["decode"](n_tokens))


def _decoding(plan: PlanFor) -> PlanFor:
    """The same layers while decoding, over a prefill that keeps everything."""

    def later(n_tokens: int) -> Plan:
        layers = plan(n_tokens).layers
        return replace(Plan.uniform(FullKV(), n_tokens, len(layers)), decode=layers)

    return later
