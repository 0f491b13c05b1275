"""What a notebook calls, in this process: compute once, store, show, and store failures too."""

import sys
from pathlib import Path
from typing import Any

import pytest
import toy_experiment

from polykv_lib.study import notebook
from polykv_lib.study.record import Record
from polykv_lib.study.store import Store, collect

pytestmark = pytest.mark.usefixtures("toy")


def chosen(out: Path, **changes: Any) -> toy_experiment.Toy:
    values = {
        "PROFILE": "test",
        "MODEL": "smollm2-135m",
        "SEED": 0,
        "OUT_DIR": str(out),
        "FORCE": False,
    }
    return toy_experiment.Toy(**{**values, "TIME_BUDGET_MIN": 0, "N": 3, "FAIL": "no", **changes})


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    run = toy_experiment.run
    monkeypatch.setattr(
        sys.modules["polykv_lib.study.experiments.toy"],
        "run",
        lambda resolved, say: calls.append(resolved) or run(resolved, say),
    )
    return calls


def test_a_point_is_computed_once(
    tmp_path: Path, counted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first = notebook.run_point("toy", chosen(tmp_path))
    assert notebook.run_point("toy", chosen(tmp_path)) == first
    assert counted == [{"MODEL": "smollm2-135m", "SEED": 0, "N": 3, "FAIL": "no"}]
    notebook.run_point("toy", chosen(tmp_path, FORCE=True))
    notebook.run_point("toy", chosen(tmp_path, N=4))
    assert len(counted) == 3
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "… counting to 3"
    assert (
        said[1]
        == f"toy {first.key}: 1 rows, stored in {tmp_path / 'data/results/test/toy' / first.key}.json"
    )
    assert f"toy {first.key} is in the store already; FORCE=True computes it again" in said


def test_a_trial_is_marked_until_the_grid_takes_it_in(
    tmp_path: Path,
    notebooks: Path,
    counted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid, results = tmp_path / "env" / "grids" / "test.yaml", tmp_path / "data" / "results"
    grid.parent.mkdir(parents=True)
    grid.write_text("points: [{notebook: 05_toy}]")
    monkeypatch.setattr("polykv_lib.study.grid.repository", lambda: notebooks.parent)
    point = notebook.run_point("toy", chosen(tmp_path))
    assert "not a point of the grid" not in capsys.readouterr().out
    trial = notebook.run_point("toy", chosen(tmp_path, N=4))
    assert [r.provenance["grid_point"] for r in (point, trial)] == [True, False]
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"toy {trial.key} is not a point of the grid: stored, but kept out of the tables"
    )
    with pytest.raises(ValueError, match="it broke"):
        notebook.run_point("toy", chosen(tmp_path, FAIL="error"))
    assert collect(results) == [point]
    assert len(collect(results, include_trials=True)) == 3

    grid.write_text("points: [{notebook: 05_toy, sweep: {N: [3, 4]}}]")
    taken_in = notebook.run_point("toy", chosen(tmp_path, N=4))
    assert taken_in.rows == trial.rows
    assert {r.key for r in collect(results)} == {point.key, trial.key}
    assert len(counted) == 3, "nothing is computed again"


def test_a_profile_without_a_grid_holds_any_point_and_an_unreadable_grid_none(
    tmp_path: Path, notebooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = tmp_path / "env" / "grids" / "test.yaml"
    grid.parent.mkdir(parents=True)
    monkeypatch.setattr("polykv_lib.study.grid.repository", lambda: notebooks.parent)
    for text in (None, "points: [", "points: [{notebook: 10_paper_vs_ours}]"):
        if text:
            grid.write_text(text)
        record = notebook.run_point("toy", chosen(tmp_path, FORCE=True))
        assert record.provenance["grid_point"] is (text is None)


def test_provenance_tells_code_machine_and_protocol(tmp_path: Path) -> None:
    facts = notebook.run_point("toy", chosen(tmp_path)).provenance
    assert facts["dtype"] == "float32"
    assert facts["library"] == "0.1.0"
    assert isinstance(facts["packages"], dict)
    assert {"torch", "transformers", "papermill"} <= set(facts["packages"])
    for name in (
        "git",
        "python",
        "cpu",
        "cpu_cores",
        "gpus",
        "started",
        "finished",
        "wall_s",
        "platform",
    ):
        assert name in facts, name


def test_a_failure_is_stored_and_raised_and_tried_again(tmp_path: Path, counted: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="it broke"):
            notebook.run_point("toy", chosen(tmp_path, FAIL="error"))
    assert len(counted) == 2
    (failed,) = collect(tmp_path, include_trials=True)
    assert failed.error is not None
    assert (failed.status, failed.error.type, failed.rows) == ("failed", "ValueError", [])


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("OutOfMemoryError", "Tried to allocate 20.00 GiB", "OutOfMemory"),
        ("MemoryError", "", "OutOfMemory"),
        (
            "RuntimeError",
            "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes",
            "OutOfMemory",
        ),
        ("ValueError", "wrong", "ValueError"),
    ],
)
def test_running_out_of_memory_has_one_name(kind: str, message: str, expected: str) -> None:
    assert notebook.failure(kind, message).type == expected


def test_earlier_outputs_spare_the_work(
    tmp_path: Path, counted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = notebook.run_point("toy", chosen(tmp_path / "earlier"))
    places = notebook.platform.Places(
        base=tmp_path / "now", earlier=(tmp_path / "earlier" / "data" / "results",)
    )
    monkeypatch.setattr(notebook.platform.Places, "at", lambda *_: places)
    assert notebook.run_point("toy", chosen(tmp_path)) == stored
    assert len(counted) == 1
    assert not places.results.exists()


def test_progress_is_a_few_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    say = notebook.Progress(every_s=60.0)
    for i in range(1000):
        say(f"step {i}")
    assert capsys.readouterr().out == "… step 0\n"


def test_show_gives_a_table_of_ours_with_metrics_across(synthetic: list[Record]) -> None:
    shown = notebook.show(synthetic[1], "ppl")
    assert {"codec", "kl_nats", "kl_nats lo", "kl_nats hi"} <= set(shown.columns)


def test_show_gives_any_other_table_as_stored(tmp_path: Path) -> None:
    record = notebook.run_point("toy", chosen(tmp_path))
    shown = notebook.show(record, "toy")
    assert list(shown["value"]) == [3]
    assert {"metric", "value", "unit", "n_agents"} <= set(shown.columns)
    assert "lo" not in shown.columns
    assert notebook.show(record, "other").empty


def test_auto_takes_the_results_folder_from_the_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook.platform, "gpus", tuple)
    assert notebook.profile_of(chosen(tmp_path, PROFILE="auto")) == "offline"
    assert notebook.store_of(chosen(tmp_path)) == Store(
        write=tmp_path / "data" / "results" / "test"
    )


def test_a_record_without_rows_is_valid() -> None:
    assert Record(experiment="toy", key="k", params={}, status="failed").rows == []
