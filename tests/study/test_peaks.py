"""What a peak of decoding counts, how it is split, and which stored ones a table shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import pytest
import torch

from polykv_lib.attend import native
from polykv_lib.metrics.memory import Peak
from polykv_lib.study.experiments.speed import decoding
from polykv_lib.study.experiments.speed.decoding import METHODS, OURS, Agents
from polykv_lib.study.experiments.speed.once import Once
from polykv_lib.study.experiments.speed.steps import Steps
from polykv_lib.study.notebook import show
from polykv_lib.study.record import Record, Row
from polykv_lib.study.rows import tidy
from polykv_lib.study.tables.own import OWN, RUN, own_table

GROWN = 1_000_000  # bytes that the process is said to grow by while it decodes


@pytest.fixture
def once(tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Once:
    @contextmanager
    def grows(device: object) -> Iterator[Peak]:
        yield Peak(source="made up", start_bytes=0, end_bytes=GROWN)

    monkeypatch.setattr(decoding, "peak_memory", grows)
    ids = torch.arange(50)[None]
    return Once.read(tiny[0], ids, [5, 6], ["full", "paper"])


def test_only_a_method_that_reads_the_pool_counts_it(once: Once) -> None:
    pool = once.pools["paper"]
    for method in (*METHODS, *OURS):
        if method.endswith("-native") and not native.is_on():
            continue
        agents = Agents(model=once.model, pool=pool, question=[5, 6], n=2, method=method)
        reads = method in ("shared-pool", "pooled-agent")
        assert agents.peak() == (GROWN + (pool.nbytes if reads else 0), "made up"), method


def test_a_peak_is_held_bytes_a_step_without_a_document_and_scratch(
    once: Once,
) -> None:
    rows, _ = Steps.of(once.model, once.pools, [5, 6], ["paper"], 1.0).rows(2, 1, {})
    of: dict[str, dict[tuple[Any, Any], Any]] = {}
    for row in rows:
        if row.unit == "B":
            of.setdefault(row.metric, {})[row.dims["method"], row.dims["codec"]] = row.value
    assert set(of["step_bytes"]) | set(of["scratch_bytes"]) == set(of["peak_bytes"])
    assert not set(of["step_bytes"]) & set(of["scratch_bytes"])
    kernel = "native" if native.is_on() else "folded"
    for lane, floor in (
        (("shared-pool", "paper"), f"no-document-{kernel}"),
        (("expanded-folded", "full"), "no-document-folded"),
        (("pooled-agent", "paper"), "no-document"),
    ):
        parts = of["held_bytes"][lane] + of["step_bytes"][floor, None] + of["scratch_bytes"][lane]
        assert of["peak_bytes"][lane] == parts
    own = of["held_bytes"]["shared-pool", "paper"] - once.pools["paper"].nbytes
    floor_own = of["held_bytes"][f"no-document-{kernel}", None]
    assert of["scratch_bytes"]["shared-pool", "paper"] == floor_own - own  # both grew alike


def test_a_table_leaves_out_peaks_that_count_a_pool_nobody_read() -> None:
    def shown(*metrics: str) -> pd.DataFrame:
        rows = [
            Row(table="throughput", metric=metric, value=9.0, unit="B",
                dims={"method": method, "n_agents": 1})
            for method in ("shared-pool", "no-document", "no-document-folded")
            for metric in metrics
        ]  # fmt: skip
        made = Record(experiment="throughput", key="0" * 16, params={}, status="ok", rows=rows)
        return own_table(tidy([made]), OWN["throughput"]).set_index("method")

    without = shown("held_bytes", "peak_bytes")
    assert without["peak_bytes"].dropna().to_dict() == {"shared-pool": 9.0}
    assert without["held_bytes"].notna().all()
    assert shown("held_bytes", "peak_bytes", "step_bytes")["peak_bytes"].notna().all()


def test_a_line_of_times_names_its_run() -> None:
    dims: dict[str, Any] = {"method": "shared-pool", "codec": "paper", "n_agents": 1}
    runs = [
        Record(experiment="throughput", key=key * 16, params={}, status="ok",
               rows=[Row(table="throughput", metric="step_ms", value=value, unit="ms", dims=dims)])
        for key, value in (("a", 1.0), ("b", 2.0))
    ]  # fmt: skip
    table = own_table(tidy(runs), OWN["throughput"]).set_index(RUN)
    assert table["step_ms"].to_dict() == {"a" * 16: 1.0, "b" * 16: 2.0}
    assert RUN not in show(runs[0], "throughput")
