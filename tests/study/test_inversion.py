"""The inversion experiment: controls against plain arithmetic, and the rule against made-up rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from polykv_lib import hf
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.quantize import TurboQuant
from polykv_lib.study.estimate.work import AT_ONCE
from polykv_lib.study.experiments import excerpts, inversion_controls
from polykv_lib.study.experiments.inversion.attention_shape import AttentionShape
from polykv_lib.study.experiments.inversion.controls import CONTROLS, control
from polykv_lib.study.experiments.inversion.readings import Draw, readings
from polykv_lib.study.experiments.inversion.rows import Score, by_article
from polykv_lib.study.record import Outcome, Record, Row
from polykv_lib.study.rows import tidy
from polykv_lib.study.tables.inversion import answer, decision, verdict

POINT = {
    "MODEL": "tiny",
    "SEED": 0,
    "PREFIX_TOKENS": [40],
    "CONTROL_TOKENS": 64,
    "CONTROLS": ["k-only", "v-only", "v-gaussian", "v-shrunk", "temperature-1.1"],
    "N_PASSAGES": 3,
    "SCORED_TOKENS": 16,
    "N_SEEDS": 3,
    "N_BOOT": 100,
}


@pytest.fixture(scope="module")
def outcome(tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]) -> Outcome:
    return in_parts(inversion_controls.run, POINT)


def values(outcome: Outcome, metric: str, **dims: object) -> list[Any]:
    return [r.value for r in outcome.rows if r.metric == metric and r.dims.items() >= dims.items()]


@pytest.fixture
def layer() -> LayerKV:
    torch.manual_seed(0)
    keys, noise = torch.randn(2, 1, 2, 500, 64)
    return LayerKV(keys=keys, values=3 * noise)


@pytest.mark.parametrize("name", CONTROLS)
def test_sides_that_a_control_leaves_alone_stay_bit_for_bit(name: str, layer: LayerKV) -> None:
    [changed] = control(name).apply([layer], seed=0)
    only = {"k-only": "keys", "temperature": "keys", "v": "values"}.get(
        name if name == "k-only" else name.split("-")[0]
    )
    assert torch.equal(changed.keys, layer.keys) == (only == "values")
    assert torch.equal(changed.values, layer.values) == (only == "keys")


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_depends_on_the_seed_if_it_says_so(name: str, layer: LayerKV) -> None:
    first, again, other = (control(name).apply([layer], seed)[0].values for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(first, other) is not control(name).seeded


def test_noise_has_the_energy_and_shrinkage_the_factor_of_the_codec(layer: LayerKV) -> None:
    v = layer.values
    codes = {n: control(n).apply([layer], 0)[0].values for n in ("v-only", "v-gaussian")}
    size = {n: (x - v).norm(dim=-1) for n, x in codes.items()}
    torch.testing.assert_close(size["v-only"], size["v-gaussian"])
    shrunk = control("v-shrunk").apply([layer], 0)[0].values
    factor = torch.unique((shrunk / v).round(decimals=4))
    assert len(factor) == 1
    stored = TurboQuant(3).dequantize(TurboQuant(3).quantize(v))
    rest = stored - shrunk  # orthogonal to the original: nothing of it is left
    assert abs(float((rest * v).sum() / v.square().sum())) < 1e-5
    assert 0.95 < float(factor) < 0.98


def test_sinks_stay(layer: LayerKV) -> None:
    [changed] = control("paper-sinks").apply([layer], 0)
    assert torch.equal(changed.values[:, :, :4], layer.values[:, :, :4])
    assert not torch.equal(changed.values[:, :, 4:5], layer.values[:, :, 4:5])


def test_attention_shape_is_that_of_a_plain_softmax(layer: LayerKV) -> None:
    queries = torch.randn(1, 4, 3, 64)
    seen = LayerKV(keys=layer.keys, values=layer.values, queries=queries)
    shape = AttentionShape.of(seen, n_document=490)
    scores = queries @ layer.keys.repeat_interleave(2, 1).mT / 8
    hidden = torch.arange(500)[None] > torch.tensor([497, 498, 499])[:, None]
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    assert shape.sink_mass == pytest.approx(p[..., :4].sum(-1).mean().item(), rel=1e-5)
    assert shape.document_mass == pytest.approx(p[..., :490].sum(-1).mean().item(), rel=1e-5)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1).mean().item()
    assert shape.entropy == pytest.approx(entropy, rel=1e-5)


def test_an_observed_cache_predicts_as_the_plain_one(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    ids = torch.randint(0, 200, (1, 40))
    layers = hf.read_document(model, ids[:, :30])
    seen: list[int] = []
    watched = hf.observed_cache(layers, lambda i, layer: seen.append(i))
    plain = hf.logits(model, hf.full_cache(layers), ids[:, 30:], 30)
    torch.testing.assert_close(hf.logits(model, watched, ids[:, 30:], 30), plain)
    assert seen == [0, 1]


def test_documents_read_in_one_batch_are_each_read_alone(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    ids = torch.randint(0, 200, (1, 90), generator=torch.Generator().manual_seed(2))
    layers = hf.read_document(model, ids[:, :70])
    names = ("paper", "k-only", "temperature-1.1")
    draws = [Draw(control=control(name), seed=s, watched=s == 1) for name in names for s in (0, 1)]
    window, targets = ids[:, 70:], ids[0, 71:]
    together = list(readings(model, layers, window, draws))
    assert len(draws) <= AT_ONCE, "one batch"
    logits = [
        hf.logits(model, hf.full_cache(d.applied(layers)), window[:, :-1], 70)[0] for d in draws
    ]
    for draw, reading, own in zip(draws, together, logits, strict=True):
        torch.testing.assert_close(reading.nll, token_nll(own, targets), atol=1e-5, rtol=0)
        assert reading.kl == pytest.approx(kl_nats(logits[0], own).mean().item(), abs=1e-6)
        [alone] = readings(model, layers, window, [draw])
        assert (reading.shape is None) == (draw.seed == 0)
        if reading.shape is not None:
            shapes = [dataclasses.astuple(s) for s in (reading.shape, alone.shape)]
            assert shapes[0] == pytest.approx(shapes[1], abs=1e-5)
    assert together[0].kl == 0
    assert together[1].kl > 1e-5, "control: another seed"


def test_the_codec_is_run_at_every_length_and_the_controls_at_one(outcome: Outcome) -> None:
    found = {(r.dims["prefix_tokens"], r.dims["control"]) for r in outcome.rows}
    assert found == {(40, "paper"), (64, "paper")} | {(64, name) for name in POINT["CONTROLS"]}
    for value in values(outcome, "kl_nats"):
        assert value > 0
    assert {r.n for r in outcome.rows if r.metric == "ppl_delta_pct"} == {3}


def test_means_are_over_seeds_then_passages_then_articles(outcome: Outcome) -> None:
    own = [s for s in outcome.samples if (s["prefix_tokens"], s["control"]) == (64, "paper")]
    deltas = np.array([s["nll_delta"] for s in own])
    assert deltas.shape == (3, 3)
    [mean] = values(outcome, "nll_delta_nats", prefix_tokens=64, control="paper")
    assert mean == pytest.approx(deltas.mean(), abs=1e-5)
    [runs] = values(outcome, "negative_runs", prefix_tokens=64, control="paper")
    assert runs == pytest.approx((deltas < 0).mean())
    [alike] = values(outcome, "seeds_alike", prefix_tokens=64, control="paper")
    assert alike == pytest.approx(((deltas < 0).all(1) | (deltas > 0).all(1)).mean())


def test_two_passages_of_an_article_count_as_one_article() -> None:
    def score(article: str, delta: float) -> Score:
        return Score(
            article=article, passage=0, n_prefix=4, control="paper", nll_delta=np.full((2, 3), delta),
            kl=np.zeros(2), shape=None, shape_full=None)  # fmt: skip

    scores = [score("a", 0.1), score("b", -0.2), score("a", 0.3)]
    found = by_article(lambda s: s.nll_delta.mean(), scores)
    assert found == pytest.approx([0.2, -0.2])


def test_distances_part_the_scored_tokens(outcome: Outcome) -> None:
    assert {r.dims["distance"] for r in outcome.rows if r.table == "distance"} == {"1 to 16"}


def test_a_round_trip_that_is_not_the_pools_stops_the_experiment(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inversion_controls, "control", lambda name: control("v-shrunk"))
    with pytest.raises(RuntimeError, match="the pool and its codec's round trip differ by"):
        inversion_controls.run(POINT, lambda text: None)


def test_passages_are_disjoint_and_every_article_comes_first(tiny: tuple[Any, Any]) -> None:
    found = list(excerpts.passages(tiny[1], n_passages=120, n_tokens=4_000))
    titles = [text.title for text, _ in found]
    n_articles = len(set(titles))
    assert n_articles < 120
    assert len(set(titles[:n_articles])) == n_articles
    assert all(len(ids) == 4_000 for _, ids in found)
    first, second = (ids for text, ids in found if text.title == titles[0])
    assert torch.equal(torch.cat((first, second)), found[0][0].ids[:8_000])
    with pytest.raises(ValueError, match="99999 passages of 4,000 tokens are needed, but"):
        excerpts.passages(tiny[1], n_passages=99_999, n_tokens=4_000)


def test_an_unknown_control_is_refused() -> None:
    with pytest.raises(ValueError, match="no control 'k'; choose from: paper, paper-plain"):
        control("k")


@pytest.mark.parametrize(
    ("lo", "hi", "share", "p", "says"),
    [
        (0.1, 0.3, 0.4, 0.01, "compression costs"),
        (-0.3, -0.1, 0.7, 0.01, "compression regularises"),
        (-0.3, -0.1, 0.55, 0.2, "the sign is noise"),
        (-0.3, 0.1, 0.7, 0.01, "the sign is noise"),
    ],
)
def test_the_rule(lo: float, hi: float, share: float, p: float, says: str) -> None:
    assert verdict(lo, hi, share, p) == says


def test_the_answer_is_rendered_from_the_rows(synthetic: list[Record]) -> None:
    numbers = tidy(synthetic)
    said = answer(numbers)
    assert said.startswith("By the rule, the sign is noise. At 1,295 tokens")
    assert "-0.1 to 0.3, 60 articles" in said
    assert "v-shrunk (0.3 %), temperature-1.05 (-0.4 %)" in said
    frame = decision(numbers)
    assert frame.iloc[-1]["statistic"] == "answer: the sign is noise"
    assert frame.iloc[-1]["profile"] == "synthetic"
    flipped = numbers.copy()
    paper = (flipped["control"] == "paper") & (flipped["metric"] == "ppl_delta_pct")
    flipped.loc[paper, ["value", "lo", "hi"]] += 1
    assert answer(flipped).startswith("By the rule, compression costs.")
    assert decision(pd.DataFrame(columns=numbers.columns)).empty


def test_the_tiny_outcome_is_decided_too(outcome: Outcome) -> None:
    rows = [Row.model_validate(r) for r in outcome.rows]
    record = Record(experiment="inversion_controls", key="0", params={}, status="ok", rows=rows)
    assert answer(tidy([record])).startswith("By the rule, ")
