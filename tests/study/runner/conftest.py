"""A checkout in miniature: one notebook with a toy experiment, and one that only reads."""

import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for toy_experiment, here and in kernels
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
PARAMETERS = """PROFILE: str = "auto"  # results folder
MODEL: str = "smollm2-135m"  # no model is loaded
SEED: int = 0  # 0 or more
OUT_DIR: str = ""  # output
FORCE: bool = False  # again
TIME_BUDGET_MIN: float = 0  # minutes
N: int = 3  # a number
FAIL: str = "no"  # how to fail"""


def write_notebook(file: Path, *cells: str, parameters: str = PARAMETERS) -> Path:
    tagged = new_code_cell(parameters, metadata={"tags": ["parameters"]})
    start = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parents[2])]}\nimport toy_experiment; toy_experiment.install()"
    sources = ["from polykv_lib.study import notebook", *cells]
    book = new_notebook(
        cells=[new_code_cell(start), tagged, *map(new_code_cell, sources)], metadata=KERNEL
    )
    nbformat.write(book, file)
    return file


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy experiment, known to the library for one test."""
    import toy_experiment

    from polykv_lib.study import params

    monkeypatch.setitem(params.NOTEBOOKS, "05_toy", toy_experiment.Toy)
    name = "polykv_lib.study.experiments.toy"
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    toy_experiment.install()


@pytest.fixture
def notebooks(tmp_path: Path, toy: None) -> Iterator[Path]:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    write_notebook(
        folder / "05_toy.ipynb",
        'P = notebook.setup("05_toy", globals())',
        'record = notebook.run_point("toy", P)',
        'notebook.show(record, "toy")',
        'assert P.FAIL != "check", "a check failed"',
    )
    write_notebook(
        folder / "10_paper_vs_ours.ipynb",
        'P = notebook.setup("10_paper_vs_ours", globals())',
        "assert 'torch' not in sys.modules",
        parameters='PROFILE: str = "auto"  # profile\nOUT_DIR: str = ""  # output',
    )
    return folder
