"""Notebooks are sources: they call the library, take parameters, and keep no output."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def is_parameters(cell: nbformat.NotebookNode) -> bool:
    return "parameters" in cell.metadata.get("tags", [])


def test_it_is_valid_and_runs_on_the_plain_kernel(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    assert "widgets" not in notebook.metadata, "GitHub cannot show a notebook with widget state"


def test_it_keeps_no_output(path: Path) -> None:
    for cell in code_cells(path):
        assert not cell.outputs, "outputs belong to data/runs, not to git"
        assert cell.execution_count is None


def test_it_has_one_parameters_cell_of_literals(path: Path) -> None:
    tagged = [cell for cell in code_cells(path) if is_parameters(cell)]
    assert len(tagged) == 1, "papermill needs exactly one cell tagged `parameters`"
    for line in filter(str.strip, tagged[0].source.splitlines()):
        assert re.match(r"#|[A-Z][A-Z0-9_]*: \S.* = .+  # \S", line), (
            f"{line!r}: write NAME: type = default  # help"
        )


def test_cells_have_readable_unique_ids(path: Path) -> None:
    ids = [cell.id for cell in nbformat.read(path, as_version=4).cells]
    assert len(set(ids)) == len(ids)
    unreadable = [name for name in ids if re.fullmatch(r"[0-9a-f-]{8,}", name)]
    assert not unreadable, f"{unreadable}: name cells by what they do"


def test_cells_are_short_and_leave_the_work_to_the_library(path: Path) -> None:
    for cell in code_cells(path):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert is_parameters(cell) or len(lines) <= 12, f"{cell.id}: move it into polykv_lib"
        assert not re.search(r"^\s*(def|class) |pyplot|plt\.", cell.source, re.M), cell.id
