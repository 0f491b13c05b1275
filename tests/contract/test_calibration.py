"""One evicted layer, recomputed and swapped, against real runs; plans from tiny models."""

import inspect
import json
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.calibration import EncodedItem, Recipe, solve
from polykv_lib.evict import (
    D2O,
    H2O,
    TOVA,
    FullKV,
    KeyDiff,
    LayerPlan,
    Plan,
    SnapKV,
    StreamingLLM,
)
from polykv_lib.hf.calibration import calibrating as calibration
from polykv_lib.hf.calibration import single_layer, validation
from polykv_lib.hf.calibration.single_layer import Settings, measure_item
from polykv_lib.hf.calibration.suffix import answer_logits, decoded_logits
from polykv_lib.hf.compat import forward

POLICIES = (H2O(recent=0.0), KeyDiff(), StreamingLLM(), D2O())
N, TARGET = 48, 0.25
SETTINGS = Settings(policies=POLICIES, fractions=(0.125, TARGET, 0.5), target=TARGET)
DECODE = Settings(
    policies=(*POLICIES, SnapKV(window=4), TOVA()), fractions=(0.125, TARGET, 0.5), target=TARGET,
    phase="decode",
)  # fmt: skip
LOSSLESS = {"keys": pk.FullPrecision(), "values": pk.FullPrecision()}


@pytest.fixture
def item(tokens):
    def make(seed=0, family="a", n=N):
        ids = tokens(1, n + 9, seed=seed)[0].tolist()
        return EncodedItem(
            id=f"{family}{seed}", family=family,
            context_ids=tuple(ids[:n]), question_ids=tuple(ids[n : n + 5]),
            answer_ids=tuple(ids[n + 5 :]),
        )  # fmt: skip

    return make


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def only(layer, policy, budget, n_layers=2):
    """A plan that evicts one layer; budgets may differ by head."""
    full = LayerPlan(policy=FullKV(), budget=N)
    own = LayerPlan(policy=policy, budget=budget)
    return Plan(layers=tuple(own if i == layer else full for i in range(n_layers)))


def real_outputs(model, item, plan, layer):
    """What a layer's o_proj returned while question and answer were read over a plan's cache."""
    cache = pk.prefill(model, torch.tensor([item.context_ids]), plan)
    caught = []
    project = model.base_model.layers[layer].self_attn.o_proj
    hook = project.register_forward_hook(lambda _, __, out: caught.append(out[0]))
    logits = answer_logits(model, cache, item)
    hook.remove()
    return caught[0], logits


@pytest.mark.parametrize("layer", [0, 1])
def test_local_recomputation_is_a_real_run_with_only_that_layer_evicted(model, item, layer):
    given = item()
    found = measure_item(model, given, replace(SETTINGS, single_layer=False))
    full, _ = real_outputs(model, given, Plan.uniform(FullKV(), N, 2), layer)
    for p, policy in enumerate(POLICIES):
        for point, fraction in enumerate(SETTINGS.fractions):
            budget = round(fraction * N)
            out, _ = real_outputs(model, given, only(layer, policy, budget), layer)
            error = float((full - out).norm() / full.norm())
            assert found.error[layer, p, point] == pytest.approx(error, abs=1e-5)
            assert error > 1e-4
            cosine = torch.cosine_similarity(full, out, dim=-1).mean()
            assert found.cosine[layer, p, point] == pytest.approx(float(cosine), abs=1e-5)
            for head in range(2):
                budgets = tuple(budget if h == head else N for h in range(2))
                out, _ = real_outputs(model, given, only(layer, policy, budgets), layer)
                want = float((full - out).norm() / full.norm())
                assert found.head_error[layer, head, p, point] == pytest.approx(want, abs=1e-5)
    assert found.nll is None


def test_a_resumed_pass_is_the_whole_pass_with_only_that_layer_evicted(model, item):
    given = item()
    found = measure_item(model, given, SETTINGS)
    dense = hf.full_cache(hf.read_document(model, torch.tensor([given.context_ids])))
    full = answer_logits(model, dense, given).log_softmax(-1)
    targets = torch.tensor(given.answer_ids)
    nll = -full.gather(1, targets[:, None]).mean()
    assert found.full_nll == pytest.approx(float(nll), abs=1e-5)
    for layer in range(2):
        for p, policy in enumerate(POLICIES):
            _, logits = real_outputs(model, given, only(layer, policy, 12), layer)
            own = logits.log_softmax(-1)
            assert found.nll[layer, p] == pytest.approx(
                float(-own.gather(1, targets[:, None]).mean()), abs=1e-5
            )
            kl = (full.exp() * (full - own)).sum(-1).mean()
            assert found.kl[layer, p] == pytest.approx(float(kl), abs=1e-5)
            assert kl > 1e-5


def stepped(model, item, plan, layer):
    """What a layer's o_proj returned step by step over a cache that evicts, and the logits."""
    cache, caught = hf.EvictingCache(model, plan), []
    forward(model, torch.tensor([item.context_ids]), cache)
    project = model.base_model.layers[layer].self_attn.o_proj
    hook = project.register_forward_hook(lambda _, __, out: caught.append(out[0]))
    logits = decoded_logits(model, cache, item)
    hook.remove()
    cache.check()
    return torch.cat(caught), logits


def only_decoding(layer, policy, budget):
    everything = LayerPlan(policy=FullKV(), budget=N)
    own = LayerPlan(policy=policy, budget=budget)
    layers = (everything, everything)
    return Plan(layers=layers, decode=tuple(own if i == layer else everything for i in range(2)))


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_evicts_while_decoding_is_a_real_run_step_by_step(model, item, layer):
    given = item()
    found = measure_item(model, given, DECODE)
    whole, plain = stepped(model, given, Plan.uniform(FullKV(), N, 2), layer)
    full, first = whole[5:], plain.log_softmax(-1)
    assert found.full_nll == pytest.approx(nll_of(plain, given), abs=1e-5)
    for p, policy in enumerate(DECODE.policies):
        for point, fraction in enumerate(DECODE.fractions):
            budget = round(fraction * N)
            out, logits = stepped(model, given, only_decoding(layer, policy, budget), layer)
            error = float((full - out[5:]).norm() / full.norm())
            assert found.error[layer, p, point] == pytest.approx(error, abs=1e-5)
            assert error > 1e-4
            assert_close(out[:5], whole[:5], atol=1e-5, rtol=0.0)  # the question reads everything
            cosine = float(torch.cosine_similarity(full, out[5:], dim=-1).mean())
            assert found.cosine[layer, p, point] == pytest.approx(cosine, abs=1e-5)
            if fraction == TARGET:
                assert found.nll[layer, p] == pytest.approx(nll_of(logits, given), abs=1e-5)
                kl = (first.exp() * (first - logits.log_softmax(-1))).sum(-1)
                assert found.kl[layer, p] == pytest.approx(float(kl.mean()), abs=1e-5)
                assert kl[0] == pytest.approx(0.0, abs=1e-5)
                assert kl[1:].mean() > 1e-5


def nll_of(logits, item):
    targets = torch.tensor(item.answer_ids)[:, None]
    return float(-logits.log_softmax(-1).gather(1, targets).mean())


def test_plans_of_both_phases(llama, words, item, tmp_path):
    arguments = {"budget": TARGET, "policies": POLICIES}
    prefill, decode, both = (
        pk.calibrate(llama, words, [item(), item(1, "b")], phases=phases, **arguments)
        for phases in (["prefill"], ["decode"], ["prefill", "decode"])
    )
    assert prefill == pk.calibrate(llama, words, [item(), item(1, "b")], **arguments)
    assert prefill.decode is None
    assert {layer.policy for layer in decode.layers} == {FullKV()}
    assert sum(layer.budget for layer in decode.decode) == 2 * 12
    assert (both.layers, both.decode) == (prefill.layers, decode.decode)
    assert Plan.load(both.save(tmp_path / "plan.yaml")) == both


def test_an_answer_without_a_decoding_step(llama, item):
    short = replace(item(), answer_ids=(1,))
    with pytest.raises(ValueError, match=r"'a0' has one token, .* answers of at least 2 tokens"):
        measure_item(llama, short, DECODE)


def test_a_resumed_pass_leaves_the_model_as_it_was(llama, item):
    layers = llama.base_model.layers
    measure_item(llama, item(), SETTINGS)
    assert llama.base_model.layers is layers


def test_small_targets_have_points_below_them(llama, words, item, monkeypatch):
    assert calibration.points_for(0.25) == calibration.FRACTIONS
    assert calibration.points_for(0.1) == (0.025, 0.05, *calibration.FRACTIONS)
    asked = []
    measure = calibration.measure
    monkeypatch.setattr(calibration, "measure", lambda *a, **k: asked.append(k) or measure(*a, **k))
    found = calibration.run(llama, words, [item()], budget=0.1, policies=POLICIES[:1])
    assert asked[0]["fractions"] == calibration.points_for(0.1)
    assert [tokens for tokens, _ in found.curves[0]] == [1, 2, 3, 5, 6, 12, 19, 29, 38, 48]


def test_answers_are_what_a_plain_forward_predicts(model, item):
    given = item()
    everything = torch.tensor([given.context_ids + given.tail_ids])
    dense = hf.full_cache(hf.read_document(model, torch.tensor([given.context_ids])))
    with torch.no_grad():
        plain = model(everything).logits[0, -len(given.answer_ids) :]
    assert_close(answer_logits(model, dense, given), plain, atol=1e-5, rtol=0.0)


def test_the_entropy_is_that_of_the_models_own_attention(llama, item):
    given = item()
    found = measure_item(llama, given, replace(SETTINGS, single_layer=False))
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = llama(torch.tensor([given.context_ids]), output_attentions=True).attentions
    pk.prepare(llama)
    for matrix, entropy in zip(attentions, found.entropy, strict=True):
        p = matrix[0].mean((0, 1))
        assert entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)


@pytest.mark.parametrize("level", ["layer", "head"])
def test_a_plan_spends_what_a_uniform_one_does_and_is_the_same_every_time(
    llama, words, item, tmp_path, level
):
    items = [item(s, f) for s, f in enumerate("aab")]
    texts = []
    for folder in ("first", "second"):
        plan = pk.calibrate(llama, words, items, budget=TARGET, level=level, policies=POLICIES)
        assert plan.total(n_heads=2) == 2 * 2 * 12
        texts.append(plan.save(tmp_path / f"{folder}.yaml").read_bytes())
        [file] = (tmp_path / "polykv" / "calibration").glob("*.json")
        file.unlink()  # measured anew
    assert texts[0] == texts[1]
    _, [kept] = hf.evict_document(llama, torch.tensor([items[0].context_ids]), [plan])
    assert sum(len(head) for layer in kept for head in layer) == 48


def test_measurements_are_kept_by_fingerprint(llama, tiny_model, item, monkeypatch, tmp_path):
    items, said = [item(0), item(1)], []
    arguments = {"target": TARGET, "policies": POLICIES, "say": said.append}
    first = calibration.measure(llama, items, **arguments)
    assert [s.partition(",")[0] for s in said] == [
        "1 of 2 items measured", "2 of 2 items measured"
    ]  # fmt: skip
    assert said[1].endswith("about 0 s left")
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "measure_item", None)
        again = calibration.measure(llama, items, **arguments)
    for a, b in zip(first.items, again.items, strict=True):
        assert json.dumps(vars(a), default=np.ndarray.tolist) == json.dumps(
            vars(b), default=np.ndarray.tolist
        )
    other = tiny_model("Llama")
    other.base_model.layers[1].self_attn.k_proj.weight.data *= 2
    for model, texts, more in (
        (other, items, {}),
        (llama, items[:1], {}),
        (llama, items, {"activation": "heads"}),
        (llama, items, {"target": 0.5}),
    ):
        calibration.measure(model, texts, **(arguments | more))
    assert len(list((tmp_path / "polykv" / "calibration").glob("*.json"))) == 5


def test_no_pass_for_a_layer_unless_a_signal_needs_it(llama, words, item, monkeypatch):
    monkeypatch.setattr(single_layer, "resumed", None)
    cheap = {"budget": 12, "policies": POLICIES, "n_tokens": N}
    pk.calibrate(llama, words, [item()], **cheap, pattern_signal="cosine", budget_signal="entropy")
    with pytest.raises(TypeError, match="not callable"):
        pk.calibrate(llama, words, [item()], **cheap, pattern_signal="cosine", budget_signal="ppl")


def test_inverse_patterns_are_the_worst_by_the_signal(llama, item):
    measured = calibration.measure(llama, [item()], target=TARGET, policies=POLICIES)
    cosine = measured.items[0].cosine[..., measured.fractions.index(measured.target)]
    for inverse, best in ((False, cosine.argmax(1)), (True, cosine.argmin(1))):
        recipe = Recipe(pattern_signal="cosine", budget_signal="uniform", inverse_patterns=inverse)
        plan = solve(measured, recipe, n_tokens=N).plan
        assert [layer.policy for layer in plan.layers] == [POLICIES[i] for i in best]
    assert (cosine.argmax(1) != cosine.argmin(1)).all()


def test_calibration_records_its_texts(llama, words, item):
    items = [item(3, "quote"), item(4, "needle", n=40)]
    found = calibration.run(llama, words, items, budget=0.25, policies=POLICIES)
    assert found.item_ids == ("quote3", "needle4")
    assert found.n_tokens == 44
    assert set(found.signals) == {"cosine", "entropy", "ppl", "ppl_max", "kl", "gain"}
    assert [curve[-1] for curve in found.curves] == [(44, 0.0)] * 2


def test_plans_are_scored_on_one_prefill(llama, item):
    items = [item(0), item(1, "b", n=40)]
    uniform = Plan.uniform(KeyDiff(), 10, 2)
    plans = {
        "full": Plan.uniform(FullKV(), 1, 2),
        "uniform": uniform,
        "quarter": lambda n: Plan.uniform(KeyDiff(), n // 4, 2),
    }
    rows = hf.evaluate_plans(llama, items, plans)
    assert [(r.item, r.plan, r.kept) for r in rows] == [
        ("a0", "full", 192), ("a0", "uniform", 40), ("a0", "quarter", 48),
        ("b1", "full", 160), ("b1", "uniform", 40), ("b1", "quarter", 40),
    ]  # fmt: skip
    assert rows[0].kl == pytest.approx(0.0, abs=1e-6)
    assert rows[0].nll == pytest.approx(rows[0].full_nll, abs=1e-5)
    assert rows[1].kl > 1e-4
    pool = pk.build_pool(llama, torch.tensor([items[1].context_ids]), **LOSSLESS, plan=uniform)
    logits = answer_logits(llama, pool.agent_cache(1), items[1]).log_softmax(-1)
    nll = -logits.gather(1, torch.tensor(items[1].answer_ids)[:, None]).mean()
    assert rows[4].nll == pytest.approx(float(nll), abs=1e-5)


def test_plans_in_one_batch_are_scored_as_each_alone(model, item):
    given = item()
    plans = {
        str(i): Plan(
            layers=(
                LayerPlan(policy=policy, budget=5 + i), LayerPlan(policy=KeyDiff(), budget=30 - i)
            )
        )
        for i, policy in enumerate((*POLICIES, SnapKV(window=4)) * 2)
    } | {"heads": Plan.of(H2O(), [(7, 20), 9]), "later": Plan.uniform(H2O(), 9, 2)}  # fmt: skip
    assert len(plans) > validation.ROWS
    together = hf.evaluate_plans(model, [given], plans)
    assert [s.plan for s in together] == list(plans)
    for score in together:
        plan = plans[score.plan]
        pool = pk.build_pool(model, torch.tensor([given.context_ids]), **LOSSLESS, plan=plan)
        logits = answer_logits(model, pool.agent_cache(1), given)
        assert score.nll == pytest.approx(nll_of(logits, given), abs=1e-5)
        assert score.kept == sum(map(sum, pool.kept_per_head))
    assert len({round(s.nll, 4) for s in together}) == len(plans)


def test_plans_that_evict_while_decoding_are_scored_token_by_token(llama, item):
    given, plan = item(), Plan.uniform(H2O(), 12, 2).decoding(KeyDiff(), 10)
    [score] = hf.evaluate_plans(llama, [given], {"both": plan})
    cache, seen, found = pk.prefill(llama, torch.tensor([given.context_ids]), plan), N, []
    for ids in (given.question_ids, *((i,) for i in given.answer_ids[:-1])):
        found.append(hf.logits(llama, cache, torch.tensor([ids]), seen)[0, -1:])
        seen += len(ids)
    assert score.nll == pytest.approx(nll_of(torch.cat(found), given), abs=1e-5)
    assert score.kept == 2 * 2 * 12
    [alone] = hf.evaluate_plans(llama, [given], {"prefill": Plan.uniform(H2O(), 12, 2)})
    assert abs(alone.nll - score.nll) > 1e-4
    with pytest.raises(ValueError, match="plan 'both' evicts while decoding, but a pool"):
        hf.evaluate_plans(llama, [given], {"both": plan}, keys=pk.Int8("channel"))


def test_a_plain_text_is_continued(words):
    [found] = calibration.items_of(words, [" ".join("x" * n for n in range(1, 9))])
    assert found.context_ids == (1, 2, 3, 4, 5)
    assert found.question_ids == (6,)
    assert found.answer_ids == (7, 8)
    assert found.family == "text"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": []}, r"texts=\[\]; pass a list of at least one text"),
        ({"texts": "a text"}, "pass a list of at least one text"),
        ({"texts": ["x xx"]}, "has 2 tokens; at least 4 are needed"),
        ({"budget": 1.5}, "the budget is 1.5 of the context; pass a fraction"),
        ({"budget": 0}, "the budget is 0 of the context"),
        ({"budget": 96}, "budget=96 for documents of .* tokens; pass at most their length"),
        ({"n_tokens": 0}, "for documents of 0 tokens; pass at most their length"),
        ({"policies": (H2O,)}, r"policy <class .*H2O'>; pass policies such as H2O\(\)"),
        ({"policies": ()}, "1 items and 0 policies; pass at least one"),
    ],
)
def test_what_can_not_be_calibrated(llama, words, item, change, message):
    arguments = {"texts": [item()], "budget": 0.25, "policies": POLICIES} | change
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(pk.calibrate)(llama, words, **arguments)


@pytest.mark.parametrize(
    ("valid", "name", "value", "message"),
    [
        (Recipe(), "level", "heads", "level='heads'; choose one of: layer, head"),
        (Recipe(), "pattern_signal", "cosin", "choose one of: error, cosine, ppl"),
        (Recipe(), "budget_signal", "gain-curve", "choose one of: gain_curve, curve, entropy"),
        (SETTINGS, "activation", "head", "activation='head'; choose one of: o_proj, heads"),
    ],
)
def test_no_option_is_taken_for_another(valid, name, value, message):
    options = copy(valid)
    object.__setattr__(options, name, value)  # types are checked in tests only
    with pytest.raises(ValueError, match=message):
        options.__post_init__()


def test_a_budget_is_a_number():
    with pytest.raises(ValueError, match="budget='25%'; pass mean tokens for each layer"):
        calibration.check("25%", 48, POLICIES)


def test_an_item_longer_than_the_model(llama, words, item):
    with pytest.raises(ValueError, match=r"item 'a0' has 608 tokens, but the model has 512"):
        pk.calibrate(llama, words, [item(n=600)], budget=0.25)
