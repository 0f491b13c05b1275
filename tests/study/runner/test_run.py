"""The batch runner, with real kernels: what is run, what is not run again, what a failure leaves."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

from polykv_lib.study import grid as grids
from polykv_lib.study import platform
from polykv_lib.study import run as runner
from polykv_lib.study.notebook import run_point
from polykv_lib.study.params import ExperimentParameters
from polykv_lib.study.record import Record
from polykv_lib.study.store import collect


def expand(notebooks: Path, *entries: dict[str, Any], **overrides: Any) -> list[grids.Point]:
    out = str(notebooks.parent / "out")
    grid = grids.Grid(defaults={"OUT_DIR": out}, points=[grids.Entry(**e) for e in entries])
    return grids.expand(grid, notebooks, "test", overrides=overrides)


def records(notebooks: Path) -> dict[Any, Record]:
    results = notebooks.parent / "out" / "data" / "results"
    found = collect(results, include_trials=True)  # no grid file holds these points
    return {(r.params["N"], r.params["FAIL"]): r for r in found}


def test_points_run_once_and_a_changed_parameter_runs_again(notebooks: Path) -> None:
    lines: list[str] = []
    toy = {"notebook": "05_toy", "sweep": {"N": [1, 2]}}
    done = runner.run(expand(notebooks, toy, {"notebook": "10_paper_vs_ours"}), lines.append)
    assert [d.status for d in done] == ["ok", "ok", "ok"], [d.error for d in done]
    assert lines[0] == "[1/3] 05_toy N=1: started"
    assert lines[1] == "    … counting to 1"
    assert lines[2].startswith("[1/3] 05_toy N=1: ok (")
    assert lines[3].startswith("[2/3] 05_toy N=2: started, about ")
    assert len(lines) == 8

    record = records(notebooks)[1, "no"]
    assert record.rows[0].value == 1
    assert record.provenance["profile"] == "test"
    assert record.provenance["dtype"] == "float32"
    assert record.provenance["library"]
    assert record.key == done[0].point.key

    executed = done[0].point.executed
    assert executed.name == f"05_toy__{record.key}.ipynb"
    assert executed.stat().st_size < 500_000
    outputs = [
        o for c in nbformat.read(executed, 4).cells if c.cell_type == "code" for o in c.outputs
    ]
    assert not [
        o for o in outputs if o.output_type == "stream" and ("\r" in o.text or o.name == "stderr")
    ]

    again = runner.run(expand(notebooks, toy), lines.append)
    assert [d.status for d in again] == ["stored", "stored"]
    assert runner.summary(again) == "2 points: 0 run, 2 stored already, 0 failed"
    changed = runner.run(expand(notebooks, toy, SEED=1), lines.append)
    assert [d.status for d in changed] == ["ok", "ok"]


def test_failures_are_recorded_and_the_rest_goes_on(notebooks: Path) -> None:
    ways = ["error", "oom", "die", "quit", "check", "no"]
    done = runner.run(expand(notebooks, {"notebook": "05_toy", "sweep": {"FAIL": ways}}), str)
    assert [d.status for d in done] == ["failed"] * 5 + ["ok"]
    error, oom, dead, quit_, check, _ = (d.error for d in done)
    assert error is not None
    assert (error.type, error.message) == ("ValueError", "it broke on two lines")
    assert oom is not None
    assert (oom.type, oom.message) == ("OutOfMemory", "Tried to allocate 20.00 GiB")
    assert dead is not None
    assert dead.type == "DeadKernel"
    assert quit_ is not None
    assert quit_.type == "NoRecord"
    assert check is not None
    assert (check.type, check.message) == ("AssertionError", "a check failed")
    for (_, way), record in records(notebooks).items():
        assert record.status == ("ok" if way == "no" else "failed")
        assert (record.error is None) == (way == "no")
    assert runner.summary(done) == "6 points: 1 run, 0 stored already, 5 failed"


def hold_in_grid(notebooks: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The checkout's grid of the test profile holds this notebook alone."""
    grid = notebooks.parent / "env" / "grids" / "test.yaml"
    grid.parent.mkdir(parents=True, exist_ok=True)
    grid.write_text(f"points: [{{notebook: {name}}}]")
    monkeypatch.setattr(grids, "repository", lambda: notebooks.parent)


def test_a_kernel_that_died_over_a_trial_leaves_a_trial(
    notebooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_in_grid(notebooks, monkeypatch, "10_paper_vs_ours")
    monkeypatch.setattr(runner, "execute", lambda point, say: None)
    (done,) = runner.run(expand(notebooks, {"notebook": "05_toy"}), str)
    assert done.status == "failed"
    assert runner.summary([done]) == "1 point: 0 run, 0 stored already, 1 failed"
    assert records(notebooks)[3, "no"].provenance["grid_point"] is False


def test_a_stored_trial_that_the_grid_takes_in_goes_to_its_notebook_again(
    notebooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (point,) = expand(notebooks, {"notebook": "05_toy"})
    assert isinstance(point.chosen, ExperimentParameters)
    hold_in_grid(notebooks, monkeypatch, "10_paper_vs_ours")
    run_point("toy", point.chosen)
    assert [d.status for d in runner.run([point], str)] == ["stored"]
    hold_in_grid(notebooks, monkeypatch, "05_toy")
    executed: list[grids.Point] = []
    monkeypatch.setattr(runner, "execute", lambda point, say: executed.append(point))
    assert [d.status for d in runner.run([point], str)] == ["ok"]
    assert executed == [point]


def test_a_truncated_file_is_computed_again(notebooks: Path) -> None:
    points = expand(notebooks, {"notebook": "05_toy"})
    runner.run(points, str)
    (file,) = (notebooks.parent / "out").rglob("toy/*.json")
    file.write_text(file.read_text()[:-40])
    assert [d.status for d in runner.run(points, str)] == ["ok"]
    assert json.loads(file.read_text())["status"] == "ok"


def test_a_time_budget_stops_between_points(
    notebooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = {"notebook": "05_toy", "sweep": {"N": [1, 2, 3]}}
    points = expand(notebooks, toy, {"notebook": "10_paper_vs_ours"}, TIME_BUDGET_MIN=1e-4)
    monkeypatch.setattr(runner, "execute", lambda point, say: None)
    monkeypatch.setattr(runner, "_settle", lambda *args: None)
    clock = itertools.count(step=1.0)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    done = runner.run(points, str)
    assert [d.status for d in done] == ["not started"] * 3 + ["ok"]
    assert runner.summary(done).endswith("time budget reached: 1 of 4 done, rerun to continue")


def test_it_goes_on_from_an_attached_earlier_output(
    notebooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = {"notebook": "05_toy", "sweep": {"N": [1, 2]}}
    first, _ = points = expand(notebooks, toy)
    assert [d.status for d in runner.run([first], str)] == ["ok"]
    attached = notebooks.parent / "input" / "notebooks" / "me" / "earlier"
    attached.parent.mkdir(parents=True)
    (notebooks.parent / "out").rename(attached)
    monkeypatch.setattr(platform, "KAGGLE_INPUT", notebooks.parent / "input")
    executed: list[grids.Point] = []
    monkeypatch.setattr(runner, "execute", lambda point, say: executed.append(point))
    monkeypatch.setattr(runner, "_settle", lambda *args: None)
    assert [d.status for d in runner.run(points, str)] == ["ok", "ok"], "not attached on Kaggle"
    executed.clear()
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert [d.status for d in runner.run(points, str)] == ["stored", "ok"]
    assert [point.chosen.model_dump()["N"] for point in executed] == [2]
