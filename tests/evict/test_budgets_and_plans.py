"""Totals are spent to the token; plans survive the disk and refuse what does not fit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_lib.evict import H2O, FullKV, KeyDiff, LayerPlan, Plan, RankMerge, SnapKV, StreamingLLM
from polykv_lib.evict.budgets import apportion, equal_slopes, proportional, pyramid, uniform


@given(shares=st.lists(st.floats(0.01, 10), min_size=1, max_size=40), total=st.integers(0, 5000))
def test_apportioned_shares_sum_to_the_total_and_are_off_by_less_than_one(shares, total):
    parts = apportion(shares, total)
    assert sum(parts) == total
    assert all(abs(p - s / sum(shares) * total) < 1 for p, s in zip(parts, shares, strict=True))


@given(layers=st.integers(1, 40), mean=st.integers(1, 500))
def test_every_allocator_spends_its_total(layers, mean):
    total = layers * mean + layers // 2
    assert sum(uniform(layers, total)) == total
    assert sum(pyramid(layers, total)) == total
    assert pyramid(layers, total) == sorted(pyramid(layers, total), reverse=True)
    signal = [(-1.0) ** i * i for i in range(layers)]
    assert sum(proportional(signal, total, b_min=1)) == total


def test_proportional_is_the_papers_equation():
    assert proportional([1.0, 3.0], 100, b_min=10) == [30, 70]
    assert proportional([-5.0, 1.0], 100, b_min=10) == [10, 90]  # a negative signal counts as none


def test_pyramid_has_the_slope_of_beta():
    budgets = pyramid(32, 32 * 512, beta=20.0)
    assert budgets[0] == pytest.approx(512 * (2 - 1 / 20), abs=1)
    assert budgets[-1] == pytest.approx(512 / 20, abs=1)


def brute_force(curves, total):
    """The least sum of piecewise-linear convex curves, by trying every split."""

    def at(curve, b):
        for (b0, e0), (b1, e1) in itertools.pairwise(curve):
            if b0 <= b <= b1:
                return e0 + (e1 - e0) * (b - b0) / (b1 - b0)
        raise AssertionError

    ranges = [range(c[0][0], c[-1][0] + 1) for c in curves]
    splits = (s for s in itertools.product(*ranges) if sum(s) == total)
    return min(sum(at(c, b) for c, b in zip(curves, s, strict=True)) for s in splits), at


@given(
    drops=st.lists(st.lists(st.floats(0, 5), min_size=3, max_size=3), min_size=2, max_size=3),
    extra=st.integers(0, 18),
)
def test_equal_slopes_reach_the_optimum_of_convex_curves(drops, extra):
    curves = []
    for own in drops:
        falling = sorted(own, reverse=True)  # convex: each step gains less than the one before
        errors = [10.0 - sum(falling[:k]) for k in range(4)]
        curves.append([(1 + 2 * k, e) for k, e in enumerate(errors)])
    total = len(curves) + min(extra, 6 * len(curves))
    best, at = brute_force(curves, total)
    budgets = equal_slopes(curves, total)
    assert sum(budgets) == total
    assert sum(at(c, b) for c, b in zip(curves, budgets, strict=True)) == pytest.approx(
        best, abs=1e-9
    )


def test_equal_slopes_skip_a_useless_point_and_give_one_layer_everything():
    flat = [(4, 1.0), (16, 0.99), (64, 0.98)]
    steep = [(4, 50.0), (16, 49.0), (64, 0.0)]  # nothing helps but the whole: its hull skips 16
    assert equal_slopes([flat, steep, flat], 72) == [4, 64, 4]


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (lambda: proportional([1.0, 1.0], 10, b_min=6), "for 2 units that need 12 at least"),
        (lambda: equal_slopes([[(4, 1.0), (8, 0.0)]], 3), "for 1 units that need 4 at least"),
        (lambda: equal_slopes([[(4, 1.0), (8, 0.0)]], 9), "the units can hold 8; keep everything"),
    ],
)
def test_totals_that_can_not_be_spent(allocate, message):
    with pytest.raises(ValueError, match=message):
        allocate()


PLAN = Plan(
    layers=(
        LayerPlan(policy=SnapKV(window=16), budget=128),
        LayerPlan(policy=RankMerge(first=H2O(recent=0.25), second=KeyDiff()), budget=(40, 88)),
        LayerPlan(policy=FullKV(), budget=1024),
    )
)


def test_a_plan_survives_the_disk_as_one_line_a_layer(tmp_path):
    path = PLAN.save(tmp_path / "plan.yaml")
    assert Plan.load(path) == PLAN
    lines = path.read_text().splitlines()
    assert lines[:2] == ["schema: 1", "prefill:"]
    assert len(lines) == 2 + 3


def test_totals_count_every_head():
    assert PLAN.total(n_heads=2) == 2 * 128 + 40 + 88 + 2 * 1024
    assert Plan.uniform(StreamingLLM(), 64, 5).total(3) == 5 * 3 * 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "prefill: [{policy: SnapKW, budget: 3}]",
            r"layer 0: no policy 'SnapKW'; choose one of: FullKV, ",
        ),
        (
            "prefill: [{policy: SnapKV, windw: 3, budget: 3}]",
            "SnapKV takes window, kernel, pooling; got windw",
        ),
        ("prefill: [{policy: SnapKV, budget: 0.5}]", "budget 0.5; pass tokens"),
        (
            "prefill: [{policy: SnapKV, window: -3, budget: 3}]",
            r"layer 0: SnapKV\(window=-3\); pass a whole number",
        ),
        ("prefill: [{policy: SnapKV, budget: [3, 0]}]", r"layer 0: budget \(3, 0\); pass tokens"),
        ("prefill: [{policy: SnapKV}]", "an entry needs `policy` and `budget`"),
        ("layers: []", "it needs `prefill:`, a list with an entry a layer"),
        ("prefill: [", "is not YAML"),
        (
            "prefill:\n- {policy: H2O, budget: 3}\n- {policy: H2O, budget: 3, budget: 4}",
            "plan.yaml, line 3: `budget` stands twice in one entry; keep one of them",
        ),
        ("prefill: []\nprefill: []", "line 2: `prefill` stands twice"),
        ("schema: 2\nprefill: []", "has schema 2, this version reads 1"),
        ("prefill: []\ndecod: []", "has 'decod'; a plan has schema, prefill and decode"),
        ("schema: v1\nprefill: []", "has schema 'v1', this version reads 1"),
        ("prefill: [{policy: [H2O], budget: 3}]", r"layer 0: no policy \['H2O'\]; choose one of"),
        ("prefill: [{policy: SnapKV, 16: 3, budget: 3}]", "SnapKV takes window, .*; got 16"),
    ],
)
def test_files_that_are_no_plan(tmp_path, text, message):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Plan.load(path)


def test_a_policy_is_made_not_named():
    with pytest.raises(ValueError, match=r"policy <class .*; pass a policy such as H2O\(\)"):
        Plan.uniform(StreamingLLM, 64, 2)


def test_a_plan_is_made_of_layer_plans():
    unchecked = object.__new__(Plan)  # types are checked in tests only
    object.__setattr__(unchecked, "layers", PLAN.layers)
    object.__setattr__(unchecked, "decode", (PLAN.layers[0], H2O()))
    with pytest.raises(ValueError, match=r"layer 1 of the decode plan is H2O.*; pass a LayerPlan"):
        unchecked.__post_init__()


def test_another_models_plan():
    with pytest.raises(ValueError, match="the plan has 3 layers, the model 30"):
        PLAN.check(n_layers=30, n_heads=2)
    with pytest.raises(
        ValueError, match="layer 1 of the plan has 2 budgets, but the model has 3 KV heads"
    ):
        PLAN.check(n_layers=3, n_heads=3)
