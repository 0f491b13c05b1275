"""Peers: one protocol for all, answers checked before a time counts, and reasons where one is missing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from polykv_lib import hf
from polykv_lib.study import cli, peers
from polykv_lib.study.record import Record, Row
from polykv_lib.study.store import Store, collect

ROOT = Path(__file__).parents[2]
POINT = peers.Point(
    model="tiny", dtype="float32", context_tokens=(60,), n_agents=(4,), answer_tokens=5, rounds=1,
    passes=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def record(tiny: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Record:
    found = {"polykv-lib": sys.executable, "kvpress": "not installed: no such package"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "environments", lambda root: found)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        store = Store(write=tmp_path_factory.mktemp("results"))
        return peers.run(POINT, "test", store, ROOT, lambda text: None)


def found(record: Record, metric: str, method: str) -> Row:
    [row] = [r for r in record.rows if (r.metric, r.dims["method"]) == (metric, method)]
    return row


def test_a_peers_process_answers_as_this_one_does(record: Record) -> None:
    for method in ("full", "expanded-batch"):
        assert found(record, "tokens_equal", method).value == 1
    row = found(record, "answers_ms", "full")
    assert row.n == 2  # one round in each of two passes
    assert row.dims["peer"] == "polykv-lib"
    assert "torch" in str(row.dims["version"])
    rate = found(record, "tokens_per_s", "full")
    assert rate.value == pytest.approx(4 * 5 * 1000 / row.value)


def test_bytes_are_counted_and_a_missing_peer_says_why(record: Record) -> None:
    assert found(record, "held_bytes", "expanded-batch").value == 4 * 60 * 512 * 4
    assert found(record, "held_bytes", "full").value == 60 * 512 * 4 + 60 * 4  # and the ids
    assert record.provenance["peers_missing"] == {"kvpress": "not installed: no such package"}
    assert len(record.samples) == 2


def test_wrong_answers_have_no_time_but_evicted_ones_may_differ() -> None:
    measured = {
        "answers": [[1, 2, 3, 4]], "held_bytes": 8, "read_ms": [1.0], "first_ms": [1.0], "answers_ms": [2.0],
    }  # fmt: skip
    one = {
        "packages": {"torch": "0"},
        "threads": 1,
        "methods": {"paper": measured, "SnapKV": measured},
    }
    rows = list(peers.rows_of([one], [[1, 9, 9, 9]], {}))
    assert [r.metric for r in rows if r.dims["method"] == "paper"] == ["tokens_equal"]
    assert "answers_ms" in [r.metric for r in rows if r.dims["method"] == "SnapKV"]
    assert {r.value for r in rows if r.metric == "tokens_equal"} == {0.25}
    right = list(peers.rows_of([one], [[1, 2, 9, 9]], {}))
    assert "answers_ms" in [r.metric for r in right if r.dims["method"] == "paper"]


def test_a_peer_that_fails_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "env" / "peers").mkdir(parents=True)
    (tmp_path / "env" / "peers" / "broken.py").write_text("raise ImportError('nothing here')")
    with pytest.raises(RuntimeError, match=r"^peer broken failed: ImportError: nothing here$"):
        peers.ask(tmp_path, "broken", sys.executable, {})


def test_an_exported_model_has_its_rope_base_under_both_names(
    tiny: tuple[Any, Any], tmp_path: Path
) -> None:
    folder = hf.export_model(tiny[0], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "file", sorted((ROOT / "env" / "peers").glob("*.txt")), ids=lambda f: f.stem
)
def test_a_peers_environment_is_pinned_and_has_a_script(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    pins = {r.name: str(r.specifier) for r in map(Requirement, lines)}
    assert all(spec.startswith("==") for spec in pins.values())
    assert pins["torch"] == "==2.13.0"
    assert file.with_suffix(".py").is_file()


def test_bench_shows_stored_peers_without_measuring_again(tmp_path: Path) -> None:
    store = Store(write=tmp_path / "data" / "results" / "smoke")
    stored = Record(
        experiment=peers.EXPERIMENT, key=peers.key_of(peers.EXPERIMENT, peers.SMOKE.params), params={},
        status="ok", provenance={"profile": "smoke"},
        rows=[Row(table="peers", metric="tokens_per_s", value=7.0, unit="1/s", n=2, dims={"peer": "kvpress"})],
    )  # fmt: skip
    store.put(stored)
    options = ["bench", "--peers", "--profile", "smoke", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, options)
    assert result.exit_code == 0, result.output
    assert "| kvpress |" in result.stdout
    assert len(collect(store.write)) == 1
