"""The joint plan on the tiny model: bytes of tensors, what is compared, and the points it wins."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from polykv_lib import hf, presets
from polykv_lib.evict import H2O, LayerPlan, Plan
from polykv_lib.kv import Geometry, LayerKV
from polykv_lib.pool import freeze
from polykv_lib.study.experiments import joint_plan
from polykv_lib.study.experiments.eviction.scores import Read, Result, bytes_in_bf16
from polykv_lib.study.experiments.joint.methods import ByteBudget, Stored, alone, least, scored
from polykv_lib.study.experiments.joint.rows import Point, rows
from polykv_lib.study.record import Outcome, Row

TINY = Geometry(n_layers=2, n_q_heads=4, n_kv_heads=2, head_dim=64)
MENU = ["full", "lean", "tq3+tq2"]
POINT = {
    "MODEL": "tiny",
    "SEED": 0,
    "SUITE": "ruler",
    "TASKS": ["niah_multikey_2", "fwe"],
    "N_ITEMS": 2,
    "N_CALIBRATION": 1,
    "CONTEXT_TOKENS": 700,
    "QUESTION": "hidden",
    "SHARES": [0.25, 0.0625],
    "POLICIES": ["H2O", "StreamingLLM"],
    "CANDIDATES": ["H2O", "KeyDiff"],
    "LEVEL": "layer",
    "FAMILY": ["paper", "tq3-both", "tq1-both"],
    "FIXED": ["lean"],
    "MENU": MENU,
    "N_BOOT": 100,
}


@pytest.fixture(scope="module")
def outcome(tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]) -> Outcome:
    return in_parts(joint_plan.run, POINT)


def found(outcome: Outcome, table: str, metric: str, **dims: object) -> list[Row]:
    of = [row for row in outcome.rows if (row.table, row.metric) == (table, metric)]
    return [row for row in of if row.dims.items() >= dims.items()]


def test_no_pool_exceeds_its_budget_and_all_fill_it(outcome: Outcome) -> None:
    wholes = {s["item"]: s["n_kept"] for s in outcome.samples if s["method"] == "codec alone"}
    one_token = TINY.n_kv_heads * (2 * 64 * 2 + 4)
    for sample in outcome.samples:
        whole, method = wholes[sample["item"]], sample["method"]
        left = sample["bytes_share"] * whole * 2 * 64 * 2 - sample["pool_bytes"]
        assert left >= 0, method
        if sample["n_kept"] < whole:
            assert left <= one_token * (TINY.n_layers if method.startswith("paper") else 1), method


def test_every_way_is_compared_and_a_codec_that_does_not_fit_is_not(outcome: Outcome) -> None:
    methods = {
        share: {s["method"] for s in outcome.samples if s["bytes_share"] == share}
        for share in (0.25, 0.0625)
    }
    everywhere = {
        *("best single, full", "best single, lean", "paper-b", "paper-b, ppl budgets"),
        *("gain-curve, full", "gain-curve, lean", "joint"),
    }
    assert methods == {0.25: everywhere | {"codec alone"}, 0.0625: everywhere}
    [alone_] = found(outcome, "joint", "kl_nats", method="codec alone", family="macro")
    assert alone_.dims["codec"] == "tq3-both"
    wins = {r.dims["against"]: r for r in found(outcome, "joint_wins", "points_won_pct")}
    assert wins["codec alone"].n == 1
    assert wins["gain-curve, lean"].n == 2
    assert "joint" not in wins
    layers = found(outcome, "joint_plan", "budget", bytes_share=0.0625)
    assert [r.dims["layer"] for r in layers] == [0, 1]
    assert {r.dims["codec"] for r in layers} <= set(MENU)


def test_a_menu_of_one_codec_is_the_plan_in_that_codec(tiny: tuple[Any, Any]) -> None:
    once = POINT | {"SHARES": [0.125], "N_ITEMS": 1, "MENU": ["lean"], "TASKS": ["fwe"]}
    samples = joint_plan.run(once, lambda text: None).samples
    own, other = (
        {k: v for k, v in s.items() if k not in ("method", "codec")}
        for name in ("joint", "gain-curve, lean")
        for s in samples
        if s["method"] == name
    )
    assert own == other


def test_what_a_layer_costs_alone_is_what_a_pool_says(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    point = joint_plan.settings(joint_plan.Settings, POINT)
    [item, *_] = (asked.encoded for asked in point.both(tokenizer)[1])
    codecs = {name: presets.codec(name) for name in ("full", "lean")}
    costs = hf.codec_kl(model, [item], codecs)
    assert not costs["full"].any()
    plan = Plan.uniform(H2O(), len(item.context_ids), 2)
    read = Read.of(model, item, [plan])
    for i, expected in enumerate(costs["lean"]):
        named = [
            replace(own, codec="lean" if i == j else None) for j, own in enumerate(plan.layers)
        ]
        pool = read.pool(None, *presets.of_plan(Plan(layers=tuple(named))))
        found = read.result(pool, keep=1.0, method="", codec="")
        assert found.kl == pytest.approx(expected, rel=1e-4)
        assert expected > 1e-5


def test_a_pool_above_its_budget_is_an_error(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    point = joint_plan.settings(joint_plan.Settings, POINT)
    [item, *_] = (asked.encoded for asked in point.both(tokenizer)[1])
    budget = ByteBudget(share=0.25, geometry=TINY)
    [method] = alone(budget, ["tq3-both"], len(item.context_ids))
    assert len(list(scored(model, item, [method], {0.25: budget}))) == 1
    small = {0.25: replace(budget, share=0.1)}
    with pytest.raises(RuntimeError, match=r"codec alone at 0\.25 takes .* more than its"):
        list(scored(model, item, [method], small))


def test_a_head_that_keeps_everything_holds_no_positions_whatever_the_others_keep() -> None:
    layer = LayerKV(keys=torch.randn(1, 2, 90, 64), values=torch.randn(1, 2, 90, 64))
    kept = [[torch.arange(90), torch.cat([torch.arange(4), torch.arange(4, 82, 3)])]]
    own: Any = presets.codec("lean")
    pool = freeze([layer], keys=own.keys, values=own.values, n_sink=own.n_sink, kept=kept)
    sizes = ByteBudget(share=1.0, geometry=TINY).sizes("lean", 90)
    assert bytes_in_bf16(pool) == sizes(1, 90) + sizes(1, 30)
    noted = [t.numel() for name, t in pool.tensors.items() if name.endswith("positions")]
    assert sum(noted) == 2 * -(-90 // 8), "sinks and the rest, a bit for each token"


def test_a_plans_codecs_reach_the_pool_and_the_file(tiny: tuple[Any, Any], tmp_path: Any) -> None:
    model, _ = tiny
    ids = torch.randint(0, 200, (1, 90), generator=torch.Generator().manual_seed(0))
    plan = Plan(
        layers=(
            LayerPlan(policy=H2O(), budget=90, codec="lean"),
            LayerPlan(policy=H2O(), budget=30),
        )
    )
    assert "codec: lean" in plan.save(tmp_path / "plan.yaml").read_text()
    read = Plan.load(tmp_path / "plan.yaml")
    assert read == plan
    keys, values, n_sink = presets.of_plan(read)
    pool = hf.build_pool(model, ids, keys=keys, values=values, n_sink=n_sink, plan=read)
    assert pool.layers[0][1].keys.codec == presets.codec("lean").keys
    assert pool.layers[1][0].keys.codec == presets.codec("full").keys
    assert bytes_in_bf16(pool) == ByteBudget(share=1.0, geometry=TINY).nbytes(plan, 90) + 4 * 90


def test_codecs_that_are_none_or_disagree() -> None:
    with pytest.raises(ValueError, match="codec ''; pass a preset's name"):
        LayerPlan(policy=H2O(), budget=3, codec="")
    layers = [LayerPlan(policy=H2O(), budget=3, codec=name) for name in ("paper", "lean")]
    with pytest.raises(ValueError, match=r"leave \[0, 4\] first tokens"):
        presets.of_plan(Plan(layers=tuple(layers)))
    with pytest.raises(ValueError, match="no codec 'leen'"):
        presets.of_plan(Plan(layers=(replace(layers[0], codec="leen"),)))


def result(method: str, item: int, kl: float, share: float = 0.25) -> Result:
    return Result(
        item=str(item), family="ab"[item % 2], keep=share, method=method, codec="full", kl=kl,
        nll_delta=kl, exact=False, n_kept=1, pool_bytes=100, full_bytes=400,
    )  # fmt: skip


def test_points_are_won_only_where_the_whole_interval_is_below_zero() -> None:
    items = range(8)
    at = [result("best single, full", i, 1.0, s) for i in items for s in (0.25, 0.125)]
    at += [result("other", i, 0.5 + (i == 7), s) for i in items for s in (0.25, 0.125)]
    at += [result("joint", i, 0.4 + 0.01 * i) for i in items]
    at += [result("joint", i, 0.9 if i % 4 else 0.0, 0.125) for i in items]
    point = Point(dims={}, sampling={"seed": 0, "n_resamples": 200}, n_tokens=10)
    made = list(rows(at, point))
    won = {r.dims["against"]: r.value for r in made if r.table == "joint_wins"}
    assert won == {"best single, full": 100, "other": 50}
    gap = next(r for r in made if r.metric == "gap_recovered_pct" and r.dims["method"] == "other"
               and r.dims["family"] == "macro")  # fmt: skip
    assert gap.value == pytest.approx(100 * (1 - 0.625))
    names = ("best single, full", "joint")
    methods = [
        Stored(share=0.25, name=name, codec="full", plan=lambda n: Plan.uniform(H2O(), n, 1))
        for name in names
    ]
    assert least(at, methods).name == "joint"
