"""Evict, then quantise, then share: every policy against the full cache with the rest masked."""

import pytest
import torch
from torch.testing import assert_close

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.evict import (
    H2O,
    TOVA,
    FullKV,
    KeyDiff,
    KeyNorm,
    LayerPlan,
    Plan,
    Random,
    RankMerge,
    SnapKV,
    StreamingLLM,
)  # fmt: skip

DOCUMENT, BUDGET = 60, 20
EXACT = {"atol": 1e-5, "rtol": 0.0}
LOSSLESS = {"keys": pk.FullPrecision(), "values": pk.FullPrecision()}
PAPER = {"keys": pk.Int8("tensor"), "values": pk.TurboQuant(3, "plain"), "n_sink": 2}
POLICIES = [
    StreamingLLM(), H2O(), TOVA(), SnapKV(window=8), KeyDiff(), KeyNorm(), Random(),
    RankMerge(first=H2O(), second=KeyDiff()),
]  # fmt: skip
MIXED = Plan(
    layers=(
        LayerPlan(policy=H2O(), budget=(9, 31)),
        LayerPlan(policy=SnapKV(window=4), budget=(25, 7)),
    )
)


@pytest.mark.parametrize("codec", [LOSSLESS, PAPER], ids=["lossless", "paper"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_every_policy_is_the_masked_full_cache(llama, tokens, masked_forward, policy, codec):
    document, own = tokens(1, DOCUMENT), tokens(3, 7, seed=1)
    pool = pk.build_pool(llama, document, **codec, plan=Plan.uniform(policy, BUDGET, 2))
    assert pool.kept_per_head == ((BUDGET,) * 2,) * 2
    shared = hf.logits(llama, pool.agent_cache(3), own, DOCUMENT)
    assert_close(shared, masked_forward(llama, pool, own), **EXACT)
    full = pk.build_pool(llama, document, **LOSSLESS)
    assert (shared - hf.logits(llama, full.agent_cache(3), own, DOCUMENT)).abs().max() > 1e-3


def test_layers_and_heads_with_their_own_budgets(model, tokens, masked_forward):
    document, own = tokens(1, DOCUMENT), tokens(3, 7, seed=1)
    pool = pk.build_pool(model, document, **PAPER, plan=MIXED)
    assert pool.kept_per_head == ((9, 31), (25, 7))
    shared = hf.logits(model, pool.agent_cache(3), own, DOCUMENT)
    assert_close(shared, masked_forward(model, pool, own), **EXACT)


def test_what_is_kept_follows_from_the_models_own_attention(llama, tokens):
    """Column sums of the eager attention matrix, taken from transformers, rank as H2O ranks."""
    document = tokens(1, DOCUMENT)
    pool = pk.build_pool(llama, document, **LOSSLESS, plan=Plan.uniform(H2O(recent=0.0), BUDGET, 2))
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = llama(document, output_attentions=True).attentions
    pk.prepare(llama)
    for matrix, [piece] in zip(attentions, pool.layers, strict=True):
        sums = matrix[0].sum(1).unflatten(0, (2, -1)).mean(1)
        want = sums.topk(BUDGET, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(piece.positions.long(), want)


def test_a_prefilled_cache_holds_the_plan_and_goes_on_from_the_tokens_seen(
    llama, tokens, masked_forward
):
    document, own = tokens(1, DOCUMENT), tokens(1, 12, seed=1)
    cache = pk.prefill(llama, document, MIXED)
    assert cache.kept_per_head == ((9, 31), (25, 7))
    assert cache.get_seq_length() == DOCUMENT
    first = hf.logits(llama, cache, own[:, :5], DOCUMENT)  # several tokens on a ragged cache
    rest = [hf.logits(llama, cache, own[:, i : i + 1], DOCUMENT + i) for i in range(5, 12)]
    pool = pk.build_pool(llama, document, **LOSSLESS, plan=MIXED)
    assert_close(torch.cat([first, *rest], 1), masked_forward(llama, pool, own), **EXACT)


def test_bytes_are_those_of_the_budget(llama, tokens):
    document = tokens(1, DOCUMENT)
    pool = pk.build_pool(llama, document, **LOSSLESS, plan=MIXED)
    keys_and_values = (9 + 31 + 25 + 7) * 2 * 16 * 4  # head_dim 16, fp32
    located = 4 * -(-DOCUMENT // 8)  # a bit a token for each of the four heads
    assert pool.nbytes == keys_and_values + located + 4 * DOCUMENT  # and the document's ids


def test_full_layers_among_evicted_ones(llama, tokens):
    plan = Plan(
        layers=(LayerPlan(policy=FullKV(), budget=1), LayerPlan(policy=KeyDiff(), budget=BUDGET))
    )
    pool = pk.build_pool(llama, tokens(1, DOCUMENT), **PAPER, plan=plan)
    assert pool.kept == (DOCUMENT, BUDGET)


def test_a_budget_beyond_the_document_is_the_whole_document(llama, tokens):
    document, own = tokens(1, DOCUMENT), tokens(2, 5, seed=1)
    everything = pk.build_pool(llama, document, **LOSSLESS, plan=Plan.uniform(SnapKV(), 10_000, 2))
    plain = pk.build_pool(llama, document, **LOSSLESS)
    a, b = (hf.logits(llama, p.agent_cache(2), own, DOCUMENT) for p in (everything, plain))
    assert_close(a, b, **EXACT)


def test_observing_a_prefill_changes_nothing(model, tokens):
    document = tokens(1, DOCUMENT)
    plain = hf.read_document(model, document)
    observed, _ = hf.evict_document(model, document, [Plan.uniform(H2O(), BUDGET, 2)])
    for a, b in zip(plain, observed, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_one_prefill_serves_many_plans(llama, tokens):
    document = tokens(1, DOCUMENT)
    plans = [Plan.uniform(p, BUDGET, 2) for p in POLICIES]
    layers, kept = hf.evict_document(llama, document, plans)
    for plan, of_plan in zip(plans, kept, strict=True):
        a = hf.share(llama, layers, document, **PAPER, kept=of_plan)
        b = pk.build_pool(llama, document, **PAPER, plan=plan)
        assert all(torch.equal(t, b.tensors[name]) for name, t in a.tensors.items())


def test_another_models_plan(llama, tokens):
    with pytest.raises(ValueError, match="the plan has 3 layers, the model 2"):
        pk.build_pool(llama, tokens(1, 8), **PAPER, plan=Plan.uniform(H2O(), 4, 3))
