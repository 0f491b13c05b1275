"""A point that is interrupted goes on where it stopped, if everything is as it was."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_experiment
from test_notebook import chosen

from polykv_lib import sources
from polykv_lib.study import notebook, parts, platform
from polykv_lib.study.parts import Parts, keeping, part

pytestmark = pytest.mark.usefixtures("toy")


class Interrupted(BaseException):
    pass


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers counted so far; the third one of all interrupts."""
    calls: list[int] = []

    def count(i: int) -> int:
        calls.append(i)
        if len(calls) == 3:
            raise Interrupted
        return i

    monkeypatch.setattr(toy_experiment, "count", count)
    return calls


def interrupted(out: Path, **changes: Any) -> None:
    with pytest.raises(Interrupted):
        notebook.run_point("toy", chosen(out, N=5, **changes))


def test_an_interruption_costs_one_part(
    tmp_path: Path, counted: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(tmp_path)
    record = notebook.run_point("toy", chosen(tmp_path, N=5))
    assert counted == [0, 1, 2, 2, 3, 4]
    assert record.rows[0].value == 5
    assert record.provenance["parts_of_earlier_runs"] == 2
    assert f"toy {record.key}: 2 parts are there from an earlier run" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.part")), "a stored point needs no parts"
    forced = notebook.run_point("toy", chosen(tmp_path, N=5, FORCE=True))
    assert (len(counted), forced.provenance["parts_of_earlier_runs"]) == (11, 0)


def test_a_forced_point_takes_nothing_up(tmp_path: Path, counted: list[int]) -> None:
    interrupted(tmp_path)
    notebook.run_point("toy", chosen(tmp_path, N=5, FORCE=True))
    assert counted == [0, 1, 2, 0, 1, 2, 3, 4]


def test_other_code_or_parameters_take_nothing_up(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path)
    notebook.run_point("toy", chosen(tmp_path, N=4))
    monkeypatch.setattr(parts, "made_with", lambda: "0")
    notebook.run_point("toy", chosen(tmp_path, N=5))
    assert counted == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert not list(tmp_path.rglob("*.part"))


def test_a_broken_part_is_computed_again(
    tmp_path: Path, counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(tmp_path)
    [file] = tmp_path.rglob("0.part")
    file.write_bytes(file.read_bytes()[:40])
    with caplog.at_level(logging.WARNING):
        notebook.run_point("toy", chosen(tmp_path, N=5))
    assert counted == [0, 1, 2, 0, 2, 3, 4]
    assert f"{file} is broken and computed again" in caplog.text


def test_parts_of_an_attached_output_are_read_and_left(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "earlier")
    attached = (tmp_path / "earlier" / "data" / "results",)
    here = platform.Places(base=tmp_path / "now", earlier=attached)
    monkeypatch.setattr(platform.Places, "at", lambda out_dir="": here)
    record = notebook.run_point("toy", chosen(tmp_path / "now", N=5))
    assert record.provenance["parts_of_earlier_runs"] == 2
    assert [file.stem for file in sorted(tmp_path.rglob("*.part"))] == ["0", "1"]


def test_a_part_is_the_same_when_read_back(tmp_path: Path) -> None:
    value = {"x": torch.randn(3), "y": [(1, "é")]}
    found = []
    for _ in range(2):
        with keeping(Parts(write=tmp_path / "point" / "code")):
            found.append(part("a", lambda: value))
    assert torch.equal(found[1]["x"], value["x"])
    assert found[1]["y"] == value["y"]
    assert part("a", lambda: 1) == 1, "outside, nothing is kept"


def test_a_change_of_code_is_another_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    (tmp_path / "hf").mkdir()
    digests = []
    for code in ("a = 1", "a = 1", "a = 2"):
        (tmp_path / "a.c").write_text(code)
        sources.digest.cache_clear()
        digests.append((sources.digest(), sources.digest("hf")))
    sources.digest.cache_clear()
    assert digests[0] == digests[1] != digests[2]
    assert digests[0][1] == digests[2][1], "another room is another code"


def test_another_device_is_another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for names in ([], ["T4"], ["T4", "T4"]):
        monkeypatch.setattr(torch.cuda, "device_count", lambda names=names: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i, names=names: names[i])
        parts.made_with.cache_clear()
        found.append(parts.made_with())
    parts.made_with.cache_clear()
    assert len(set(found)) == 3
