"""The codec frontier: whole codecs under a total, pools with codecs by layer, and the experiment."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from polykv_lib import hf, presets
from polykv_lib.calibration.bits import choose_codecs
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.pool import PoolError
from polykv_lib.quantize import HarmonicTurboQuant, Int8, TurboQuant
from polykv_lib.study.experiments import codec_frontier
from polykv_lib.study.record import Outcome

POINT = {
    "MODEL": "tiny",
    "SEED": 0,
    "PREFIX_TOKENS": 48,
    "N_PASSAGES": 4,
    "SCORED_TOKENS": 12,
    "CODECS": ["paper", "lean", "tiered", "harmonic4+tq4@0"],
    "KEY_OPTIONS": ["shaped2", "harmonic4"],
    "VALUE_OPTIONS": ["tq1", "tq3", "tq4"],
    "BUDGETS": [4, 9],
    "N_BOOT": 100,
}


@pytest.fixture(scope="module")
def outcome(tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]) -> Outcome:
    return in_parts(codec_frontier.run, POINT)


def found(outcome: Outcome, table: str, metric: str, **dims: object) -> list[Any]:
    rows = [r for r in outcome.rows if (r.table, r.metric) == (table, metric)]
    return [r.value for r in rows if r.dims.items() >= dims.items()]


def test_each_half_scores_its_own_articles(outcome: Outcome) -> None:
    halves = {role: {s["article"] for s in outcome.samples if s["role"] == role}
              for role in ("selection", "report")}  # fmt: skip
    assert len(halves["selection"]) == len(halves["report"]) == 2
    assert not halves["selection"] & halves["report"]
    by_role = {role: {s["codec"] for s in outcome.samples if s["role"] == role} for role in halves}
    assert by_role["selection"] == set(POINT["CODECS"])
    assert by_role["report"] == {*POINT["CODECS"], "by layer, 4 bits", "by layer, 9 bits"}


def test_single_layer_passes_are_those_of_the_whole_model(tiny: tuple[Any, Any]) -> None:
    """The last layer's values by one codec, through all layers and with a cache of its own."""
    model, _ = tiny
    ids = torch.randint(0, 200, (1, 61), generator=torch.Generator().manual_seed(0))
    layers = hf.read_document(model, ids[:, :48])
    passage = codec_frontier.Passage(article="a", ids=ids[:, :48], window=ids[0, 48:])
    point = codec_frontier.settings(codec_frontier.Settings, POINT)
    single = codec_frontier._single_layer(model, passage, layers, point)
    fed = ids[:, 48:-1]
    full = hf.logits(model, hf.full_cache(layers), fed, 48)[0]
    for o, bits in enumerate((1, 3, 4)):
        lossless = hf.share(model, layers, ids[:, :48], keys=presets.codec("full+full").keys,
                            values=[presets.codec("full+full").values, TurboQuant(bits, match_norm=True, norms="byte")])  # fmt: skip
        logits = hf.logits(model, lossless.agent_cache(1), fed, 48)[0]
        assert single["values"][1, o] == pytest.approx(
            kl_nats(full, logits).mean().item(), rel=1e-3
        )
    assert (np.diff(single["values"], axis=1) < 0).all()


def test_a_budget_that_pays_for_everything_gets_the_best(outcome: Outcome) -> None:
    bits = found(outcome, "codec_plan", "bits", codec="by layer, 9 bits", side="values")
    assert bits == pytest.approx([4.14] * 2, abs=0.02)
    best = found(outcome, "frontier", "kl_nats", role="report", codec="by layer, 9 bits")
    tight = found(outcome, "frontier", "kl_nats", role="report", codec="by layer, 4 bits")
    assert best < tight


def test_bits_are_those_of_the_built_pool(tiny: tuple[Any, Any], outcome: Outcome) -> None:
    model, _ = tiny
    codec = presets.codec("lean")
    ids = torch.randint(0, 200, (1, 48))
    pool = hf.build_pool(model, ids, keys=codec.keys, values=codec.values, n_sink=codec.n_sink)
    [bits] = found(outcome, "frontier", "bits_per_element", role="report", codec="lean")
    assert bits == pytest.approx(pool.bits_per_element)
    [ratio] = found(outcome, "frontier", "memory_ratio", role="report", codec="lean")
    assert ratio == pytest.approx(16 / bits)


def test_codecs_by_layer_are_each_layers_own(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    ids = torch.randint(0, 200, (1, 30))
    layers = hf.read_document(model, ids)
    keys, values = [Int8(), HarmonicTurboQuant(2)], TurboQuant(3)
    pool = hf.share(model, layers, ids, keys=keys, values=values, n_sink=0)
    assert [pieces[0].keys.codec for pieces in pool.layers] == keys
    for i, codec in enumerate(keys):
        wanted = codec.dequantize(codec.quantize(layers[i].keys))
        torch.testing.assert_close(pool.read(i)[0], wanted)


@pytest.mark.parametrize(("n", "layers"), [(1, "at least 2"), (3, "2")])
def test_codecs_for_another_number_of_layers_are_refused(
    tiny: tuple[Any, Any], n: int, layers: str
) -> None:
    model, _ = tiny
    ids = torch.randint(0, 200, (1, 30))
    with pytest.raises(PoolError, match=f"{n} codecs of keys for {layers} layers; pass one codec"):
        hf.build_pool(model, ids, keys=[Int8()] * n, values=Int8())


def test_choices_are_the_best_that_whole_codecs_allow() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        units = [
            list(zip((10, 20, 40), np.cumsum(rng.random(3))[::-1].tolist(), strict=True))
            for _ in range(4)
        ]
        total = int(rng.integers(40, 170))
        picked = choose_codecs(units, total)
        cost = sum(units[u][o][0] for u, o in enumerate(picked))
        error = sum(units[u][o][1] for u, o in enumerate(picked))
        assert cost <= total
        cheaper = [
            sum(units[u][o][1] for u, o in enumerate(other))
            for other in product(range(3), repeat=4)
            if sum(units[u][o][0] for u, o in enumerate(other)) <= cost - 20
        ]
        assert all(error <= e + 1e-9 for e in cheaper), "what is lost is less than one step"


def test_options_ascend_in_bytes() -> None:
    with pytest.raises(ValueError, match="do not ascend in bytes; list cheaper codecs first"):
        choose_codecs([[(2, 0.1), (1, 0.2)]], 3)


def test_names_are_presets_or_pairs() -> None:
    assert presets.codec("lean") == presets.codec("harmonic4+tq3")
    assert presets.codec("int8+tq2@8").n_sink == 8
    assert presets.codec("tiered") == presets.codec("shaped4-3+tq4-2")
    assert presets.codec("shaped") == presets.codec("shaped4+tq3")
    assert presets.codec("slim") == presets.codec("shaped4-3-eighth+tq4-2-eighth")
    with pytest.raises(ValueError, match=r"'x\+tq2': no codec 'x'; Choose one of: int8, affine2"):
        presets.codec("x+tq2")
    with pytest.raises(ValueError, match="no codec 'leen'; did you mean 'lean'"):
        presets.codec("leen")
