"""Measurements -> a plan: which policy each layer gets, and how many tokens."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from polykv_lib.calibration.allocate import Budgets, Choice, Curve, Problem, opposite
from polykv_lib.calibration.measured import Measurements
from polykv_lib.evict import EvictionPolicy, FullKV, LayerPlan, Plan

PatternSignal: TypeAlias = Literal["error", "cosine", "ppl"]
BudgetSignal: TypeAlias = Literal["gain_curve", "curve", "entropy", "ppl", "uniform"]
Signals: TypeAlias = dict[str, Float[ndarray, "..."]]
ROUNDS = 4  # of budgets for policies and policies for budgets, where heads share a policy


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How measurements become a plan; the defaults are this library's own way.

    Patterns: `cosine` (the largest) and `ppl` (the least rise) are those of arXiv:2606.15157;
    `error` takes the policy of least output error at the layer's budget. Budgets: `entropy` and
    `ppl` are that paper's, shared out by its equation 6; `curve` minimises the sum of the output
    errors, and `gain_curve` weighs each layer's by its gain: single-layer KL / output error.
    """

    pattern_signal: PatternSignal = "error"
    budget_signal: BudgetSignal = "gain_curve"
    policy: EvictionPolicy | None = None  # this one in every layer, instead of a pattern signal
    level: Literal["layer", "head"] = "layer"
    inverse_patterns: bool = False  # the worst policy by the signal instead of the best
    inverse_budgets: bool = False  # the same budgets, handed out in the opposite order
    floor: float = 0.06  # least share of the document for each unit, at most a quarter of the mean

    def __post_init__(self) -> None:
        for name, known in (
            ("pattern_signal", get_args(PatternSignal)),
            ("budget_signal", get_args(BudgetSignal)),
            ("level", ("layer", "head")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}; choose one of: {', '.join(known)}."
                )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A plan, and all that it was made from."""

    plan: Plan
    recipe: Recipe
    n_tokens: int  # length of the documents that the plan is for
    signals: Signals
    curves: tuple[Curve, ...]  # of each unit, as they were solved; none where signals share out
    item_ids: tuple[str, ...]


def solve(
    measured: Measurements,
    recipe: Recipe | None = None,
    *,
    n_tokens: int,
    budget: int | None = None,
) -> Calibration:
    """The plan for documents of a length.

    Args:
        measured: what the passes over the model returned.
        recipe: which signals decide; by default output error and gain x error curve.
        n_tokens: tokens of the documents; curves were measured at fractions of theirs.
        budget: mean tokens for each layer and KV head; the measurements' target unless given.

    Returns:
        A plan whose total is exactly that of a uniform plan with this budget. No unit gets fewer
        tokens than the floor (or than the policies protect, or than the mean, if that is less),
        none more than the document has. What was measured while decoding gives the decode phase,
        over a prefill that keeps everything; `both_phases` joins it to another prefill.

    Raises:
        ValueError: a budget of no token or more than the document, a signal that was not measured,
            or a policy that was not a candidate.
    """
    recipe = recipe or Recipe()
    mean = round(measured.target * n_tokens) if budget is None else budget
    if not 1 <= mean <= n_tokens:
        raise ValueError(
            f"budget={mean} tokens a head for documents of {n_tokens}; pass 1 to {n_tokens}."
        )
    found = signals(measured)
    problem = problem_of(measured, recipe, found, n_tokens, mean)
    budgets, choice, curves = spend(measured, problem, recipe, found)
    plan = plan_of(measured, recipe, budgets, choice)
    if measured.phase == "decode":
        plan = replace(Plan.uniform(FullKV(), n_tokens, len(plan.layers)), decode=plan.layers)
    return Calibration(
        plan=plan,
        recipe=recipe,
        n_tokens=n_tokens,
        signals=found,
        curves=curves,
        item_ids=tuple(item.item for item in measured.items),
    )


def plan_of(measured: Measurements, recipe: Recipe, budgets: Budgets, choice: Choice) -> Plan:
    """The plan with these budgets and policies."""
    per_head = recipe.level == "head"
    layers = (
        LayerPlan(policy=measured.policies[index], budget=tuple(own) if per_head else own[0])
        for own, index in zip(budgets.tolist(), choice.tolist(), strict=True)
    )
    return Plan(layers=tuple(layers))


def both_phases(prefill: Plan, decode: Plan) -> Plan:
    """The prefill of one plan with the decode phase of another."""
    return replace(prefill, decode=decode.decode)


def signals(measured: Measurements) -> Signals:
    """Every signal that the measurements allow, by name.

    `cosine`, `kl` (nats) and `ppl` (rise of the answers' perplexity) are [layer, policy];
    `entropy`, `ppl_max` (the most that any policy costs) and `gain` are [layer].

    Departure from arXiv:2606.15157: the paper averages the attention over examples before it takes
    the entropy; contexts differ in length here, so the entropies are averaged.
    """
    at_target = measured.fractions.index(measured.target)
    found = {
        "cosine": measured.mean("cosine")[..., at_target],
        "entropy": measured.mean("entropy"),
    }
    if all(item.nll is not None for item in measured.items):
        rise = np.exp(measured.mean("nll")) - np.exp(measured.mean("full_nll"))
        kl = measured.mean("kl")
        error = measured.error_at_target.sum(1)
        gain = np.divide(kl.sum(1), error, out=np.zeros_like(error), where=error > 0)
        found |= {"ppl": rise, "ppl_max": rise.max(1), "kl": kl, "gain": gain}
    return found


def problem_of(
    measured: Measurements, recipe: Recipe, found: Signals, n_tokens: int, mean: int
) -> Problem:
    """The units, their errors and their weights."""
    per_head = recipe.level == "head"
    errors = measured.mean("head_error") if per_head else measured.mean("error")[:, None]
    weighted = recipe.budget_signal == "gain_curve"
    # What a policy protects at the smallest budget, it protects at every one.
    guarded = max(p.first + p.last for p in (q.protect(1) for q in measured.policies))
    return Problem(
        errors=np.pad(errors, [(0, 0)] * 3 + [(0, 1)]),
        points=np.array([*measured.fractions, 1.0]),
        weights=_signal(found, "gain") if weighted else np.ones(len(errors)),
        n_tokens=n_tokens,
        mean=mean,
        floor=min(mean, max(1, round(min(recipe.floor * n_tokens, mean / 4)), guarded)),
    )


def spend(
    measured: Measurements, problem: Problem, recipe: Recipe, found: Signals
) -> tuple[Budgets, Choice, tuple[Curve, ...]]:
    """Budgets, policies, and the curves that were solved, if any."""
    fixed = _fixed(measured, recipe, found)
    worst = recipe.inverse_patterns
    curves: tuple[Curve, ...] = ()
    if recipe.budget_signal in ("gain_curve", "curve"):
        envelope = problem.errors.max(2) if worst else problem.errors.min(2)
        budgets, curves = problem.by_curves(envelope if fixed is None else problem.of(fixed))
        if fixed is None and recipe.level == "head":  # no envelope: a layer's heads share a policy
            choice = problem.best(budgets, worst=worst)
            for _ in range(ROUNDS):
                budgets, curves = problem.by_curves(problem.of(choice))
                before, choice = choice, problem.best(budgets, worst=worst)
                if (choice == before).all():
                    break
    elif recipe.budget_signal == "uniform":
        budgets = np.full(problem.errors.shape[:2], problem.mean)
    else:
        name = "entropy" if recipe.budget_signal == "entropy" else "ppl_max"
        budgets = problem.by_shares(_signal(found, name))
    if recipe.inverse_budgets:
        budgets = opposite(budgets)
    return budgets, problem.best(budgets, worst=worst) if fixed is None else fixed, curves


def _fixed(measured: Measurements, recipe: Recipe, found: Signals) -> Choice | None:
    """Each layer's policy, where it does not depend on the budget."""
    if recipe.policy is not None:
        if recipe.policy not in measured.policies:
            known = ", ".join(map(repr, measured.policies))
            raise ValueError(f"{recipe.policy!r} was not measured; choose one of: {known}.")
        return np.full(len(found["entropy"]), measured.policies.index(recipe.policy))
    if recipe.pattern_signal == "error":
        return None
    scores = found["cosine"] if recipe.pattern_signal == "cosine" else -_signal(found, "ppl")
    return scores.argmin(1) if recipe.inverse_patterns else scores.argmax(1)


def _signal(found: Signals, name: str) -> Float[ndarray, "..."]:
    if name not in found:
        raise ValueError(
            f"{name!r} needs a pass over the model for each layer and policy, and none were made; "
            "measure with single_layer=True."
        )
    return found[name]
