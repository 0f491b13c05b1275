"""Export to Kaggle: a real wheel, a notebook with its point's parameters, metadata, and refusals."""

import dataclasses
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import nbformat
import pytest
from typer.testing import CliRunner

from polykv_lib.study import cli, grid, kaggle
from polykv_lib.study.params import from_namespace, validate
from polykv_lib.study.platform import PlatformError

ROOT = Path(__file__).parents[2]
T4 = grid.expand(grid.load_grid(ROOT / "env/grids/t4.yaml"), ROOT / "notebooks", "t4")
LLAMA = [
    p
    for p in T4
    if p.key and p.chosen.model_dump()["MODEL"] == "meta-llama/Meta-Llama-3-8B-Instruct"
]


def export(folder: Path, *options: str) -> Any:
    return CliRunner().invoke(cli.app, ["kaggle", "export", str(folder), *options])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kaggle") / "out"
    result = export(
        folder, "--point", str(LLAMA[0].key)[:9], "--owner", "me", "--earlier", "me/first"
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"kaggle datasets create -p {folder / 'polykv-lib-wheels'} ")
    assert lines[1] == f"kaggle kernels push -p {kernel(folder)}"
    return folder


def kernel(folder: Path) -> Path:
    return next(folder.glob("polykv-0*"))


def cells(folder: Path) -> dict[str, str]:
    [file] = kernel(folder).glob("*.ipynb")
    book = nbformat.read(file, as_version=4)
    nbformat.validate(book)
    assert "papermill" not in book.metadata, "it would name a path of this machine"
    return {cell.id: cell.source for cell in book.cells}


def test_the_metadata_asks_for_two_t4s_and_attaches_model_and_wheel(folder: Path) -> None:
    about = json.loads((kernel(folder) / "kernel-metadata.json").read_text())
    assert about["id"] == f"me/{kernel(folder).name}"
    assert about["title"].replace(" ", "-") == kernel(folder).name
    assert len(about["title"]) <= 50
    assert (kernel(folder) / about["code_file"]).is_file()
    assert (about["enable_gpu"], about["machine_shape"]) == (True, "NvidiaTeslaT4")
    assert about["enable_internet"] is True
    assert about["model_sources"] == ["metaresearch/llama-3/transformers/8b-chat-hf/1"]
    assert about["kernel_sources"] == ["me/first"]
    dataset = json.loads((folder / "polykv-lib-wheels" / "dataset-metadata.json").read_text())
    assert about["dataset_sources"] == [dataset["id"]]


def test_the_notebook_runs_its_point_without_further_parameters(folder: Path) -> None:
    names = list(cells(folder))
    assert names[:2] == ["title", "install"]
    space: dict[str, Any] = {}
    injected = names[names.index("parameters") + 1]
    for name in ("parameters", injected):
        exec(cells(folder)[name], space)
    chosen = LLAMA[0].chosen.model_dump()
    assert {name: space[name] for name in chosen} == chosen


def test_no_name_of_the_install_cell_is_taken_for_a_parameter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells before the set-up run as they are exported, in one namespace."""
    source, notebook = cells(folder), LLAMA[0].source.stem
    names = json.loads(source["install"].partition("names = ")[2].splitlines()[0])
    here = [SimpleNamespace(name=name) for name in names]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: here)
    space: dict[str, Any] = {}
    for name, code in itertools.takewhile(lambda cell: cell[0] != "setup", source.items()):
        if name != "title":
            exec(code, space)
    assert validate(notebook, from_namespace(notebook, space)) == LLAMA[0].chosen


def test_the_wheel_holds_the_library_and_the_first_cell_installs_it(
    folder: Path, tmp_path: Path
) -> None:
    [wheel] = (folder / "polykv-lib-wheels").glob("*.whl")
    assert "polykv_lib/study/cli.py" in ZipFile(wheel).namelist()
    cell = cells(folder)["install"]
    assert '"jaxtyping"' in cell
    assert '"gensim"' in cell
    nothing_installed = "import importlib.metadata as m\nm.distributions = lambda: []\n"

    def run(mounted: Path) -> subprocess.CompletedProcess[str]:
        names = cell.index("names = ")
        own = f'names = ["polykv-lib"]{cell[cell.index(chr(10), names) :]}'
        code = nothing_installed + (cell[:names] + own).replace("/kaggle/input", str(mounted))
        environment = {**os.environ, "PIP_TARGET": str(tmp_path / "site"), "PIP_NO_INDEX": "1"}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )

    (tmp_path / "empty").mkdir()
    alone = run(tmp_path / "empty")
    assert alone.returncode == 1
    assert (
        alone.stderr == "Attach the dataset that holds the wheel of polykv-lib, then run again.\n"
    )
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"installed: {wheel.name}\n"
    assert (tmp_path / "site" / "polykv_lib" / "study").is_dir()


def test_without_internet_every_wheel_goes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(kaggle, "_pip", lambda *arguments: calls.append(arguments))
    options = kaggle.Options(owner="me", internet=False)
    kaggle.export(tmp_path / "out", LLAMA[:1], ROOT, options)
    about = json.loads((kernel(tmp_path / "out") / "kernel-metadata.json").read_text())
    assert about["enable_internet"] is False
    own, others = calls
    assert own[0] == "wheel"
    assert others[:4] == ("download", "--no-deps", "--python-version", "3.12")
    assert [Path(name).name for name in others if name.endswith(".txt")] == [
        "requirements-kaggle.txt",
        "requirements-offline.txt",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--notebook", "99"], "99 matches no notebook of the grid: "),
        (["--notebook", "10"], "these notebooks only read results; choose one that computes"),
        (["--point", "0000"], "no point '0000' here. `polykv run --profile t4 --dry-run` lists"),
        (["--point", ""], "no point '' here"),
        (["--profile", "t5"], "no profile 't5'"),
        (["--owner", "a b/c"], "'a b/c' names nothing on Kaggle; pass an account's name"),
        (["--earlier", "first"], "'first' names nothing on Kaggle; pass owner/slug"),
        (["--model-source", "me/llama"], "'me/llama' names nothing on Kaggle; pass owner/model/"),
        (
            ["--notebook", "01", "--no-internet"],
            "no copy of HuggingFaceTB/SmolLM2-1.7B-Instruct on",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(options: list[str], said: str, tmp_path: Path) -> None:
    result = export(tmp_path / "out", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"polykv: {said}")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.ipynb"))


def test_a_folder_in_use_and_a_point_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    result = export(tmp_path, "--notebook", "01")
    assert (result.exit_code, result.stderr) == (
        2,
        f"polykv: {tmp_path} is not empty; name a new folder\n",
    )
    monkeypatch.setattr(kaggle, "TWO_T4", dataclasses.replace(kaggle.TWO_T4, n_devices=1))
    with pytest.raises(PlatformError, match=r"does not fit: weights 16\.06"):
        kaggle.export(tmp_path / "out", LLAMA[:1], ROOT, kaggle.Options(owner="me"))


def test_the_owner_is_that_of_the_remote_or_a_placeholder(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    assert kaggle.owner_of(tmp_path) == "YOUR-KAGGLE-NAME"
    subprocess.run(
        [*git, "remote", "add", "origin", "https://github.com/someone/x.git"], check=True
    )
    assert kaggle.owner_of(tmp_path) == "someone"
