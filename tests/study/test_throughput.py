"""The throughput experiment on a tiny model: what is checked, what is counted, what is refused."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from polykv_lib import hf
from polykv_lib.attend import native
from polykv_lib.kv import Geometry
from polykv_lib.metrics.intervals import Interval
from polykv_lib.study.experiments import throughput
from polykv_lib.study.experiments.common import row
from polykv_lib.study.experiments.speed import bandwidth, checks
from polykv_lib.study.experiments.speed.decoding import Agents, held_bytes
from polykv_lib.study.experiments.speed.once import Once
from polykv_lib.study.experiments.speed.steps import Steps, slope, slopes
from polykv_lib.study.experiments.speed.timing import (
    interleaved_ms,
    per_second,
    ratio,
    torch_threads,
)
from polykv_lib.study.record import Outcome, Row

pytestmark = pytest.mark.usefixtures("tiny")
GEOMETRY = Geometry(n_layers=2, n_q_heads=4, n_kv_heads=2, head_dim=64)
POINT = {
    "MODEL": "tiny",
    "SEED": 0,
    "DTYPE": "float32",
    "THREADS": 1,
    "CONTEXT_TOKENS": [100, 200],
    "N_AGENTS": [1, 2, 4],
    "CODECS": ["paper", "compact"],
    "ROUNDS": 2,
    "ONCE_ROUNDS": 1,
    "ANSWER_TOKENS": 6,
    "MAX_CACHE_GB": 1e-3,
    "GEOMETRY": "smollm2-135m",
    "GEOMETRY_TOKENS": [40],
    "GEOMETRY_AGENTS": [3],
    "GEOMETRY_DTYPES": ["float32", "bfloat16"],
}


@pytest.fixture(scope="module")
def outcome(tiny: tuple[Any, Any]) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bandwidth.COPIED_BYTES, "cpu", 1 << 16)
        return throughput.run(POINT, lambda text: None)


def found(outcome: Outcome, table: str, metric: str, **dims: object) -> list[Row]:
    return [
        row
        for row in outcome.rows
        if (row.table, row.metric) == (table, metric) and row.dims.items() >= dims.items()
    ]


def test_every_method_answers_like_a_plain_cache_before_it_is_timed(outcome: Outcome) -> None:
    methods = Counter(
        (r.dims["method"], r.dims["codec"]) for r in found(outcome, "checks", "kl_nats")
    )
    pools = {("shared-pool", codec): 2 for codec in ("full", "paper", "compact")}
    dense = {("expanded-folded", "full"): 2, ("pooled-agent", "paper"): 2}
    if native.is_on():
        dense["expanded-native", "full"] = 2
    assert methods == pools | dense
    assert all(r.value < 1e-6 for r in found(outcome, "checks", "kl_nats"))
    assert all(r.value == 1 for r in found(outcome, "checks", "tokens_equal"))
    cost = {r.dims["codec"]: r.value for r in found(outcome, "checks", "kl_full_nats")}
    assert cost["full"] == 0 < cost["paper"] < cost["compact"]


def test_a_method_that_reads_another_document_gets_no_time(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    pools = {}
    for codec, ids in (("full", torch.arange(60)[None]), ("paper", torch.arange(60, 120)[None])):
        pools[codec] = Once.read(model, ids, [5], [codec]).pools[codec]
    steps = Steps.of(model, pools, [5, 6], ["paper"], 1.0)
    wrong = replace(steps.lanes["shared-pool", "full"], pool=pools["paper"])
    lanes = {("expanded-batch", "full"): steps.lanes["expanded-batch", "full"]}
    list(checks.rows(lanes | {("shared-pool", "full"): steps.lanes["shared-pool", "full"]},
                                [[5, 6]], 4, {}))  # fmt: skip
    with pytest.raises(RuntimeError, match=r"shared-pool .full. differs from the plain path"):
        list(checks.rows(lanes | {("shared-pool", "full"): wrong}, [[5, 6]], 4, {}))


def test_steps_have_a_line_a_method_with_rate_and_bytes(outcome: Outcome) -> None:
    for metric, unit in (("step_ms", "ms"), ("tokens_per_s", "1/s")):
        rows = [r for r in found(outcome, "throughput", metric) if r.value is not None]
        assert {r.unit for r in rows} == {unit}
        assert all(r.n == 2 and 0 < r.lo <= r.value <= r.hi for r in rows)
    pool = {"method": "shared-pool", "codec": "paper", "context_tokens": 200, "n_agents": 4}
    [ms] = found(outcome, "throughput", "step_ms", **pool)
    [rate] = found(outcome, "throughput", "tokens_per_s", **pool)
    assert rate.value == pytest.approx(4 * 1000 / ms.value)
    assert (ms.dims["threads"], ms.dims["device"], ms.dims["dtype"]) == (1, "cpu", "float32")


def test_what_exceeds_the_limit_is_not_run_and_says_so(outcome: Outcome) -> None:
    at = {"method": "expanded-batch", "context_tokens": 200}
    values = {r.dims["n_agents"]: r.value for r in found(outcome, "throughput", "step_ms", **at)}
    assert values[2] is not None
    assert values[4] is None  # 4 copies of 200 tokens of 2,048 bytes are above 0.001 GB
    assert "exceed 0.001 GB" in str(outcome.protocol["not_timed"])
    assert not found(outcome, "speedup", "faster_than_expanded", context_tokens=200, n_agents=4)
    assert found(outcome, "speedup", "faster_than_expanded", context_tokens=100, n_agents=2)


def test_an_agent_adds_its_own_tokens_to_a_pool_and_a_copy_to_an_ordinary_cache(
    outcome: Outcome,
) -> None:
    added = {
        (r.dims["method"], r.dims["codec"], r.dims["context_tokens"]): r.value
        for r in found(outcome, "scaling_in_agents", "bytes_per_agent")
    }
    token = GEOMETRY.elements_per_token * 4
    for codec in ("full", "paper", "compact"):
        assert added["shared-pool", codec, 100] == pytest.approx(added["shared-pool", codec, 200])
    copies = added["expanded-batch", "full", 200] - added["expanded-batch", "full", 100]
    assert copies == pytest.approx(100 * token)
    assert added["no-document", None, 100] <= added["shared-pool", "full", 100]


def test_bytes_held_are_pool_and_caches(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    once = Once.read(model, torch.arange(50)[None], [5, 6], ["full", "paper"])
    agents = Agents(model=model, pool=once.pools["paper"], question=[5] * 20, n=3)
    token = GEOMETRY.elements_per_token * 4
    assert agents.held() == once.pools["paper"].nbytes + 3 * 21 * token  # a twentieth is room
    one_by_one = replace(agents, method="pooled-agent")
    assert one_by_one.held() == once.pools["paper"].nbytes + 3 * 70 * token
    assert replace(agents, method="expanded-batch").held() == 3 * 70 * token
    assert replace(agents, method="no-document").held() == 3 * 20 * token


@pytest.mark.parametrize("by_torch", [True, False])
def test_folded_copies_answer_like_stock_copies(tiny: tuple[Any, Any], by_torch: bool) -> None:
    model, _ = tiny
    folded_cache = partial(hf.folded_cache, by_torch=by_torch)
    document = torch.arange(60)[None]
    layers = hf.read_document(model, document)
    prompts = [[5, 6, 7], [9], [30, 31]]
    options: dict[str, Any] = {"n_seen": 60, "max_new_tokens": 8}
    stock = hf.greedy(model, hf.full_cache(layers, 3), prompts, **options)
    folded = folded_cache(layers, GEOMETRY, 3)
    assert held_bytes(folded) == 3 * 63 * GEOMETRY.elements_per_token * 4
    assert hf.greedy(model, folded, prompts, **options) == stock
    assert hf.greedy(model, folded_cache([], GEOMETRY, 3), prompts, **options) != stock
    ids = torch.tensor([[5, 6], [7, 8], [9, 10]])
    plain = hf.logits(model, hf.full_cache(layers, 3), ids, 60)
    close = hf.logits(model, folded_cache(layers, GEOMETRY, 3), ids, 60)
    scale = plain.abs().max()
    assert (plain - close).abs().max() < 1e-5 * scale
    empty = hf.logits(model, folded_cache([], GEOMETRY, 3), ids, 60)
    assert (plain - empty).abs().max() > 0.1 * scale
    kept = hf.logits(model, folded_cache(layers, GEOMETRY, 3), ids, 60, keep=1)
    assert (kept - close[:, -1:]).abs().max() < 1e-5 * scale


def test_prefill_encoding_and_first_tokens_have_their_ratios(outcome: Outcome) -> None:
    assert {r.dims["method"] for r in found(outcome, "prefill", "ms")} == {"plain", "SnapKV", "H2O"}
    assert all(r.value == 1 for r in found(outcome, "prefill", "over_prefill", method="plain"))
    assert len(found(outcome, "encode", "over_prefill")) == 2 * 3
    again = found(outcome, "first_token", "times_sooner", method="prefill-again")
    assert [r.value for r in again] == [1, 1]
    assert len(found(outcome, "first_token", "ms")) == 2 * (3 + 3)


def test_an_evicting_prefill_that_keeps_all_is_refused(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Once.read(tiny[0], torch.arange(60)[None], [5], ["full"])
    once.check_evicted()
    kept = [[torch.arange(60)] * 2] * 2
    monkeypatch.setattr(hf, "evict_document", lambda *_: (once.layers, [kept]))
    with pytest.raises(RuntimeError, match=r"SnapKV keeps \[60\] tokens of 15"):
        once.check_evicted()


def test_bandwidth_counts_the_pool_and_is_exact_for_its_dtype(outcome: Outcome) -> None:
    [read] = found(
        outcome, "bandwidth", "read_bytes", codec="full", method="sdpa", dtype="bfloat16"
    )
    assert read.value == 30 * 40 * 2 * 3 * 64 * 2
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 2e-2)):
        errors = found(outcome, "bandwidth", "relative_error", dtype=dtype)
        assert len(errors) == 4
        assert all(r.value < bound for r in errors)
    assert (
        max(r.value for r in found(outcome, "bandwidth", "relative_error", dtype="bfloat16")) > 1e-5
    )
    assert len(found(outcome, "bandwidth", "gb_per_s", method="copy")) == 2


def test_the_run_says_how_it_was_run_and_keeps_every_round(outcome: Outcome) -> None:
    assert outcome.protocol["threads"] == 1
    assert outcome.protocol["device_name"] == "cpu"
    ways = outcome.protocol["attention_over_pools"]
    assert ways.items() >= {("bfloat16, head_dim 64", "blocks")}  # type: ignore[union-attr]
    steps = [s for s in outcome.samples if "n_agents" in s and "method" in s and "model" in s]
    assert all(len(s["step_ms"]) == 2 for s in steps)  # type: ignore[arg-type]


def test_calls_take_turns_and_the_first_round_is_not_counted() -> None:
    turns: list[str] = []
    calls = {name: (lambda name=name: turns.append(name)) for name in "ab"}
    times = interleaved_ms(calls, 2, torch.device("cpu"))
    assert turns == ["a", "b"] * 3
    assert [len(t) for t in times.values()] == [2, 2]


def test_rates_ratios_slopes_and_threads() -> None:
    ms = Interval(value=20.0, lo=10.0, hi=40.0, n=5)
    assert per_second(2, ms) == Interval(value=100.0, lo=50.0, hi=200.0, n=5)
    assert ratio([2.0, 30.0], [1.0, 10.0]).value == 2.5
    rows = [row("throughput", "step_ms", 3.0 + 2 * n, "ms", {"n_agents": n, "method": "m", "codec": None})
            for n in (1, 2, 5)]  # fmt: skip
    assert slope(rows).value == pytest.approx(2)
    assert slope(rows[:2]).lo is None
    assert [r.value for r in slopes(rows)] == pytest.approx([2])
    assert not list(slopes(rows[:1]))
    before = torch.get_num_threads()
    with torch_threads(2) as n:
        assert n == torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
