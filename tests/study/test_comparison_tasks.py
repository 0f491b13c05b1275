"""Published benchmark scores beside stored answers: what fills a line, and what leaves it empty."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from polykv_lib.study import tables
from polykv_lib.study.grid import expand, load_grid
from polykv_lib.study.published import published_rows
from polykv_lib.study.published.tasks import BEST_SINGLE, RECOVERY, Scored
from polykv_lib.study.record import Record
from polykv_lib.study.tables.comparison import paper_vs_ours
from polykv_lib.tasks import longbench, ruler

ROOT = Path(__file__).parents[2]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
TASKS = list(longbench.tasks())
N = 4
SCORES = {"FullKV": 0.40, "CAKE": 0.36, "paper-b": 0.30, "paper-b, ppl budgets": 0.35}


def samples(tasks: list[str], scores: dict[str, float], name: str, **dims: Any) -> Iterator[Any]:
    """Items of a task spread evenly around their method's mean."""
    for task in tasks:
        for i, off in enumerate(np.linspace(-0.1, 0.1, N)):
            for method, mean in scores.items():
                yield (
                    {"item": f"{task}/{i}", "family": task, "score": mean + off}
                    | {name: method}
                    | dims
                )


def record(tasks: list[str] = TASKS, **changes: Any) -> Record:
    """One point of the recovery experiment on two T4s, as it is stored."""
    params = {
        "MODEL": LLAMA,
        "SUITE": "longbench",
        "QUESTION": "visible",
        "CONTEXT_TOKENS": 7500,
        "KEEP": [0.0683],
        "N_ITEMS": N,
        "SEED": 0,
        "CANDIDATES": ["CAKE", "SnapKV"],
    }
    params |= changes
    keep = params["KEEP"][0]
    answers = samples(tasks, SCORES, "method", keep=keep, codec="full")
    unscored = {"item": "x", "family": tasks[0], "score": None, "method": "SnapKV", "keep": keep}
    return Record(experiment="plan_recovery", key="1" * 16, params=params, status="ok",
                  samples=[*answers, unscored],
                  provenance={"profile": "t4-8b", "best_single": {str(keep): "CAKE"}})  # fmt: skip


def signals(single: str, candidates: list[str], score: float) -> Record:
    names = ["policies by cosine, forward at prefill", "budgets by entropy, forward at prefill"]
    params = record().params | {"KEEP": 0.0683, "CANDIDATES": candidates}
    return Record(experiment="plan_ablations", key="2" * 16, params=params, status="ok",
                  samples=[*samples(TASKS, dict.fromkeys(names, score), "plan")],
                  provenance={"profile": "t4-8b", "best_single": single})  # fmt: skip


def line(records: list[Record], papers: Path, table: str, row: str, metric: str) -> pd.Series:
    compared = paper_vs_ours(records, papers)
    model = "Qwen" if metric.startswith("qwen") else "LLaMA"
    at = compared["paper table"].str.endswith(table) & (compared["row"] == row)
    at &= (compared["metric"] == metric) & compared["model (paper)"].str.startswith(
        (model, "Llama")
    )
    [found] = [own for _, own in compared[at].iterrows()]
    return found


def test_points_of_one_setting_are_one_benchmark(papers: Path) -> None:
    halves = [record(TASKS[:8]), record(TASKS[8:])]
    for records in ([record()], halves):
        full = line(records, papers, "Table 2", "512", "full_kv")
        assert (full["status"], full["n"], full["kind"]) == ("reproduced", 21 * N, "measured")
        assert full["ours"] == pytest.approx(40)
        assert full["delta"] == pytest.approx(40 - 38.99)
        assert full["95 % lo"] < 38.99 < full["95 % hi"]
        assert full["model (ours)"] == LLAMA
        best = line(records, papers, "Table 2", "512", "best_baseline")
        assert best["status"] == "reproduced"
        assert "the best single policy, by calibration items, is CAKE" in best["why"]
    half = line(halves[:1], papers, "Table 2", "512", "full_kv")
    assert half["status"] == "not run here"
    assert half["why"] == "LLaMA-3.1-8B on LongBench lacks answers by FullKV to 13 of 21 tasks"


def test_an_interval_that_misses_the_published_value_differs(papers: Path) -> None:
    own = line([record()], papers, "longbench16_llama31", "FullKV", "HotpotQA")
    assert (own["status"], own["n"]) == ("differs", N)
    assert own["ours"] == pytest.approx(40)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"MODEL": "Qwen/Qwen3-8B"}, "is a point of the grid t4-8b"),
        ({"MODEL": f"{LLAMA}@4bit"}, "is a point of the grid t4-8b"),
        ({"SUITE": "ruler"}, "is a point of the grid t4-8b"),
        ({"KEEP": [0.1365]}, "is stored with other budgets than 512"),
        ({"CONTEXT_TOKENS": 3500}, "is stored with other budgets than 512"),
    ],
)
def test_another_model_suite_or_budget_fills_nothing(
    papers: Path, changes: dict[str, Any], why: str
) -> None:
    own = line([record(**changes)], papers, "Table 2", "512", "best_baseline")
    assert own["status"] == "not run here"
    assert np.isnan(own["ours"])
    assert why in own["why"]


def test_what_is_not_the_same_quantity_stands_beside_without_a_difference(papers: Path) -> None:
    hidden = line([record(QUESTION="hidden")], papers, "Table 2", "512", "best_baseline")
    uniform = line([record()], papers, "Table 2", "512", "polykv_uniform")
    top = line([record()], papers, "Table 1", "LongBench (21 tasks), 512", "polykv_top1")
    category = line([record()], papers, "Table 4", "LLaMA-3.1-8B", "code")
    for own, value, why in (
        (hidden, 36, "the question was hidden"),
        (uniform, 30, "phase is not printed"),
        (top, 35, "the better of the paper's two ways"),
        (category, -1, "chosen on the benchmark"),
    ):
        assert own["status"] == "not comparable"
        assert own["ours"] == pytest.approx(value)
        assert why in own["why"]
        assert np.isnan(own["delta"])
    assert category["95 % lo"] == pytest.approx(-1), "items are paired: their spread cancels"
    policy = line([record()], papers, "longbench16_llama31", "SnapKV, 512", "Qasper")
    assert policy["why"].endswith("lacks answers by SnapKV to its task")


def test_routes_need_candidates_and_budgets_their_policy(papers: Path) -> None:
    routed = signals("CAKE", ["CAKE", "H2O", "SnapKV"], 0.32)
    alone = signals("SnapKV", ["SnapKV"], 0.36)
    cosine, entropy = ("eviction, cosine, prefill", "budget, entropy, prefill")
    for row, records, status, value in (
        (cosine, [routed, alone], "reproduced", 32),
        (entropy, [routed, alone], "reproduced", 36),
        (cosine, [alone], "not comparable", 36),
        (entropy, [routed], "not comparable", 32),
    ):
        own = line(records, papers, "Table 3", row, "llama_forward")
        assert (own["status"], own["ours"]) == (status, pytest.approx(value))
        assert line(records, papers, "Table 3", row, "qwen_forward")["status"] == "not run here"
    decode = line([routed], papers, "Table 3", "eviction, cosine, decode", "llama_forward")
    assert "by KL alone" in decode["why"]


def test_the_title_counts_what_was_run(papers: Path) -> None:
    none = tables.all_tables([], papers)["paper_vs_ours_eviction"].title
    assert none == "Published eviction and LongBench numbers: none is run here"
    some = tables.all_tables([record()], papers)["paper_vs_ours_eviction"]
    n = int(some.frame["ours"].notna().sum())
    assert 20 < n < 174
    assert some.title.endswith(f": {n} of 174 run here")


def test_every_score_that_is_said_to_be_measured_is_measured_by_the_grid(papers: Path) -> None:
    """Model, suite, tasks, budget and method: each is in the parameters of some points together."""
    points = expand(load_grid(ROOT / "env/grids/t4-8b.yaml"), ROOT / "notebooks", "t4-8b")
    chosen: list[Any] = [p.chosen for p in points if p.key]
    rows = [r for r in published_rows(papers) if isinstance(r.scored, Scored)]
    assert len(rows) > 100
    for row in rows:
        wanted = row.scored
        assert isinstance(wanted, Scored)
        found: set[str] = set()
        for p in chosen:
            keeps = p.KEEP if isinstance(p.KEEP, list) else [p.KEEP]
            budgets = {None, *(round(k * p.CONTEXT_TOKENS) for k in keeps)}
            recovery = p.experiment == RECOVERY
            given = {"FullKV", BEST_SINGLE, *p.ANSWERING} if recovery else set(wanted.methods)
            same = (
                p.MODEL.lower()
                .replace("-instruct", "")
                .endswith(row.model.lower().replace("-instruct", ""))
            )
            same &= (p.experiment, p.SUITE) == (wanted.experiment, wanted.suite)
            same &= recovery or not wanted.single or [wanted.single] == p.CANDIDATES
            if same and wanted.budget in budgets and set(wanted.methods) <= given:
                found |= {*p.TASKS}
                assert p.MAX_NEW_TOKENS
        assert set(wanted.tasks) <= found, (row.table, row.row, row.metric)
    assert {t for r in rows if isinstance(r.scored, Scored) for t in r.scored.tasks} == {
        *TASKS,
        *ruler.TASKS,
    }
