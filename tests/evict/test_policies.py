"""Policies on small tensors, against the equation written out; keeping, against the ranking."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polykv_lib.evict import (
    CAKE,
    CAM,
    D2O,
    H2O,
    TOVA,
    EvictionPolicy,
    ExpectedAttention,
    FullKV,
    KeyDiff,
    KeyNorm,
    Protected,
    Random,
    RankMerge,
    Scissorhands,
    SnapKV,
    StreamingLLM,
    attention,
    keep,
)  # fmt: skip
from polykv_lib.evict.controls import Guarded
from polykv_lib.kv import LayerKV

POLICIES = [
    FullKV(), StreamingLLM(n_sink=2), H2O(), TOVA(), SnapKV(window=6, kernel=3), KeyDiff(), KeyNorm(),
    SnapKV(window=6, kernel=3, pooling="maximum"), Random(), RankMerge(first=H2O(), second=KeyDiff()),
    Guarded(policy=KeyNorm(), first=2, last=3), CAKE(window=6), CAM(), D2O(n_sink=2),
    Scissorhands(window=20, recent=3), ExpectedAttention(window=9, n_sink=2),
]  # fmt: skip
EACH = pytest.mark.parametrize("policy", POLICIES, ids=str)


def observation(tokens: int = 40, heads: int = 2, groups: int = 3, seed: int = 0) -> LayerKV:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, heads, tokens, 16, generator=generator).unbind()
    queries = torch.randn(1, heads * groups, tokens, 16, generator=generator) * 2
    return LayerKV(keys=keys, values=values, queries=queries)


def dense_attention(layer: LayerKV) -> torch.Tensor:
    """[head, group, query, token], the whole matrix, in double precision."""
    heads, tokens = layer.keys.shape[1:3]
    q = layer.queries[0].double().unflatten(0, (heads, -1))
    scores = q @ layer.keys[0].double().mT[:, None] * 16**-0.5
    return scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("block", [7, 64])
@pytest.mark.parametrize("n_queries", [40, 13, 1])
def test_h2o_sums_whole_columns_without_the_matrix(monkeypatch, block, n_queries):
    """Of all queries, at prefill, or of the newest alone; also where the model keeps gradients."""
    monkeypatch.setattr(attention, "BLOCK", block)
    whole = observation()
    queries = whole.queries[:, :, -n_queries:].clone().requires_grad_()
    layer = LayerKV(keys=whole.keys, values=whole.values, queries=queries)
    rows = dense_attention(whole)[:, :, -n_queries:]
    want = rows.sum(2).mean(1).float()
    torch.testing.assert_close(H2O().score(layer)[0], want, atol=1e-5, rtol=0.0)
    assert (rows.sum(2).amax(1).float() - want).abs().max() > 1e-3  # not the maximum over heads


def test_columns_of_a_batch_in_half_precision():
    """Rows of a batch do not mix, and bf16 keys and queries are summed in fp32."""
    layers = [observation(200, seed=s) for s in (0, 1)]
    keys, queries = (
        torch.cat([getattr(layer, name) for layer in layers]).bfloat16()
        for name in ("keys", "queries")
    )
    sums = attention.column_sums(queries, keys, 0.25)
    for row in range(2):
        alone = LayerKV(
            keys=keys[row : row + 1], values=layers[0].values, queries=queries[row : row + 1]
        )
        want = dense_attention(alone).sum(2).mean(1).float()
        torch.testing.assert_close(sums[row], want, atol=1e-4, rtol=1e-5)


def test_tova_is_the_last_row_over_all_heads():
    layer = observation()
    want = dense_attention(layer)[:, :, -1].mean((0, 1)).float()
    torch.testing.assert_close(TOVA().score(layer)[0], want.expand(2, -1))


def test_snapkv_pools_the_windows_attention():
    layer = observation()
    mean = dense_attention(layer)[:, :, -6:, :-6].mean(2)  # [head, group, token]
    padded = torch.nn.functional.pad(mean, (1, 1))
    pooled = (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]).mean(1) / 3
    score = SnapKV(window=6, kernel=3).score(layer)[0]
    torch.testing.assert_close(score[:, :-6], pooled.float())
    kept = keep(SnapKV(window=6, kernel=3), layer, (10, 10))
    assert all(tokens.tolist()[-6:] == list(range(34, 40)) for tokens in kept)


def test_key_based_policies_need_no_queries_and_attention_based_ones_say_so():
    layer = LayerKV(keys=observation().keys, values=observation().values)
    for policy in (KeyDiff(), KeyNorm(), StreamingLLM(), Random()):
        keep(policy, layer, (5, 5))
    with pytest.raises(
        ValueError, match="H2O scores by attention, but the observation holds no queries"
    ):
        keep(H2O(), layer, (5, 5))


def test_keydiff_drops_the_keys_that_look_like_all_the_others():
    keys = torch.ones(1, 1, 10, 8) + 0.01 * torch.randn(
        1, 1, 10, 8, generator=torch.Generator().manual_seed(0)
    )
    keys[0, 0, 3] = -1
    [kept] = keep(KeyDiff(), LayerKV(keys=keys, values=keys), (1,))
    assert kept.tolist() == [3]


def test_key_norm_keeps_the_smallest():
    keys = torch.arange(1, 7.0)[None, None, :, None].expand(1, 1, 6, 4)
    [kept] = keep(KeyNorm(), LayerKV(keys=keys, values=keys), (2,))
    assert kept.tolist() == [0, 1]


def test_streaming_keeps_sinks_and_the_newest():
    kept = keep(StreamingLLM(n_sink=2), observation(10), (5, 3))
    assert [t.tolist() for t in kept] == [[0, 1, 7, 8, 9], [0, 1, 9]]


def test_merging_ranks_takes_from_both_in_turn():
    layer = observation()
    first, second = KeyNorm(), StreamingLLM(n_sink=0)
    kept = set(keep(RankMerge(first=first, second=second), layer, (8, 8))[0].tolist())
    best = [set(keep(p, layer, (4, 4))[0].tolist()) for p in (first, second)]
    assert best[0] | best[1] <= kept


@EACH
@given(budget=st.integers(1, 60), tokens=st.integers(8, 40), seed=st.integers(0, 20))
def test_exactly_the_budget_is_kept_in_the_order_of_time(
    policy: EvictionPolicy, budget, tokens, seed
):
    layer = observation(tokens, seed=seed)
    kept = keep(policy, layer, (budget, max(1, budget // 2)))
    for tokens_kept, wanted in zip(kept, (budget, max(1, budget // 2)), strict=True):
        assert len(tokens_kept) == min(wanted, tokens)
        assert (tokens_kept.diff() > 0).all()


@pytest.mark.parametrize("policy", [p for p in POLICIES if not isinstance(p, Random)], ids=str)
def test_every_policy_says_what_it_does_in_both_phases(policy: EvictionPolicy):
    text = " ".join((type(policy).__doc__ or "").split())
    assert "prefill" in text
    assert "enerating" in text


@EACH
def test_protected_tokens_are_kept_and_no_better_one_is_lost(policy: EvictionPolicy):
    layer = observation()
    scores = policy.score(layer)[0]
    for head, kept in enumerate(keep(policy, layer, (12, 20))):
        budget = (12, 20)[head]
        protected = policy.protect(budget)
        first = set(range(min(protected.first, budget)))
        last = set(range(40 - min(protected.last, budget - len(first)), 40))
        chosen = set(kept.tolist())
        assert first | last <= chosen
        lost = [scores[head, t] for t in range(40) if t not in chosen]
        free = [scores[head, t] for t in chosen - first - last]
        assert not free or min(free) >= max(lost)


def test_ties_never_evict_the_protected():
    """Equal scores everywhere: protection is a rule, not a large score that another may tie with."""
    layer = LayerKV(
        keys=torch.ones(1, 1, 30, 8),
        values=torch.ones(1, 1, 30, 8),
        queries=torch.ones(1, 1, 30, 8),
    )
    for policy in (H2O(recent=0.5), SnapKV(window=5), Guarded(policy=KeyNorm(), first=2, last=3)):
        kept = keep(policy, layer, (10,))[0].tolist()
        protected = policy.protect(10)
        assert kept[: protected.first] == list(range(protected.first))
        assert kept[10 - protected.last :] == list(range(30 - protected.last, 30))


@pytest.mark.parametrize("budgets", [(0, 5), (5,), (5, -1)])
def test_bad_budgets(budgets):
    with pytest.raises(ValueError, match="for 2 KV heads; pass one positive number of tokens"):
        keep(KeyNorm(), observation(), budgets)


def test_a_window_longer_than_the_document_keeps_the_newest():
    kept = keep(SnapKV(window=64), observation(10), (4, 4))
    assert [t.tolist() for t in kept] == [[6, 7, 8, 9]] * 2


def test_random_differs_by_layer_and_head_and_stays_through_the_steps():
    one, other = observation(), replace(observation(), keys=-observation().keys)
    first, second = Random().score(one), Random().score(other)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:, 0], first[:, 1])
    later = replace(one, keys=one.keys[:, :, 5:], values=one.values[:, :, 5:], queries=None)
    places = torch.arange(5, one.keys.shape[2]).expand(later.keys.shape[:3])
    assert torch.equal(Random().score(replace(later, positions=places)), first[:, :, 5:])
    many = torch.randn(1, 2, 5000, 8, generator=torch.Generator().manual_seed(0))
    scores = Random().score(LayerKV(keys=many, values=many)).flatten()
    assert torch.histc(scores, 10, 0, 1).sub(1000).abs().max() < 150  # five standard deviations


def test_random_is_the_same_for_a_seed():
    a, b, c = (keep(Random(seed=s), observation(), (9, 9))[0].tolist() for s in (0, 0, 1))
    assert a == b != c
    assert isinstance(Random().protect(3), Protected)


def made(family: type, **fields: object) -> object:
    """A policy as a caller without type checks makes it."""
    policy = family()
    for name, value in fields.items():
        object.__setattr__(policy, name, value)
    policy.__post_init__()
    return policy


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (SnapKV, {"window": 0}, r"SnapKV\(window=0\); pass a whole number from 1"),
        (SnapKV, {"window": "wide"}, "window='wide'"),
        (SnapKV, {"kernel": 4}, r"kernel=4\); pass an odd number"),
        (SnapKV, {"pooling": "mean"}, "pooling='mean'.*choose average or maximum"),
        (H2O, {"recent": -1}, r"H2O\(recent=-1\); pass a share of the budget, 0 to 1"),
        (StreamingLLM, {"n_sink": -1}, "n_sink=-1"),
    ],
)
def test_bad_arguments_say_what_to_do(family, fields, message):
    with pytest.raises(ValueError, match=message):
        made(family, **fields)
