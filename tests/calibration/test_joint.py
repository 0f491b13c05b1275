"""Bytes shared out between tokens and bits: against every combination, and against the gain curve."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_lib import presets
from polykv_lib.calibration import Recipe, joint, solve
from polykv_lib.calibration.joint import Option, share_out
from polykv_lib.evict import Plan
from polykv_lib.pool import layer_nbytes
from tests.calibration.test_solving import measurements

WHOLE = 40


def option(codec: str, per_token: int, losses: list[float], extra: float = 0.0) -> Option:
    curve = [((i + 1) * WHOLE // len(losses), loss + extra) for i, loss in enumerate(losses)]
    return Option(codec=codec, curve=curve, nbytes=lambda t: 7 + per_token * t)


falling = st.lists(st.floats(0, 5), min_size=2, max_size=4).map(lambda x: sorted(x, reverse=True))
units = st.lists(st.tuples(falling, falling, st.floats(0, 2)), min_size=1, max_size=3)


def menus_of(drawn) -> list[list[Option]]:
    return [[option("wide", 16, w), option("narrow", 3, n, extra)] for w, n, extra in drawn]


def cost(unit: list[Option], held) -> int:
    return next(o for o in unit if o.codec == held.codec).nbytes(held.tokens)


@given(units, st.integers(200, 3000))
def test_never_more_than_the_total_and_no_token_of_it_left(drawn, total):
    menus = menus_of(drawn)
    try:
        held = share_out(menus, total)
    except ValueError:
        assert sum(min(o.nbytes(o.curve[0][0]) for o in unit) for unit in menus) > total
        return
    spent = sum(cost(unit, own) for unit, own in zip(menus, held, strict=True))
    assert spent == sum(own.nbytes for own in held) <= total
    assert held == share_out(menus, total)
    for unit, own in zip(menus, held, strict=True):
        least = min(loss for o in unit for _, loss in o.curve)
        if own.loss > least and own.tokens < WHOLE:
            assert total - spent < {"wide": 16, "narrow": 3}[own.codec]


@given(units, st.integers(200, 3000))
def test_within_one_segment_of_the_best_combination(drawn, total):
    menus = menus_of(drawn)
    points = [[(o.nbytes(t), loss) for o in unit for t, loss in o.curve] for unit in menus]
    payable = [c for c in product(*points) if sum(b for b, _ in c) <= total]
    if not payable:
        return
    best = min(sum(loss for _, loss in c) for c in payable)
    held = share_out(menus, total)
    longest = max(max(x for _, x in unit) - min(x for _, x in unit) for unit in points)
    assert sum(own.loss for own in held) <= best + longest + 1e-9


def test_the_best_combination_where_the_total_ends_at_a_corner():
    menus = [
        [option("wide", 16, [4.0, 0.0]), option("narrow", 3, [4.0, 0.0], 0.5)],
        [option("wide", 16, [1.0, 0.0]), option("narrow", 3, [1.0, 0.0], 0.1)],
    ]
    held = share_out(menus, 2 * (7 + 3 * WHOLE))
    assert [(h.codec, h.tokens) for h in held] == [("narrow", WHOLE)] * 2
    assert sum(h.loss for h in held) == pytest.approx(0.6)
    all_of_it = share_out(menus, 2 * (7 + 16 * WHOLE))
    assert [(h.codec, h.loss) for h in all_of_it] == [("wide", 0.0)] * 2


def test_ties_go_to_the_earlier_unit_and_codec():
    twins = [[option("a", 3, [1.0, 0.0]), option("b", 3, [1.0, 0.0])]] * 2
    held = share_out(twins, 14 + 3 * (WHOLE + WHOLE // 2))
    assert [(h.codec, h.tokens) for h in held] == [("a", WHOLE), ("a", WHOLE // 2)]


def test_a_total_that_pays_for_nothing():
    with pytest.raises(ValueError, match="the cheapest options of the 1 units take 67; raise"):
        share_out([[option("narrow", 3, [1.0, 0.0])]], 60)


MEASURED = measurements(
    [
        [[0.9, 0.6, 0.2], [0.8, 0.7, 0.3]],
        [[0.5, 0.1, 0.05], [0.6, 0.3, 0.1]],
        [[0.7, 0.5, 0.4], [0.9, 0.4, 0.1]],
    ],
    kl=[[0.9, 0.8], [0.01, 0.02], [0.2, 0.1]],
)
NONE = np.zeros(3)


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("budget", [10, 25, 60, 200])
def test_one_codec_alone_is_the_gain_curve(level, budget):
    recipe = Recipe(level=level)
    plan = joint(
        MEASURED,
        {"full": NONE},
        {"full": lambda heads, tokens: heads * tokens * 260},
        recipe,
        n_heads=2,
        n_tokens=200,
        total=3 * 2 * budget * 260 + 259,
    )
    expected = solve(MEASURED, recipe, n_tokens=200, budget=budget).plan
    assert [(p.policy, p.budget) for p in plan.layers] == [
        (p.policy, p.budget) for p in expected.layers
    ]
    assert {p.codec for p in plan.layers} == {"full"}


def sizes(name: str):
    codec = presets.codec(name)
    return lambda heads, tokens: layer_nbytes(
        codec.keys, codec.values, codec.n_sink,
        n_heads=heads, n_kept=tokens, n_tokens=200, head_dim=64,
    )  # fmt: skip


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.25])
def test_codecs_differ_where_layers_do_and_bytes_are_spent(level, share, tmp_path):
    names = ["full", "lean", "tq3+tq2"]
    kl = {"full": NONE, "lean": NONE + 0.001, "tq3+tq2": np.array([0.5, 0.0, 0.5])}
    total = round(share * 3 * 2 * 200 * 256)
    of = {name: sizes(name) for name in names}
    plan = joint(MEASURED, kl, of, Recipe(level=level), n_heads=2, n_tokens=200, total=total)
    spent = sum(
        of[p.codec](1, b) if level == "head" else of[p.codec](2, b) / 2
        for p in plan.layers
        for b in p.budgets(2)
    )
    one_token = 2 * 260
    whole = all(b == 200 for p in plan.layers for b in p.budgets(2))
    assert spent <= total
    assert whole or total - one_token < spent
    if share < 0.2:  # no layer can be whole in bf16: the one that rounding does not hurt is cheap
        assert [p.codec == "tq3+tq2" for p in plan.layers] == [False, True, False]
    assert Plan.load(plan.save(tmp_path / "plan.yaml")) == plan
    assert len(presets.of_plan(plan)[0]) == 3


def test_signals_without_a_curve_spend_no_bytes():
    with pytest.raises(ValueError, match="budget_signal='entropy' has no curve"):
        joint(MEASURED, {"full": NONE}, {"full": sizes("full")}, Recipe(budget_signal="entropy"),
              n_heads=2, n_tokens=200, total=10**6)  # fmt: skip
