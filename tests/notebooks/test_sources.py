"""Notebooks against the library: same parameters, same first cell, found and lost in the right ways."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from polykv_lib.study import grid, params
from polykv_lib.study.index import about

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
FIRST = ["title", "library", "parameters", "setup"]
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def cell(path: Path, name: str) -> str:
    return next(c.source for c in read(path).cells if c.id == name)


def papermill(
    source: Path, target: Path, *options: str, cwd: Path, pythonpath: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """A bare papermill run, as a stranger types it."""
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(source),
        str(target),
        "--no-progress-bar",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(pythonpath)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_library_and_the_folder_name_the_same_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(params.NOTEBOOKS)


@every_notebook
def test_its_parameters_are_those_the_library_checks(path: Path) -> None:
    defaults = grid.notebook_defaults(path)
    schema = params.NOTEBOOKS[path.stem]
    assert set(defaults) == set(schema.model_fields)
    checked = params.validate(path.stem, defaults).model_dump()
    assert checked == defaults, "defaults are written as the values they mean"


@every_notebook
def test_it_computes_what_its_parameters_are_for(path: Path) -> None:
    experiment = params.NOTEBOOKS[path.stem].experiment
    assert (f'run_point("{experiment}", P)' in "".join(c.source for c in read(path).cells)) == bool(
        experiment
    )
    if experiment:
        assert find_spec(f"polykv_lib.study.experiments.{experiment}")


@every_notebook
def test_it_starts_like_every_other(path: Path) -> None:
    cells = read(path).cells
    assert [c.id for c in cells[:4]] == FIRST
    assert cell(path, "library") == cell(NOTEBOOKS[0], "library")
    assert cell(path, "setup") == f'P = notebook.setup("{path.stem}", globals())'
    title, time = about(path)
    assert title
    assert time
    assert "Reproduces" in cells[0].source


def trimmed(path: Path, target: Path, *more: str) -> Path:
    """A notebook up to its setup, with cells of the test's own."""
    book = read(path)
    book.cells = [*book.cells[:4], *(nbformat.v4.new_code_cell(text) for text in more)]
    nbformat.write(book, target)
    return target


def printed(path: Path) -> str:
    cells = [c for c in read(path).cells if c.cell_type == "code"]
    return "".join(
        o.text for c in cells for o in c.outputs if o.output_type == "stream" and o.name == "stdout"
    )


@pytest.mark.parametrize("folder", [".", "notebooks", "elsewhere"])
def test_any_working_directory_writes_to_the_same_place(folder: str, tmp_path: Path) -> None:
    source = trimmed(ROOT / "notebooks" / "10_paper_vs_ours.ipynb", tmp_path / "in.ipynb")
    cwd = tmp_path if folder == "elsewhere" else ROOT / folder
    ran = papermill(
        source,
        tmp_path / "out.ipynb",
        cwd=cwd,
        pythonpath=ROOT if folder == "elsewhere" else tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert (
        printed(tmp_path / "out.ipynb").rstrip().endswith(f"results in {ROOT / 'data' / 'results'}")
    )


def test_alone_it_says_how_to_get_the_library(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'polykv_lib':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name='polykv_lib')\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    alone = tmp_path / "alone"
    alone.mkdir()
    source = trimmed(NOTEBOOKS[1], alone / "in.ipynb")
    ran = papermill(source, alone / "out.ipynb", cwd=alone, pythonpath=tmp_path)
    assert ran.returncode == 1
    code = [c for c in read(alone / "out.ipynb").cells if c.cell_type == "code"]
    errors = [o for c in code for o in c.outputs if o.output_type == "error"]
    assert [(e.ename, e.evalue) for e in errors] == [
        (
            "SystemExit",
            "Python module 'polykv_lib' is missing: clone the repository and run `pip install -e .` in it, "
            "or on Kaggle attach its wheel as a dataset and pip install that; then run again.",
        )
    ]
    assert [bool(c.outputs) for c in code] == [True, False, False], "it stops in its first cell"


def test_parameters_of_a_bare_run_are_taken_at_their_meaning(tmp_path: Path) -> None:
    source = trimmed(
        ROOT / "notebooks" / "01_memory_scaling.ipynb",
        tmp_path / "in.ipynb",
        "print(P.FORCE, P.N_AGENTS, P.CONTEXT_TOKENS)",
    )
    given = ["-p", "FORCE", "false", "-p", "N_AGENTS", "[1,3]", "-p", "CONTEXT_TOKENS", "1e1"]
    ran = papermill(
        source, tmp_path / "out.ipynb", *given, "-p", "OUT_DIR", str(tmp_path), cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert printed(tmp_path / "out.ipynb").splitlines()[-1] == "False [1, 3] [10]"


def test_a_misspelt_parameter_stops_a_bare_run(tmp_path: Path) -> None:
    source = trimmed(ROOT / "notebooks" / "01_memory_scaling.ipynb", tmp_path / "in.ipynb")
    ran = papermill(source, tmp_path / "out.ipynb", "-p", "CONTEXT_TOKEN", "256", cwd=tmp_path)
    assert ran.returncode == 1
    assert "unknown parameter CONTEXT_TOKEN; did you mean CONTEXT_TOKENS?" in ran.stderr
