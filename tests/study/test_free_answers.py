"""Who answers freely beside the best policy, and what a budget means on LongBench."""

from collections.abc import Callable
from typing import Any

import pytest

from polykv_lib.study.experiments import plan_ablations, plan_recovery
from polykv_lib.study.experiments.eviction.items import Wanted, n_kept, single
from polykv_lib.study.grid import Entry, Grid, expand
from polykv_lib.study.params import ParameterError
from polykv_lib.study.platform import repository
from polykv_lib.study.record import Outcome

pytestmark = pytest.mark.usefixtures("tiny")
TASKS = ["niah_multikey_2", "fwe"]
SHARED = {
    "MODEL": "tiny",
    "SEED": 0,
    "SUITE": "ruler",
    "TASKS": TASKS,
    "N_ITEMS": 2,
    "N_CALIBRATION": 1,
    "CONTEXT_TOKENS": 900,
    "QUESTION": "visible",
    "CANDIDATES": ["H2O", "KeyDiff"],
    "MAX_NEW_TOKENS": 3,
    "N_BOOT": 50,
}


def scored(outcome: Outcome, name: str) -> dict[object, list[float]]:
    found: dict[object, list[float]] = {}
    for sample in outcome.samples:
        score: Any = sample.get("score")
        if score is not None:
            found.setdefault(sample[name], []).append(score)
    return found


def test_named_methods_answer_beside_the_best_policy_and_ours(
    tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]
) -> None:
    own = SHARED | {
        "LONGBENCH_DIR": "",
        "KEEP": [0.25],
        "POLICIES": ["H2O", "StreamingLLM", "PyramidKV"],
        "PLANS": ["paper-b", "gain-curve"],
        "CODECS": ["full", "polykv"],
        "ANSWERING": ["paper-b", "PyramidKV"],
    }
    outcome = in_parts(plan_recovery.run, own)
    answered = scored(outcome, "method")
    assert {"FullKV", "paper-b", "PyramidKV"} <= set(answered)
    assert "paper-b, ppl budgets" not in answered
    assert all(len(scores) == 2 * len(TASKS) for scores in answered.values())
    assert {s["codec"] for s in outcome.samples if s["method"] == "PyramidKV"} == {"full"}


def test_plans_of_one_signal_answer_at_prefill(
    tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]
) -> None:
    own = SHARED | {"KEEP": 0.25, "N_SHUFFLES": 1, "N_BUDGET_SHUFFLES": 1, "PHASE_TASKS": []}
    outcome = in_parts(plan_ablations.run, own)
    answered = scored(outcome, "plan")
    assert len(answered) == 1 + 1 + 4 + 4, "full cache, best single policy, policies, budgets"
    assert all(len(scores) == 2 * len(TASKS) for scores in answered.values())
    rows = [row for row in outcome.rows if row.table == "signal_answers"]
    of = {(r.dims["varied"], r.dims["signal"], r.dims["direction"]): r for r in rows}
    assert len(of) == len(rows) == len(answered)
    inverse = answered["policies by ppl, inverse at prefill"]
    row = of["policies", "ppl", "inverse"]
    assert (row.value, row.n) == (pytest.approx(sum(inverse) / len(inverse)), len(inverse))


def test_a_budget_on_longbench_is_as_many_tokens_in_every_context() -> None:
    shared: dict[str, Any] = {"tasks": ["lcc"], "n_calibration": 1, "n_items": 1, "seed": 0}
    wanted = Wanted(suite="longbench", context_tokens=7500, question="visible", **shared)
    kept = wanted.kept(0.0683)
    assert [n_kept(kept, n) for n in (7500, 3000, 1024, 600)] == [512, 512, 512, 300]
    totals = {name: single(name, kept, 32)(600).total(8) for name in ("H2O", "PyramidKV")}
    assert set(totals.values()) == {32 * 8 * 300}
    share = Wanted(suite="ruler", context_tokens=7500, question="visible", **shared).kept(0.0683)
    assert n_kept(share, 3000) == 205


def test_parameters_that_came_later_are_no_part_of_older_keys() -> None:
    def key(**params: Any) -> str | None:
        grid = Grid(points=[Entry(notebook="04_longbench_recovery", params=params)])
        [point] = expand(grid, repository() / "notebooks", "test")  # type: ignore[operator]
        assert ("ANSWERING" in point.chosen.resolved) == bool(params)  # type: ignore[attr-defined]
        return point.key

    assert key() != key(ANSWERING=["paper-b"])
    with pytest.raises(ParameterError, match="no policy or plan 'paper-c'; choose from: "):
        key(ANSWERING=["paper-c"])
