"""The console command: exit codes and one-line errors."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polykv_lib.study import cli, doctor, run
from polykv_lib.study.record import Failure, Record
from polykv_lib.study.store import Store

ROOT = Path(__file__).parents[2]


def polykv(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "offlne"], "no profile 'offlne'"),
        (["--only", "99"], "--only 99 matches no notebook"),
        (
            ["--set", "CONTEXT_TOKEN=[1]"],
            "unknown parameter CONTEXT_TOKEN; did you mean CONTEXT_TOKENS?",
        ),
        (["--set", "SEED"], "--set SEED: expected NAME=VALUE"),
        (["--set", "N_BOOT=none"], "N_BOOT='none': input should be a valid integer"),
    ],
)
def test_run_refuses_mistakes_in_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = polykv("run", "--out", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"polykv: {said}")
    assert result.stderr.count("\n") == 1


def test_run_refuses_a_folder_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = polykv("run", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "cannot write results to" in result.stderr


def test_run_passes_options_on_and_fails_if_a_point_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def execute(point: Any, say: Any) -> Failure:
        seen.append(point.chosen)
        return Failure(type="DeadKernel", message="Kernel died")

    monkeypatch.setattr(run, "execute", execute)
    result = polykv(
        "run",
        "--profile",
        "smoke",
        "--only",
        "03",
        "--set",
        "N_DOCS=2",
        "--force",
        "--out",
        str(tmp_path),
    )
    assert result.exit_code == 1
    assert "03_agent_fidelity: FAILED, DeadKernel: Kernel died" in result.stdout
    assert "1 points: 0 run, 0 stored already, 1 failed" in result.stdout
    (given,) = seen
    assert given.N_DOCS == 2
    assert given.FORCE
    assert str(tmp_path) == given.OUT_DIR


def test_tables_and_figures_come_from_stored_results(
    tmp_path: Path, synthetic: list[Record]
) -> None:
    for record in synthetic:
        Store(write=tmp_path / "data" / "results" / "synthetic").put(record)
    assert polykv("tables", "--out", str(tmp_path)).exit_code == 0
    assert (tmp_path / "figures" / "tables" / "paper_vs_ours.md").is_file()
    drawn = polykv("figures", "--out", str(tmp_path))
    assert drawn.exit_code == 0
    assert any((tmp_path / "figures").glob("*.png"))


def test_doctor_fails_only_on_what_stops_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.Check
    found = [
        check(status="ok", what="python", found="3.11"),
        check(status="note", what="hub", found="no", advice="fine"),
    ]
    monkeypatch.setattr(doctor, "checks", lambda out: iter(found))
    result = polykv("doctor")
    assert result.exit_code == 0
    assert result.stdout == "ok    python: 3.11\nnote  hub: no -> fine\n"
    found.append(check(status="FAIL", what="torch", found="missing", advice="install it"))
    assert polykv("doctor").exit_code == 1
