"""Every notebook really runs: the smoke grid in an empty folder, then again with nothing left to do."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from polykv_lib.study.params import NOTEBOOKS
from polykv_lib.study.store import collect

ROOT = Path(__file__).parents[2]
EXPERIMENTS = {schema.experiment for schema in NOTEBOOKS.values() if schema.experiment}
pytestmark = pytest.mark.slow


def smoke(out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "polykv_lib.study.cli",
        "run",
        "--profile",
        "smoke",
        "--out",
        str(out),
    ]
    # One thread: two for such small tensors wait for each other when other tests run beside.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    ran = smoke(folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (
        ran.stdout.splitlines()[-1]
        == f"{len(NOTEBOOKS)} points: {len(NOTEBOOKS)} run, 0 stored already, 0 failed"
    )
    assert ran.stderr == "", "a run that went well says nothing on stderr"
    return folder


def test_every_experiment_wrote_a_new_record(out: Path) -> None:
    records = collect(out / "data" / "results" / "smoke")
    assert sorted(r.experiment for r in records) == sorted(EXPERIMENTS)
    for record in records:
        assert record.status == "ok"
        assert record.rows
        assert record.samples or record.experiment == "memory_scaling"
        for name in ("dtype", "attention", "library", "packages", "finished", "profile"):
            assert record.provenance.get(name), f"{record.experiment} does not record its {name}"


def test_tables_and_figures_were_drawn_apart_from_the_published_ones(out: Path) -> None:
    figures = out / "data" / "runs" / "smoke" / "figures"
    assert (figures / "tables" / "paper_vs_ours.md").is_file()
    assert list(figures.glob("*.png"))
    assert list(figures.glob("*.pdf"))
    assert not (out / "figures").exists()


def test_executed_notebooks_are_small_and_plain(out: Path) -> None:
    executed = sorted((out / "data" / "runs" / "smoke").glob("*.ipynb"))
    assert {file.stem.partition("__")[0] for file in executed} == set(NOTEBOOKS)
    for file in executed:
        assert file.stat().st_size < 500_000, f"{file.name} is too large to read"
        cells = [c for c in nbformat.read(file, as_version=4).cells if c.cell_type == "code"]
        assert all(c.execution_count for c in cells), f"{file.name} did not run to its end"
        streams = [o for c in cells for o in c.outputs if o.output_type == "stream"]
        noise = [o.text for o in streams if o.name == "stderr" or "\r" in o.text]
        assert not noise, f"{file.name}: {noise}"


def test_a_second_run_computes_nothing(out: Path) -> None:
    before = {r.key: r.provenance["finished"] for r in collect(out / "data" / "results" / "smoke")}
    again = smoke(out)
    assert again.returncode == 0
    readers = len(NOTEBOOKS) - len(EXPERIMENTS)
    assert again.stdout.splitlines()[-1] == (
        f"{len(NOTEBOOKS)} points: {readers} run, {len(EXPERIMENTS)} stored already, 0 failed"
    )
    after = {r.key: r.provenance["finished"] for r in collect(out / "data" / "results" / "smoke")}
    assert after == before
