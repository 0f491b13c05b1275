"""A record's commit: what counts as changed since."""

import subprocess
from pathlib import Path

import pytest

from polykv_lib.study import provenance


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("polykv_lib/a.py", "polykv_lib/study/b.mplstyle", "notebooks/00.ipynb",
                 "env/grids/offline.yaml", "env/requirements.txt", "pyproject.toml",
                 "data/results/x.json", "data/tables/x.md", "figures/x.pdf", "README.md",
                 "tests/test_a.py"):  # fmt: skip
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    who = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def dirty(root: Path) -> bool:
    state = provenance.git_state(root)
    assert state is not None
    assert len(state["commit"]) == 40
    return bool(state["dirty"])


def test_what_runs_write_leaves_a_checkout_clean(checkout: Path) -> None:
    assert not dirty(checkout)
    for name in ("data/results/x.json", "data/tables/x.md", "figures/x.pdf", "README.md",
                 "tests/test_a.py"):  # fmt: skip
        (checkout / name).write_text("after")
    (checkout / "data/results/x.json").unlink()
    assert not dirty(checkout)


@pytest.mark.parametrize(
    "name",
    ["polykv_lib/a.py", "polykv_lib/study/b.mplstyle", "notebooks/00.ipynb",
     "env/grids/offline.yaml", "env/requirements.txt", "pyproject.toml"],
)  # fmt: skip
def test_what_decides_a_result_does_not(checkout: Path, name: str) -> None:
    (checkout / name).write_text("after")
    assert dirty(checkout)
    (checkout / name).unlink()
    assert dirty(checkout)


def test_a_folder_without_history_has_no_commit(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path) is None
    assert provenance.git_state(None) is None
