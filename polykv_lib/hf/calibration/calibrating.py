"""A few texts -> a plan: `calibrate`, and the measurements behind it, kept by fingerprint."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polykv_lib import sources
from polykv_lib.calibration import (
    Calibration,
    EncodedItem,
    Measurements,
    Phase,
    Recipe,
    both_phases,
    from_json,
    solve,
    to_json,
)
from polykv_lib.calibration.solve import BudgetSignal, PatternSignal
from polykv_lib.evict import H2O, TOVA, EvictionPolicy, KeyDiff, Plan, SnapKV
from polykv_lib.evict.controls import Guarded
from polykv_lib.hf.attention import prepare
from polykv_lib.hf.calibration.items import items_of
from polykv_lib.hf.calibration.single_layer import Settings, measure_item
from polykv_lib.hf.models import model_fingerprint
from polykv_lib.native import cache_folder

# Every candidate with 4 sinks and 16 recent tokens protected, inside its budget.
CANDIDATES: Final[tuple[EvictionPolicy, ...]] = tuple(
    Guarded(policy=policy) for policy in (H2O(recent=0.0), TOVA(), SnapKV(window=16), KeyDiff())
)
FRACTIONS: Final = (0.06, 0.12, 0.25, 0.4, 0.6, 0.8)  # of the context: points of an error curve


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str | EncodedItem],
    *,
    budget: int | float,
    n_tokens: int | None = None,
    pattern_signal: PatternSignal = "error",
    budget_signal: BudgetSignal = "gain_curve",
    level: Literal["layer", "head"] = "layer",
    phases: Sequence[Phase] = ("prefill",),
    inverse_patterns: bool = False,
    inverse_budgets: bool = False,
    policies: Sequence[EvictionPolicy] = CANDIDATES,
    activation: Literal["o_proj", "heads"] = "o_proj",
    say: Callable[[str], None] | None = None,
) -> Plan:
    """Each layer's policy and budget from a few texts, none of which should be a test text.

    About 12 items do, at least half of them retrieval (a needle among keys, a chain, a sentence to
    quote): plain text alone does not show which layers retrieve. Nothing is drawn by chance, so the
    same texts and settings give the same plan, byte for byte.

    Args:
        model: any supported model; prepared here if it was not.
        tokenizer: of the model, for the plain texts.
        texts: items, or plain texts. Of a plain text the first 1,024 tokens are used, and the last
            of those (64, or a quarter) are the answer.
        budget: mean tokens for each layer and KV head, or (a float) a fraction of the document.
        n_tokens: length of the documents that the plan is for; the items' mean unless given. A
            plan holds numbers of tokens, so longer documents keep a smaller fraction.
        pattern_signal: what chooses policies (`calibration.Recipe`).
        budget_signal: what shares out the budgets.
        level: budgets for layers, or for each KV head.
        phases: `prefill`, `decode` or both. Each is measured alone, everything else full, and gets
            the same mean budget: at prefill tokens of the document, in decode tokens that a layer
            holds at most after each step. Without `prefill` nothing is evicted before the first
            new token; without `decode` nothing afterwards.
        inverse_patterns: the worst policies by the signal: a control.
        inverse_budgets: the budgets in the opposite order: a control.
        policies: the candidates.
        activation: what cosine and error compare, by default the attention's output after o_proj.
        say: told about progress and time left.

    Raises:
        ValueError: no text, an empty one, one too long for the model, or an impossible budget.
    """
    recipe = Recipe(
        pattern_signal=pattern_signal,
        budget_signal=budget_signal,
        level=level,
        inverse_patterns=inverse_patterns,
        inverse_budgets=inverse_budgets,
    )
    if not phases or not {*phases} <= {"prefill", "decode"}:
        raise ValueError(f"phases={phases!r}; pass prefill, decode or both, as a list.")
    made = {
        phase: run(
            model,
            tokenizer,
            texts,
            budget=budget,
            n_tokens=n_tokens,
            phase=phase,
            recipe=recipe,
            policies=policies,
            activation=activation,
            say=say,
        ).plan
        for phase in dict.fromkeys(phases)
    }
    return both_phases(made["prefill"], made["decode"]) if len(made) == 2 else made[phases[0]]


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str | EncodedItem],
    *,
    budget: int | float,
    n_tokens: int | None = None,
    phase: Phase = "prefill",
    recipe: Recipe | None = None,
    policies: Sequence[EvictionPolicy] = CANDIDATES,
    activation: Literal["o_proj", "heads"] = "o_proj",
    say: Callable[[str], None] | None = None,
) -> Calibration:
    """The plan of `calibrate` with its signals, its curves and the ids of its texts."""
    recipe = recipe or Recipe()
    items = items_of(tokenizer, texts)
    length = round(fmean(len(i.context_ids) for i in items)) if n_tokens is None else n_tokens
    check(budget, length, policies)
    target = budget / length if isinstance(budget, Integral) else float(budget)
    asked = {recipe.budget_signal, None if recipe.policy else recipe.pattern_signal}
    measured = measure(
        model,
        items,
        target=target,
        phase=phase,
        policies=policies,
        fractions=points_for(target),
        activation=activation,
        single_layer=bool(asked & {"gain_curve", "ppl"}),
        say=say,
    )
    return solve(measured, recipe, n_tokens=length)


def check(budget: object, n_tokens: int, policies: Sequence[EvictionPolicy]) -> None:
    """Refuse a budget that is none or more than the documents, and policies that are none."""
    if not isinstance(budget, Real):
        raise ValueError(
            f"budget={budget!r}; pass mean tokens for each layer and KV head, or a float for a "
            "fraction of the document."
        )
    if n_tokens < 1 or (isinstance(budget, Integral) and int(budget) > n_tokens):
        raise ValueError(
            f"budget={budget} for documents of {n_tokens} tokens; pass at most their length, which "
            "is n_tokens if given, else the mean of the texts' contexts."
        )
    for policy in policies:
        if isinstance(policy, type) or not isinstance(policy, EvictionPolicy):
            raise ValueError(f"policy {policy!r}; pass policies such as H2O() or SnapKV().")


def points_for(target: float) -> tuple[float, ...]:
    """`FRACTIONS`, and a quarter and a half of a target if budgets would lie below all of them."""
    small = (part for part in (target / 4, target / 2) if part < FRACTIONS[0])
    return (*small, *FRACTIONS)


def measure(
    model: PreTrainedModel,
    items: Sequence[EncodedItem],
    *,
    target: float,
    phase: Phase = "prefill",
    policies: Sequence[EvictionPolicy] = CANDIDATES,
    fractions: Sequence[float] = FRACTIONS,
    activation: Literal["o_proj", "heads"] = "o_proj",
    single_layer: bool = True,
    say: Callable[[str], None] | None = None,
    folder: Path | None = None,
) -> Measurements:
    """Every signal of every item, from which `calibration.solve` makes any number of plans.

    What the same code measured before for the same model, items and settings is read from the
    user's cache folder (or `folder`). `phase` is as in `calibrate`, `fractions` are best those of
    `points_for`.

    Raises:
        ValueError: a target that is no fraction, no item, no candidate, or too long an item.
    """
    if not 0 < target <= 1:
        raise ValueError(f"the budget is {target:.3g} of the context; pass a fraction in (0, 1].")
    if not items or not policies:
        raise ValueError(f"{len(items)} items and {len(policies)} policies; pass at least one.")
    settings = Settings(
        policies=tuple(policies),
        fractions=tuple(sorted({*fractions, target})),
        target=target,
        phase=phase,
        activation=activation,
        single_layer=single_layer,
    )
    prepare(model)
    path = (
        folder or cache_folder() / "calibration"
    ) / f"{_fingerprint(model, items, settings)}.json"
    if path.is_file():
        measured = from_json(path.read_text(encoding="utf-8"))
    else:
        start = time.perf_counter()
        measured = ()
        for item in items:
            measured += (measure_item(model, item, settings),)
            if say is not None:
                left = (time.perf_counter() - start) / len(measured) * (len(items) - len(measured))
                say(f"{len(measured)} of {len(items)} items measured, about {left:.0f} s left")
        _write(path, to_json(measured))
    return Measurements(
        policies=settings.policies,
        fractions=settings.fractions,
        target=target,
        items=measured,
        phase=phase,
    )


def _fingerprint(model: PreTrainedModel, items: Sequence[EncodedItem], settings: Settings) -> str:
    code = sources.digest("evict", "calibration", "hf")
    covered = [code, model_fingerprint(model), [asdict(item) for item in items], repr(settings)]
    return hashlib.sha256(json.dumps(covered).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
