"""Measurements made by hand -> plans that can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polykv_lib.calibration import (
    EncodedItem,
    Measured,
    Measurements,
    PlanScore,
    Recipe,
    by_family,
    choose,
    compare,
    from_json,
    macro_kl,
    regrets,
    shuffled,
    signals,
    solve,
    tail_output,
    to_json,
)
from polykv_lib.evict import H2O, KeyDiff, LayerPlan, Plan, SnapKV
from polykv_lib.kv import LayerKV

POINTS = (0.1, 0.25, 0.5)
CANDIDATES = (H2O(recent=0.0), KeyDiff())


def measurements(
    errors,
    kl=None,
    *,
    policies=CANDIDATES,
    head_errors=None,
    cosine=None,
    entropy=None,
    nll=None,
    target=0.25,
):
    """One item; errors [layer policy point]."""
    errors = np.array(errors, dtype=float)
    layers = len(errors)
    heads = np.stack([errors / 2] * 2, 1) if head_errors is None else np.array(head_errors)
    kl = None if kl is None else np.array(kl, dtype=float)
    item = Measured(
        item="one",
        family="needle",
        n_tokens=100,
        full_nll=1.0,
        entropy=np.arange(1.0, layers + 1) if entropy is None else np.array(entropy),
        cosine=np.zeros_like(errors) if cosine is None else at_every_point(cosine),
        error=errors,
        head_error=heads,
        nll=(kl if nll is None else np.array(nll)) if kl is not None else None,
        kl=kl,
    )
    return Measurements(policies=policies, fractions=POINTS, target=target, items=(item,))


def at_every_point(cosine):
    return np.repeat(np.array(cosine)[..., None], len(POINTS), axis=-1)


FALLING = [[0.8, 0.5, 0.3], [0.9, 0.6, 0.2]]  # H2O is better with few tokens, KeyDiff with many


def test_a_layer_with_a_hundredfold_gain_gets_the_whole_document():
    # Layer 1 costs 100 times as much KL for the same output error: its curve is the steepest.
    found = solve(measurements([FALLING] * 4, [[0.1] * 2, [10.0] * 2, [0.1] * 2, [0.1] * 2]),
                  n_tokens=100)  # fmt: skip
    budgets = [layer.budget for layer in found.plan.layers]
    assert budgets[1] == 82  # 4 x 25 less the floor of 6 for the others
    assert budgets == [6, 82, 6, 6]
    assert found.signals["gain"] == pytest.approx([0.2 / 1.1, 20 / 1.1, 0.2 / 1.1, 0.2 / 1.1])
    assert found.item_ids == ("one",)


def test_policies_are_the_best_at_the_layers_own_budget():
    plan = solve(measurements([FALLING] * 4, [[0.1] * 2, [10.0] * 2, [0.1] * 2, [0.1] * 2]),
                 n_tokens=100).plan  # fmt: skip
    assert [layer.policy for layer in plan.layers] == [
        H2O(recent=0.0), KeyDiff(), H2O(recent=0.0), H2O(recent=0.0)
    ]  # fmt: skip


def at(tokens, curve, n_tokens=100):
    return np.interp(tokens / n_tokens, [*POINTS, 1.0], [*curve, 0.0])


@given(
    drops=st.lists(st.lists(st.floats(0.01, 1), min_size=4, max_size=4), min_size=2, max_size=6),
    gains=st.lists(st.floats(0.1, 50), min_size=6, max_size=6),
)
def test_an_equal_slope_plan_is_no_worse_than_a_uniform_one(drops, gains):
    widths = np.diff([*POINTS, 1.0])
    convex = [np.sort(own[:3])[::-1] * widths for own in drops]  # falling slopes
    errors = np.array([[np.cumsum(steps[::-1])[::-1]] for steps in convex])
    kl = np.array(gains[: len(drops)])[:, None] * errors[:, :, 1]
    measured = measurements(errors, kl, policies=(KeyDiff(),))
    found = solve(measured, n_tokens=100)
    budgets = [layer.budget for layer in found.plan.layers]
    assert sum(budgets) == 25 * len(drops)
    costs = [
        sum(g * at(b, e[0]) for g, b, e in zip(gains, given, errors, strict=False))
        for given in (budgets, [25] * len(drops))
    ]
    assert costs[0] <= costs[1] + 1e-9


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("pattern", ["error", "cosine", "ppl"])
@pytest.mark.parametrize("budget_signal", ["gain_curve", "curve", "entropy", "ppl", "uniform"])
@pytest.mark.parametrize("inverse", [False, True])
def test_every_recipe_spends_what_a_uniform_plan_does(level, pattern, budget_signal, inverse):
    generator = np.random.default_rng(0)
    errors = np.sort(generator.random((5, 2, 3)))[..., ::-1]
    measured = measurements(errors, generator.random((5, 2)), cosine=generator.random((5, 2)))
    recipe = Recipe(
        pattern_signal=pattern, budget_signal=budget_signal, level=level,
        inverse_patterns=inverse, inverse_budgets=inverse,
    )  # fmt: skip
    for n_tokens in (7, 100, 1001):
        plan = solve(measured, recipe, n_tokens=n_tokens).plan
        assert plan.total(2) == 5 * 2 * round(0.25 * n_tokens)
        budgets = [b for layer in plan.layers for b in layer.budgets(2)]
        assert max(budgets) <= n_tokens
        assert min(budgets) >= min(round(0.25 * n_tokens), max(1, round(0.06 * n_tokens)))
        assert isinstance(plan.layers[0].budget, tuple) == (level == "head")


def test_shares_are_the_papers_and_end_at_the_document():
    measured = measurements([FALLING] * 2, [[1.0, 3.0], [2.0, 9.0]], nll=[[1.0, 2.0], [1.0, 4.0]])
    recipe = Recipe(budget_signal="ppl", floor=0.1)
    rise = np.exp([2.0, 4.0]) - np.exp(1.0)  # the most that any policy costs
    extra = 60 * rise[0] / rise.sum()
    budgets = [
        layer.budget for layer in solve(measured, recipe, n_tokens=100, budget=40).plan.layers
    ]
    assert budgets == [10 + round(extra), 10 + round(60 - extra)]
    budgets = [
        layer.budget for layer in solve(measured, recipe, n_tokens=100, budget=90).plan.layers
    ]
    assert budgets == [80, 100]


def test_entropy_gives_more_where_attention_is_spread():
    measured = measurements([FALLING] * 3, entropy=[1.0, 3.0, 2.0])
    recipe = Recipe(budget_signal="entropy", floor=0.01)
    forward = [layer.budget for layer in solve(measured, recipe, n_tokens=100).plan.layers]
    assert forward == [13, 37, 25]
    inverse = replace(recipe, inverse_budgets=True)
    backward = [layer.budget for layer in solve(measured, inverse, n_tokens=100).plan.layers]
    assert backward == [37, 13, 25]


def test_patterns_follow_their_signal_and_inverse_reverses_them():
    measured = measurements(
        [FALLING] * 2, [[1.0, 1.0], [1.0, 1.0]],
        cosine=[[0.9, 0.8], [0.1, 0.3]], nll=[[2.0, 1.5], [1.0, 3.0]],
    )  # fmt: skip
    for signal, expected in (("cosine", [0, 1]), ("ppl", [1, 0])):
        for inverse in (False, True):
            recipe = Recipe(
                pattern_signal=signal, budget_signal="uniform", inverse_patterns=inverse
            )
            plan = solve(measured, recipe, n_tokens=100).plan
            chosen = [measured.policies.index(layer.policy) for layer in plan.layers]
            assert chosen == [i ^ inverse for i in expected]


def test_one_policy_everywhere_takes_the_budgets_of_its_own_curve():
    errors = [[[0.9, 0.5, 0.3], [0.2, 0.1, 0.05]], [[0.5, 0.4, 0.3], [0.9, 0.8, 0.7]]]
    kl = [[1.0, 1.0], [1.0, 1.0]]
    for policy, first_gets_more in ((H2O(recent=0.0), True), (KeyDiff(), False)):
        recipe = Recipe(policy=policy, budget_signal="curve")
        first, second = solve(measurements(errors, kl), recipe, n_tokens=100).plan.layers
        assert first.policy == second.policy == policy
        assert (first.budget > second.budget) == first_gets_more


def test_heads_of_a_layer_share_its_policy_and_the_needy_head_gets_more():
    heads = [[FALLING, [[0.01] * 3] * 2]] * 3  # [layer head policy point]: all is in head 0
    measured = measurements([FALLING] * 3, [[1.0, 1.0]] * 3, head_errors=heads)
    plan = solve(measured, Recipe(level="head"), n_tokens=100).plan
    assert all(layer.budget[0] > layer.budget[1] == 6 for layer in plan.layers)


def test_no_unit_gets_less_than_what_its_policies_protect():
    measured = measurements([FALLING] * 4, [[0.1] * 2, [10.0] * 2, [0.1] * 2, [0.1] * 2])
    guarded = replace(measured, policies=(SnapKV(window=16), KeyDiff()))
    budgets = [layer.budget for layer in solve(guarded, n_tokens=100).plan.layers]
    assert budgets == [16, 52, 16, 16]


def test_families_weigh_alike_whatever_their_number():
    measured = measurements([FALLING] * 2, [[1.0, 1.0]] * 2)
    [one] = measured.items
    other = replace(one, family="quote", entropy=np.array([10.0, 10.0]))
    both = replace(measured, items=(one, one, one, other))
    assert signals(both)["entropy"].tolist() == [5.5, 6.0]


def test_measurements_survive_json_to_the_last_bit():
    errors = np.random.default_rng(0).random((3, 2, 3))
    for kl in (None, errors[..., 0]):
        items = measurements(errors, kl).items
        [back] = from_json(to_json(items))
        assert (back.error == errors).all()
        assert (back.kl is None) == (kl is None)
        assert kl is None or (back.kl == kl).all()
        assert to_json([back]) == to_json(items)


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (Recipe(), {"budget": 0}, "budget=0 tokens a head for documents of 100; pass 1 to 100"),
        (Recipe(), {"budget": 101}, "budget=101 tokens a head"),
        (Recipe(), {}, "'gain' needs a pass over the model for each layer and policy"),
        (Recipe(budget_signal="ppl"), {}, "'ppl_max' needs a pass"),
        (Recipe(pattern_signal="ppl", budget_signal="uniform"), {}, "'ppl' needs a pass"),
        (Recipe(policy=SnapKV(), budget_signal="uniform"), {}, r"SnapKV\(.*\) was not measured"),
    ],
)
def test_plans_that_can_not_be_made(recipe, arguments, message):
    with pytest.raises(ValueError, match=message):
        solve(measurements([FALLING] * 2), recipe, n_tokens=100, **arguments)


def test_a_mean_of_what_was_not_measured():
    with pytest.raises(ValueError, match=r"'kl' was not measured; .* single_layer=True"):
        measurements([FALLING]).mean("kl")


def test_recomputed_attention_is_the_softmax_over_kept_tokens():
    """Against attention written out token by token; two tokens of tail, three kept of context."""
    torch.manual_seed(0)
    layer = LayerKV(
        keys=torch.randn(1, 2, 5, 4), values=torch.randn(1, 2, 5, 4),
        queries=torch.randn(1, 4, 2, 4), scale=0.7,
    )  # fmt: skip
    out = tail_output(layer)
    for q_head in range(4):
        head = q_head // 2
        for row in range(2):
            seen = slice(0, 4 + row)
            scores = layer.queries[0, q_head, row] @ layer.keys[0, head, seen].T * 0.7
            want = scores.softmax(0) @ layer.values[0, head, seen]
            got = out[head, row].unflatten(0, (2, 4))[q_head % 2]
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0.0)


def test_recomputation_needs_queries():
    with pytest.raises(ValueError, match=r"no queries; pass LayerKV\(queries=…\)"):
        tail_output(LayerKV(keys=torch.zeros(1, 1, 3, 2), values=torch.zeros(1, 1, 3, 2)))


def test_differences_of_a_layer_and_of_its_heads():
    full = torch.tensor([[[3.0, 0.0]], [[0.0, 4.0]]])  # two heads, one token; the sum's norm is 5
    found = compare(full.sum(0), full * torch.tensor([0.0, 0.5])[:, None, None])
    assert found.error == pytest.approx(2 / 5)
    assert found.head_errors == pytest.approx((0.0, 2 / 5))
    assert found.cosine == pytest.approx((9 + 8) / (5 * 13**0.5))


ITEM = EncodedItem(
    id="i", family="f", context_ids=(1, 2), question_ids=(3, 4, 5), answer_ids=(6, 7)
)


def test_an_items_tail_and_its_question_before_the_eviction():
    assert ITEM.tail_ids == (3, 4, 5, 6)
    seen = ITEM.question_visible()
    assert (seen.context_ids, seen.question_ids, seen.answer_ids) == ((1, 2, 3, 4), (5,), (6, 7))
    assert seen.id == ITEM.id


@pytest.mark.parametrize("name", ["context_ids", "question_ids", "answer_ids"])
def test_an_item_without_one_of_its_parts(name):
    with pytest.raises(ValueError, match=f"item 'i' has no {name}"):
        replace(ITEM, **{name: ()})


def score(plan, kl, family="needle", item="1"):
    return PlanScore(
        item=item, family=family, plan=plan, kl=kl, nll=1.0, full_nll=1.0, exact=False,
        full_exact=True, kept=10, n_tokens=40,
    )  # fmt: skip


SCORES = [
    score("ours", 0.1), score("ours", 0.3, item="2"), score("ours", 0.5, "quote"),
    score("best", 0.4), score("best", 0.8, item="2"), score("best", 0.4, "quote"),
    score("same", 0.3), score("same", 0.3, item="2"), score("same", 0.3, "quote"),
]  # fmt: skip


def test_regret_by_family():
    assert by_family(SCORES, "ours") == pytest.approx({"needle": 0.2, "quote": 0.5})
    assert macro_kl(SCORES, "ours") == pytest.approx(0.35)
    found = regrets(SCORES, "ours", ["best", "same"])
    assert found["needle"] == pytest.approx({"best": -0.4, "same": -0.1})
    assert found["quote"] == pytest.approx({"best": 0.1, "same": 0.2})


def test_a_plan_that_adds_nothing_is_not_chosen():
    assert choose(SCORES, "ours", ["best"]) == "ours"
    assert choose(SCORES, "ours", ["best", "same"]) == "same"
    assert choose(SCORES, "same", ["same"]) == "same"
    with pytest.raises(ValueError, match=r"no score of plan 'x'; scored: \['best', 'ours', 'same'"):
        macro_kl(SCORES, "x")


def test_shuffling_moves_budgets_or_policies_alone():
    policies = (H2O(), KeyDiff(), SnapKV())
    plan = Plan(layers=tuple(LayerPlan(policy=policies[i % 3], budget=10 + i) for i in range(12)))
    for what, kept in (("budgets", "policy"), ("policies", "budget")):
        moved = shuffled(plan, what, seed=0)
        assert moved == shuffled(plan, what, seed=0) != shuffled(plan, what, seed=1)
        other = "budget" if kept == "policy" else "policy"
        assert [getattr(a, kept) for a in moved.layers] == [getattr(a, kept) for a in plan.layers]
        drawn, own = ([repr(getattr(a, other)) for a in p.layers] for p in (moved, plan))
        assert drawn != own
        assert sorted(drawn) == sorted(own)


@pytest.mark.parametrize(("budget", "floor"), [(4, 1), (8, 2), (24, 6), (60, 6)])
def test_the_floor_leaves_small_budgets_something_to_share_out(budget, floor):
    errors = [[[0.9, 0.5, 0.2]]] * 4
    measured = measurements(errors, [[9.0], [0.1], [0.1], [0.1]], policies=(KeyDiff(),))
    plan = solve(measured, n_tokens=100, budget=budget).plan
    assert [layer.budget for layer in plan.layers][1:] == [floor] * 3 or budget == 60
    assert plan.total(1) == 4 * budget
    assert min(layer.budget for layer in plan.layers) >= floor
