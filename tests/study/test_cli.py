"""The console command: exit codes and one-line errors."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polykv_lib.study import cli, doctor, run
from polykv_lib.study.record import Failure, Record
from polykv_lib.study.store import Store
from polykv_lib.study.tables import BEGIN, END

ROOT = Path(__file__).parents[2]


def polykv(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "offlne"], "no profile 'offlne'"),
        (["--only", "99"], "99 matches no notebook"),
        (
            ["--set", "CONTEXT_TOKEN=[1]"],
            "unknown parameter CONTEXT_TOKEN; did you mean CONTEXT_TOKENS? This run takes ",
        ),
        (["--dask", "127.0.0.1:1"], "no Dask scheduler answers at '127.0.0.1:1'"),
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
    assert "set OUT_DIR or --out to a folder you may write" in result.stderr


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
    assert "1 point: 0 run, 0 stored already, 1 failed" in result.stdout
    (given,) = seen
    assert given.N_DOCS == 2
    assert given.FORCE
    assert str(tmp_path) == given.OUT_DIR


def test_a_dry_run_lists_keys_time_and_memory_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "execute", lambda *_: pytest.fail("it ran"))
    llama = ["--set", "MODEL=llama-3-8b", "--set", "PREFIX_TOKENS=[90000]"]
    result = polykv("run", "--profile", "t4", "--only", "02", "--out", str(tmp_path), "--dry-run")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) >= 5
    *points, total = result.stdout.splitlines()
    assert re.match(r"not stored: about \d+ (s|min) in all", total)
    for line in points:
        assert re.match(r"[0-9a-f]{16}  02_ppl_inversion .*: about .* on 2 x T4$", line)
    refused = polykv("run", "--profile", "t4", "--only", "02", *llama, "--dry-run")
    assert "llama-3-8b: DOES NOT FIT; about" in refused.stdout


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


def stored(out: Path, records: list[Record], profile: str) -> None:
    for record in records:
        mine = record.model_copy(update={"provenance": {"profile": profile}})
        Store(write=out / "data" / "results" / profile).put(mine)


def readme_with_markers(folder: Path) -> Path:
    file = folder / "README.md"
    file.write_text(f"{BEGIN}\nold\n{END}\n")
    return file


@pytest.mark.parametrize("command", ["tables", "figures"])
def test_results_of_an_unknown_profile_are_refused(
    command: str, tmp_path: Path, synthetic: list[Record]
) -> None:
    stored(tmp_path, synthetic, "gpu")
    for mistake in ("offlne", "../results/gpu", "auto"):
        result = polykv(command, "--out", str(tmp_path), "--profile", mistake)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"polykv: no profile {mistake!r}")
        assert "gpu, offline, offline-full, smoke, t4" in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "figures").exists()
    assert polykv(command, "--out", str(tmp_path), "--profile", "gpu").exit_code == 0


@pytest.mark.parametrize("command", ["tables", "figures"])
def test_smoke_is_drawn_apart(command: str, tmp_path: Path, synthetic: list[Record]) -> None:
    stored(tmp_path, synthetic, "smoke")
    assert polykv(command, "--out", str(tmp_path), "--profile", "smoke").exit_code == 0
    apart = tmp_path / "data" / "runs" / "smoke" / "figures"
    assert list(apart.glob("tables/ppl.md" if command == "tables" else "*.png"))
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("profile", ["", "offline", "smoke"])
def test_without_results_both_say_what_to_run_and_write_nothing(
    profile: str, tmp_path: Path
) -> None:
    readme = readme_with_markers(tmp_path)
    for command in (["tables", "--readme", str(readme)], ["figures"]):
        result = polykv(*command, "--out", str(tmp_path), "--profile", profile)
        assert result.exit_code == 1
        assert f"run the grid first: polykv run --profile {profile or 'offline'}" in result.stderr
        assert result.stderr.count("\n") == 1
        assert not result.stdout
    assert list(tmp_path.iterdir()) == [readme]
    assert "old" in readme.read_text()


def test_tables_refuses_a_readme_it_cannot_fill(tmp_path: Path, synthetic: list[Record]) -> None:
    stored(tmp_path, synthetic, "offline")
    (tmp_path / "plain.md").write_text("no markers")
    (tmp_path / "swapped.md").write_text(f"{END}\n{BEGIN}\n")
    for name in ("missing.md", "plain.md", "swapped.md", "data"):
        file = tmp_path / name
        result = polykv("tables", "--out", str(tmp_path), "--readme", str(file))
        assert result.exit_code == 1
        assert result.stderr.startswith("polykv: ")
        assert str(file) in result.stderr
        assert result.stderr.count("\n") == 1
        assert isinstance(result.exception, SystemExit), "no traceback"
    assert not list((tmp_path / "figures").rglob("*.md"))
    readme = readme_with_markers(tmp_path)
    assert polykv("tables", "--out", str(tmp_path), "--readme", str(readme)).exit_code == 0
    assert "polykv run --profile offline" in readme.read_text()


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
