"""The batch runner on a small Dask cluster of two worker processes, with real kernels."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from polykv_lib.study import cluster, grid, platform
from polykv_lib.study import run as runner
from polykv_lib.study.store import collect

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
KNOW_THE_TOY = f"import sys; sys.path[:0] = {[str(ROOT), str(HERE)]}; import toy_experiment; toy_experiment.install()"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    workers: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "resources": {"GPU": 1}}
    with LocalCluster(**workers, dashboard_address="127.0.0.1:0", preload=[KNOW_THE_TOY]) as made:
        yield made.scheduler_address


def expand(notebooks: Path, *entries: dict[str, Any], **overrides: Any) -> list[grid.Point]:
    out = str(notebooks.parent / "out")
    wanted = grid.Grid(defaults={"OUT_DIR": out}, points=[grid.Entry(**e) for e in entries])
    return grid.expand(wanted, notebooks, "test", overrides=overrides)


def test_a_grid_runs_on_workers_and_resumes(notebooks: Path, address: str) -> None:
    toy = {"notebook": "05_toy", "sweep": {"N": [1, 2], "FAIL": ["no", "die"]}}
    points = expand(notebooks, {"notebook": "10_paper_vs_ours"}, toy)
    lines: list[str] = []
    done = cluster.run_on(address, points, lines.append)
    assert [d.status for d in done] == ["ok", "ok", "failed", "ok", "failed"], lines
    assert [d.point for d in done] == points
    assert done[2].error is not None
    assert done[2].error.type == "DeadKernel"
    assert "1/1] 10_paper_vs_ours: ok" in lines[-1], "what reads results comes last"
    assert "    05_toy N=1 FAIL=no … counting to 1" in lines
    stored = collect(notebooks.parent / "out", include_trials=True)
    assert sorted((r.params["N"], r.status) for r in stored) == [
        (1, "failed"), (1, "ok"), (2, "failed"), (2, "ok"),
    ]  # fmt: skip
    good = [point for point, d in zip(points, done, strict=True) if d.status == "ok"]
    again = cluster.run_on(address, good, str)
    assert [d.status for d in again] == ["ok", "stored", "stored"]
    assert [d.status for d in runner.run(good[1:], str)] == ["stored", "stored"], "one store"


def test_a_time_budget_and_the_gpu_as_a_resource(notebooks: Path, address: str) -> None:
    toy = {"notebook": "05_toy", "sweep": {"N": [1, 2, 3]}}
    assert [cluster.needs(point) for point in expand(notebooks, toy)] == [{}] * 3
    elsewhere = expand(notebooks, {"notebook": "05_toy"}, MODEL="someone/else")
    assert [cluster.needs(point) for point in elsewhere] == [{"GPU": 1}]
    assert [d.status for d in cluster.run_on(address, elsewhere, str)] == ["ok"]
    late = expand(notebooks, toy, TIME_BUDGET_MIN=1e-9)
    done = cluster.run_on(address, late, str)
    assert [d.status for d in done] == ["not started"] * 3
    assert runner.summary(done).endswith("time budget reached: 0 of 3 done, rerun to continue")


def test_points_travel() -> None:
    smoke = grid.load_grid(ROOT / "env" / "grids" / "smoke.yaml")
    for point in grid.expand(smoke, ROOT / "notebooks", "smoke"):
        assert pickle.loads(pickle.dumps(point)) == point


def test_a_scheduler_that_is_not_there_is_one_sentence() -> None:
    for address in ("127.0.0.1:1", "nonsense://x"):
        with pytest.raises(platform.PlatformError, match="no Dask scheduler answers at") as caught:
            cluster.run_on(address, [], str)
        assert "\n" not in str(caught.value)
