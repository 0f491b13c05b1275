"""The store: what a file looks like, what survives, what is never counted twice."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from polykv_lib.study import store as stores
from polykv_lib.study.record import Outcome, Record, Row
from polykv_lib.study.rows import tidy
from polykv_lib.study.store import Store, collect, key_of, load


def record(
    key: str = "0" * 16, *, finished: str = "2026-01-01", status: Any = "ok", **values: float
) -> Record:
    return Record(
        experiment="toy",
        key=key,
        params={"N": 1},
        status=status,
        rows=[
            Row(table="t", metric=name, value=value, unit="1", dims={"codec": "paper"})
            for name, value in values.items()
        ],
        samples=[{"text": "é", "nll": [1.5, None]}],
        provenance={"profile": "offline", "finished": finished},
    )


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(write=tmp_path)
    path = store.put(record(a=1, b=2))
    assert path == tmp_path / "toy" / f"{'0' * 16}.json"
    assert store.get("toy", "0" * 16) == record(a=1, b=2)
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"
    text = path.read_text()
    assert json.loads(text, parse_constant=pytest.fail)["schema"] == 1
    assert len([line for line in text.splitlines() if '"metric"' in line]) == 2, "one row a line"


def test_nan_never_reaches_a_file() -> None:
    for bad in (float("nan"), float("inf")):
        row = {"table": "t", "metric": "m", "value": bad, "unit": "1"}
        with pytest.raises(ValidationError, match="finite"):
            Outcome([row])  # type: ignore[list-item]
        with pytest.raises(ValidationError, match="finite"):
            Outcome([], [{"nll": [bad]}])
        with pytest.raises(ValidationError, match="finite"):
            Outcome([], [], {"loss": bad})


def test_the_key_follows_what_decides_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of("toy", {"A": 1, "B": [2]})
    assert key == key_of("toy", {"B": [2], "A": 1})
    assert len(key) == 16
    assert key != key_of("toy", {"A": 2, "B": [2]})
    assert key != key_of("other", {"A": 1, "B": [2]})
    monkeypatch.setattr("polykv_lib.__version__", "9.9.9")
    assert key != key_of("toy", {"A": 1, "B": [2]})


@pytest.mark.parametrize("damage", ["", "{", '{"schema": 2}', '{"rows": NaN}'])
def test_a_broken_file_is_not_trusted(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = Store(write=tmp_path).put(record(a=1))
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert load(path) is None
    assert "is not a valid record and is ignored" in caplog.text
    assert collect(tmp_path) == []


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Store(write=tmp_path).put(record(a=1))
    monkeypatch.setattr(
        stores.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        Store(write=tmp_path).put(record(a=2))
    assert load(path) == record(a=1)
    assert list(path.parent.iterdir()) == [path]


def test_earlier_outputs_are_read_and_never_written(tmp_path: Path) -> None:
    earlier, now = tmp_path / "earlier", tmp_path / "now"
    Store(write=earlier).put(record(a=1))
    store = Store(write=now, read=(earlier,))
    assert store.get("toy", "0" * 16) == record(a=1)
    store.put(record(a=2))
    assert store.get("toy", "0" * 16) == record(a=2)
    assert Store(write=earlier).get("toy", "0" * 16) == record(a=1)
    store.put(record(status="failed"))
    assert store.get("toy", "0" * 16) == record(a=1), "a failed one hides no other"


def test_a_number_measured_again_is_collected_once(tmp_path: Path) -> None:
    root = tmp_path / "offline"
    Store(write=root).put(record("a" * 16, finished="2026-02-02", x=2))
    Store(write=root).put(record("b" * 16, finished="2026-01-01", x=1, y=1))
    failed_a_check = record("c" * 16, finished="2026-03-03", status="failed", x=3, y=3)
    Store(write=root).put(failed_a_check)
    found = [(r.key[0], {row.metric: row.value for row in r.rows}) for r in collect(tmp_path)]
    assert found == [("b", {"y": 1}), ("a", {"x": 2}), ("c", {})]
    assert collect(tmp_path, experiment="other") == []


def test_what_another_cpu_measured_is_another_number(tmp_path: Path) -> None:
    for key, cpu in (("a", "one"), ("b", "other"), ("c", "other")):
        own = record(key * 16, finished=f"2026-01-0{'abc'.index(key) + 1}", x=1)
        own.rows[0].dims["device"] = "cpu"
        own.provenance["cpu"] = cpu
        Store(write=tmp_path / "offline").put(own)
    found = collect(tmp_path)
    assert [len(r.rows) for r in found] == [1, 0, 1]
    assert list(tidy(found)["device"]) == ["cpu, one", "cpu, other"]


def run_of(key: str, n_agents: list[int], codecs: list[str], finished: str) -> Record:
    """A run that times every codec, and slopes over its numbers of agents; a value says whose."""
    value = float(int(key, 16))
    at = [{"n_agents": n, "codec": codec} for n in n_agents for codec in codecs]
    rows = [Row(table="t", metric="ms", value=value, unit="ms", dims=dims) for dims in at]
    rows += [Row(table="slopes", metric="ms", value=value, unit="ms", dims={"codec": codec})
             for codec in codecs]  # fmt: skip
    made = record(key * 16, finished=finished)
    return made.model_copy(update={"rows": rows})


@pytest.mark.parametrize("later", ["1", "2"])
def test_a_narrower_run_adds_what_a_wider_one_lacks_and_replaces_nothing(
    tmp_path: Path, later: str
) -> None:
    wide = run_of("1", [1, 4, 15], ["full", "paper"], f"2026-01-0{2 if later == '1' else 1}")
    narrow = run_of("2", [1, 15], ["full", "lean"], f"2026-01-0{2 if later == '2' else 1}")
    for one in (wide, narrow):
        Store(write=tmp_path / "offline").put(one)
    found = collect(tmp_path)
    assert [r.key[0] for r in found] == ["2", "1"] if later == "1" else ["1", "2"]
    whose = tidy(found).groupby("codec")["value"].agg(lambda values: set(values)).to_dict()
    assert whose == {"full": {1.0}, "paper": {1.0}, "lean": {2.0}}
    assert len(tidy(found)) == len(wide.rows) + 3  # two steps and a slope of "lean"


def test_a_newer_version_replaces_even_a_wider_run(tmp_path: Path) -> None:
    wide = run_of("1", [1, 4, 15], ["full"], "2026-01-01")
    narrow = run_of("2", [1, 15], ["full"], "2026-01-02")
    for one, version in ((wide, "0.1"), (narrow, "0.2")):
        one.provenance["library"] = version
        Store(write=tmp_path / "offline").put(one)
    numbers = tidy(collect(tmp_path))
    steps = numbers[numbers["table"] == "t"].set_index("n_agents")["value"].to_dict()
    assert steps == {1: 2.0, 4: 1.0, 15: 2.0}


def test_a_trial_stays_out_of_the_tables_and_replaces_nothing(tmp_path: Path) -> None:
    study = record("a" * 16, x=1)
    trial = record("b" * 16, finished="2026-02-02", x=2)
    trial.provenance["grid_point"] = False
    for one in (study, trial):
        Store(write=tmp_path).put(one)
    assert collect(tmp_path) == [study]
    assert [r.key[0] for r in collect(tmp_path, include_trials=True)] == ["a", "b"]


def test_smoke_results_are_read_only_when_asked_for(tmp_path: Path) -> None:
    Store(write=tmp_path / "smoke").put(record(a=1))
    assert collect(tmp_path) == []
    assert len(collect(tmp_path / "smoke")) == 1
