from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polykv_lib import hf, presets
from polykv_lib.kv import Geometry
from polykv_lib.metrics.memory import dense_bytes
from polykv_lib.pool import sizes_of
from polykv_lib.study.experiments import (
    agent_fidelity,
    common,
    excerpts,
    memory_scaling,
    ppl_inversion,
)
from polykv_lib.study.experiments.excerpts import fixed_window, paper_excerpt, paper_length
from polykv_lib.study.experiments.readers import readers
from polykv_lib.study.experiments.speed import decoding, opening
from polykv_lib.study.record import Outcome, Row

pytestmark = pytest.mark.usefixtures("tiny")


def silent(text: str) -> None:
    assert "\n" not in text


def found(outcome: Outcome, table: str, metric: str, **dims: object) -> list[Row]:
    return [
        row
        for row in outcome.rows
        if (row.table, row.metric) == (table, metric) and row.dims.items() >= dims.items()
    ]


PPL = {
    "MODEL": "tiny",
    "SEED": 0,
    "PROTOCOLS": ["paper-70-30", "fixed-window"],
    "PREFIX_TOKENS": [40, 64],
    "N_DOCS": 3,
    "SCORED_TOKENS": 16,
    "CODECS": ["full", "paper"],
    "FRONTIER_CODECS": ["tq2", "kivi2"],
    "FRONTIER_TOKENS": 64,
    "N_BOOT": 200,
}


@pytest.fixture(scope="module")
def ppl(tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(excerpts, "wikitext2", offline)
        return in_parts(ppl_inversion.run, PPL)


def offline() -> Any:
    raise ConnectionError


def test_ppl_gives_every_setting_its_metrics_with_intervals_over_documents(ppl: Outcome) -> None:
    metrics = {
        *("ppl_full", "ppl_pool", "ppl_no_document", "ppl_delta_pct"),
        *("nll_delta_nats", "kl_nats", "top1_agreement"),
    }
    rows = [row for row in ppl.rows if row.table == "ppl"]
    settings = Counter(
        (row.dims["protocol"], row.dims["prefix_tokens"], row.dims["codec"]) for row in rows
    )
    frontier = {("fixed-window", 64, codec) for codec in ("tq2", "kivi2")}
    crossed = {(p, n, c) for p in PPL["PROTOCOLS"] for n in (40, 64) for c in ("full", "paper")}
    assert set(settings) == crossed | frontier
    assert set(settings.values()) == {len(metrics)}
    for row in rows:
        assert row.n == 3
        assert row.lo is not None
        assert row.hi is not None
        assert row.lo <= row.value <= row.hi
        assert row.dims["dtype"] == "float32"


def test_lossless_pool_is_the_full_cache_and_coarser_codecs_are_not(ppl: Outcome) -> None:
    for row in found(ppl, "ppl", "kl_nats", codec="full"):
        assert row.value < 1e-6
    kl = {row.dims["codec"]: row.value for row in found(ppl, "kl_vs_bits", "kl_nats")}
    assert kl["full"] < kl["paper"] < kl["tq2"] < kl["kivi2"]
    bits = {row.dims["codec"]: row.value for row in found(ppl, "kl_vs_bits", "bits_per_element")}
    assert (
        bits["full"] > 32 > 16 > bits["tq2"] > bits["paper"] > bits["kivi2"] > 2
    )  # tq2 keeps sinks


def test_samples_hold_the_articles_behind_the_means(ppl: Outcome) -> None:
    [mean] = found(
        ppl, "ppl", "nll_delta_nats", protocol="fixed-window", prefix_tokens=40, codec="paper"
    )
    samples = [
        sample
        for sample in ppl.samples
        if (sample["protocol"], sample["prefix_tokens"], sample["codec"])
        == ("fixed-window", 40, "paper")
    ]
    assert [sample["n_tokens"] for sample in samples] == [16, 16, 16]
    assert len({sample["document"] for sample in samples}) == 3
    deltas = [float(s["nll_pool"]) - float(s["nll_full"]) for s in samples]
    assert sum(deltas) / 3 == pytest.approx(mean.value, abs=2e-6)


def test_windows_are_scored_alike_whatever_the_prefix(ppl: Outcome) -> None:
    alone = [row.value for row in found(ppl, "ppl", "ppl_no_document", protocol="fixed-window")]
    assert max(alone) == pytest.approx(min(alone))
    of_each = found(
        ppl, "documents", "ppl_delta_pct", protocol="fixed-window", prefix_tokens=40, codec="paper"
    )
    assert len({row.dims["document"] for row in of_each}) == 3


def test_run_says_how_it_was_run(ppl: Outcome) -> None:
    assert ppl.protocol["attention"] == "polykv"
    assert ppl.protocol["dtype"] == "float32"
    assert ppl.protocol["wikitext2"] is False


def test_a_pool_that_is_read_wrongly_stops_the_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ppl_inversion.compressed
    monkeypatch.setattr(
        ppl_inversion,
        "compressed",
        lambda model, layers, ids, codec: right(model, layers, ids, "kivi2"),
    )
    with pytest.raises(RuntimeError, match="a lossless pool changes the NLL of 'Anarchism' by"):
        ppl_inversion.run(PPL, silent)


@pytest.mark.parametrize("n_prefix", [2, 420, 578, 1_285, 1_295, 1_367, 4_096, 5_035])
def test_paper_length_is_the_longest_text_with_that_prefix(n_prefix: int) -> None:
    n_tokens = paper_length(n_prefix)
    assert excerpts.paper_split(n_tokens).n_prefix == n_prefix
    assert excerpts.paper_split(n_tokens + 1).n_prefix == n_prefix + 1


def numbered(n: int) -> common.Document:
    return common.Document(title="numbers", corpus="test", text="", ids=torch.arange(n))


def test_excerpts_cut_where_they_say() -> None:
    paper = paper_excerpt(numbered(30), 21, opening=[99])
    assert paper.prefix.tolist() == [[99, *range(13)]]
    assert paper.window.tolist() == [list(range(13, 20))]
    window = fixed_window(numbered(30), 5, start=20, n_scored=4, opening=[99])
    assert window.prefix.tolist() == [[99, 16, 17, 18, 19]]
    assert window.window.tolist() == [[20, 21, 22, 23, 24]]


def test_too_few_long_articles_are_refused(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="9 articles of at least 100,000 tokens are needed, but"):
        common.documents(tiny[1], n_docs=9, min_tokens=100_000)


SMALL = {"n_layers": 12, "n_q_heads": 4, "n_kv_heads": 2, "head_dim": 64}
MEMORY = {
    "MODEL": "tiny",
    "SEED": 0,
    "CONTEXT_TOKENS": [5_035],
    "N_AGENTS": [1, 15],
    "GEOMETRIES": ["llama-3-8b", "llama-3-70b"],
    "CODECS": ["full", "paper"],
    "MEASURED_TOKENS": [64, 5_035],
    "STEP_TOKENS": [100, 300],
    "STEP_AGENTS": [1, 3],
    "ROUNDS": 2,
}


@pytest.fixture(scope="module")
def memory(tiny: tuple[Any, Any]) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_scaling, "BUILT_BYTES", 25_000_000)
        return memory_scaling.run(MEMORY, silent)


def test_memory_counts_what_the_paper_counts(memory: Outcome) -> None:
    where = {"geometry": "llama-3-8b", "context_tokens": 5_035, "n_agents": 15, "codec": "paper"}
    [without] = found(memory, "pool_memory", "without_bytes", **where)
    [ratio] = found(memory, "pool_memory", "memory_ratio", **where)
    [saved] = found(memory, "pool_memory", "reduction_pct", **where)
    assert without.value == 15 * 5_035 * 131_072
    assert ratio.value == pytest.approx(2.876, abs=5e-4)
    assert saved.value == pytest.approx(97.68, abs=5e-3)
    assert without.kind == "computed"


def test_pools_are_built_where_they_fit_and_agree_with_the_formula(memory: Outcome) -> None:
    built = [row for row in found(memory, "pool_memory", "pool_bytes") if row.kind == "measured"]
    sizes = {(row.dims["geometry"], row.dims["context_tokens"]) for row in built}
    assert sizes == {("llama-3-8b", 64), ("llama-3-70b", 64)}
    for row in built:
        geometry = presets.geometry(str(row.dims["geometry"]))
        of_layer = sizes_of(presets.codec(str(row.dims["codec"])), 64, geometry.head_dim)
        assert row.value == geometry.n_layers * of_layer(geometry.n_kv_heads, 64)


def test_an_added_agent_costs_its_suffix_whatever_the_document(memory: Outcome) -> None:
    ratios = [row.value for row in found(memory, "agent_memory", "added_over_suffix")]
    assert len(ratios) == 4
    assert 1 <= min(ratios) == max(ratios) <= 1.05
    suffix = {row.value for row in found(memory, "agent_memory", "suffix_bytes_per_agent")}
    geometry = Geometry(n_layers=2, n_q_heads=4, n_kv_heads=2, head_dim=64)
    tokens = int(str(memory.protocol["suffix"]).split()[3]) + decoding.ANSWER_TOKENS - 1
    assert suffix == {dense_bytes(geometry, tokens, element_bytes=4)}


def test_every_method_is_weighed_and_timed_in_one_run(memory: Outcome) -> None:
    peaks = Counter(row.dims["method"] for row in found(memory, "agent_memory", "peak_bytes"))
    assert peaks == dict.fromkeys(decoding.METHODS[:3], 4)
    steps = found(memory, "decode_step", "ms_per_step")
    assert Counter(row.dims["method"] for row in steps) == dict.fromkeys(decoding.METHODS, 4)
    for row in steps:
        assert row.n == 2
        assert 0 < row.lo <= row.value <= row.hi


def test_opening_is_timed_by_what_is_checked_and_weighed_in_processes(memory: Outcome) -> None:
    for n_tokens in MEMORY["STEP_TOKENS"]:
        times = found(memory, "opening", "open_ms", context_tokens=n_tokens)
        checks = [row.dims["checks"] for row in times]
        assert checks == ["none", "file", "file, model", "file, model, tokenizer"]
        assert all(row.n == 2 and 0 < row.lo <= row.value <= row.hi for row in times)
        [both] = found(memory, "opening", "private_bytes", context_tokens=n_tokens)
        [own] = found(memory, "opening", "document_bytes", context_tokens=n_tokens)
        assert (both.n, own.n) == (opening.PROCESSES,) * 2
        assert own.value < both.value < 20 << 20


def test_where_private_memory_is_not_told_it_has_no_rows(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "private_bytes", lambda: None)
    model, tokenizer = tiny
    ids = torch.arange(9)[None]
    pool = common.compressed(model, hf.read_document(model, ids), ids, "paper")
    rows = list(opening.opening_rows(model, tokenizer, [pool], pool, 1, {}))
    assert [row.metric for row in rows] == ["open_ms"] * 4


def test_a_pool_that_is_shared_adds_no_copy_of_itself_and_a_lone_reader_maps_it_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pools = [memory_scaling.build(Geometry(**SMALL), "full", n, 0) for n in (8, 2_000)]
    paths = [pool.save(tmp_path / str(pool.n_tokens)) for pool in pools]
    monkeypatch.setattr(opening, "PROCESSES", 2)
    _, shared = opening.added_bytes(paths)
    assert max(shared) < 0.2 * pools[1].nbytes
    monkeypatch.setattr(opening, "PROCESSES", 1)
    _, [alone] = opening.added_bytes(paths)
    assert alone > 0.9 * pools[1].nbytes
    with pytest.raises(RuntimeError, match="that should read a saved pool ended"):
        opening.added_bytes([tmp_path / "absent"])


def test_held_bytes_are_the_caches_own(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    layers = hf.read_document(model, torch.arange(50)[None])
    assert decoding.held_bytes(hf.full_cache(layers, 3)) == 3 * 50 * 2 * 2 * 2 * 64 * 4
    pool = common.compressed(model, layers, torch.arange(50)[None], "paper")
    assert decoding.held_bytes(pool.agent_cache(3)) == 0


def test_a_method_that_does_not_fit_has_no_number_and_stops_nothing(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(pool: Any, n: int = 1) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(hf, "expanded_cache", too_large)
    small = MEMORY | {
        "GEOMETRIES": ["llama-3-8b"],
        "MEASURED_TOKENS": [8],
        "STEP_TOKENS": [60],
        "STEP_AGENTS": [2],
    }
    monkeypatch.setattr(opening, "PROCESSES", 1)
    outcome = memory_scaling.run(small, silent)
    for table, metric in (("agent_memory", "peak_bytes"), ("decode_step", "ms_per_step")):
        for method in ("expanded-batch", "pooled-agent"):
            [row] = found(outcome, table, metric, method=method)
            assert row.value is None
        [row] = found(outcome, table, metric, method="shared-pool")
        assert row.value is not None


FIDELITY = {
    "MODEL": "tiny",
    "SEED": 0,
    "N_AGENTS": [2, 3],
    "CONTEXT_TOKENS": [80],
    "N_DOCS": 2,
    "CODECS": ["full", "kivi2"],
    "MAX_NEW_TOKENS": 12,
    "ENCODER": "minilm",
}


@pytest.fixture(scope="module")
def fidelity(tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]) -> Outcome:
    return in_parts(agent_fidelity.run, FIDELITY)


def test_a_lossless_pool_gives_the_reference_answers(fidelity: Outcome) -> None:
    for n_agents in (2, 3):
        where = {"control": "pool", "codec": "full", "n_agents": n_agents}
        [exact] = found(fidelity, "fidelity", "exact_match", **where)
        [nll] = found(fidelity, "fidelity", "nll_delta_nats", **where)
        [f1] = found(fidelity, "fidelity", "bertscore_f1", **where)
        assert (exact.value, exact.n) == (1, 2)
        assert abs(nll.value) < 1e-5
        assert f1.value == pytest.approx(1, abs=1e-5)
        assert (f1.dims["encoder"], f1.dims["layer"], f1.dims["rescaled"]) == ("minilm", 5, False)


def test_fewer_agents_are_the_first_of_the_batch(fidelity: Outcome) -> None:
    for row in found(fidelity, "fidelity", "token_overlap", control="pool", codec="kivi2"):
        n = row.dims["n_agents"]
        own = [
            s["token_overlap"]
            for s in fidelity.samples
            if (s["control"], s["codec"]) == ("pool", "kivi2") and s["agent"] <= n
        ]
        assert len(own) == 2 * n
        assert row.value == pytest.approx(sum(own) / len(own), abs=1e-4)
    for row in found(fidelity, "fidelity", "same_in_small_batch"):
        assert (row.value, row.n) == (1, 2)


def test_nll_of_an_answer_is_that_of_one_plain_forward(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    document, answer = torch.arange(40)[None], [5, 6, 7, 8]
    asked = ["Agent A: who?", "Agent B: what is this?"]
    full, pool, *_ = readers(model, tokenizer, document, document, asked, ["full"])
    whole = [*range(40), *full.prompts[1], *answer]
    logits = model(torch.tensor([whole])).logits[0, -len(answer) - 1 : -1]
    plain = torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item()
    assert full.nll(model, 1, answer) == pytest.approx(plain, abs=1e-5)
    assert pool.nll(model, 1, answer) == pytest.approx(plain, abs=1e-5)
    assert pool.nll(model, 1, []) is None


def test_controls_do_not_agree_and_cost_likelihood(fidelity: Outcome) -> None:
    for control in ("unrelated-document", "no-document"):
        for row in found(fidelity, "fidelity", "exact_match", control=control):
            assert row.value < 1
        for row in found(fidelity, "fidelity", "nll_delta_nats", control=control):
            assert row.value > 0.05


def test_every_answer_is_kept_beside_its_reference(fidelity: Outcome) -> None:
    assert len(fidelity.samples) == 2 * 3 * 4  # documents, agents, two pools and two controls
    first = fidelity.samples[0]
    assert (
        first["question"]
        == "Agent A: What specific names, places, or dates are mentioned in this text?"
    )
    assert {"reference", "answer", "bertscore_f1", "token_overlap", "exact_match"} <= set(first)
    [empty] = found(fidelity, "fidelity", "n_empty", control="pool", codec="full", n_agents=3)
    assert (empty.value, empty.n) == (0, 6)
    assert fidelity.protocol["chat_template"] is True
