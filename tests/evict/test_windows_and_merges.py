"""CAKE, Scissorhands, expected attention and PyramidKV by their equations; CaM and D2O by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from polykv_lib.evict import (
    CAKE,
    CAM,
    D2O,
    H2O,
    TOVA,
    ExpectedAttention,
    KeyNorm,
    LayerPlan,
    Plan,
    RankMerge,
    Scissorhands,
    SnapKV,
    attention,
    keep,
    merger_of,
    pyramidkv,
    tallies_of,
)  # fmt: skip
from polykv_lib.evict.controls import Guarded
from polykv_lib.evict.step import Group, append, step
from polykv_lib.kv import LayerKV

TOKENS, HEADS, GROUPS, DIM = 40, 2, 3, 16


def observation(tokens=TOKENS, seed=0, rows=1):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, HEADS, tokens, DIM, generator=generator).unbind()
    queries = torch.randn(rows, HEADS * GROUPS, tokens, DIM, generator=generator) * 2
    return LayerKV(keys=keys, values=values, queries=queries)


def dense_attention(layer):
    """[head, group, query, token] in double precision."""
    tokens = layer.keys.shape[2]
    q = layer.queries[0].double().unflatten(0, (HEADS, -1))
    scores = q @ layer.keys[0].double().mT[:, None] * DIM**-0.5
    return scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)


def test_cake_adds_the_variance_over_the_window():
    layer, window, gamma = observation(), 6, 50.0
    before = dense_attention(layer)[:, :, -window:, :-window].numpy()
    indicator = before.mean(2) + gamma * before.var(2, ddof=1)
    padded = np.pad(indicator, ((0, 0), (0, 0), (2, 2)))
    pooled = sum(padded[..., i : i + TOKENS - window] for i in range(5)).mean(1) / 5
    score = CAKE(window=window, gamma=gamma).score(layer)[0, :, :-window]
    assert_close(score, torch.from_numpy(pooled).float())
    kept = keep(CAKE(window=window), layer, (10, 10))
    assert all(t.tolist()[-window:] == list(range(TOKENS - window, TOKENS)) for t in kept)


def test_cakes_preference_is_dispersion_times_shift():
    layer, window = observation(), 6
    before = dense_attention(layer)[:, :, -window:, :-window].numpy()
    dispersion = -(before * np.log(before)).sum()
    shift = before.var(2, ddof=1).sum()
    policy = CAKE(window=window, tau1=1.6, tau2=0.4)
    assert policy.preference(layer) == pytest.approx(dispersion ** (1 / 1.6) * shift**2.5, rel=1e-4)
    flat = LayerKV(keys=layer.keys, values=layer.values, queries=layer.queries * 0.01)
    assert CAKE(window=window).preference(flat) < CAKE(window=window).preference(layer)


@pytest.mark.parametrize("block", [3, 64])
def test_scissorhands_counts_queries_that_gave_less_than_an_equal_share(monkeypatch, block):
    monkeypatch.setattr(attention, "BLOCK", block)
    layer, window = observation(), 7
    weights = dense_attention(layer)
    want = torch.zeros(HEADS, TOKENS)
    for query in range(TOKENS - window, TOKENS):
        for token in range(query + 1):
            low = weights[:, :, query, token] < 1 / (query + 1)
            want[:, token] -= low.float().mean(1)
    assert_close(Scissorhands(window=window).score(layer)[0], want)
    [kept, _] = keep(Scissorhands(window=window, recent=4), layer, (10, 10))
    assert kept.tolist()[-4:] == [36, 37, 38, 39]


def test_scissorhands_by_hand():
    """Two query heads share the keys; the query of token 2 sees three tokens, that of token 3 four.

    Attention in proportion to 4, 1, 1, 2: of three tokens 4/6, 1/6, 1/6 against a share of 1/3, of
    four 4/8, 1/8, 1/8, 2/8 against 1/4, which token 3 gets and so is not counted. The second head
    has a flat attention, which gives nobody less than an equal share.
    """
    layer = cam_layer([4.0, 1, 1, 2])
    steep = torch.full((1, 1, 2, 2), 0.5)
    both = replace(layer, queries=torch.cat([steep, torch.zeros_like(steep)], 1))
    assert Scissorhands(window=2).score(both)[0, 0].tolist() == [0, -1, -1, 0]
    assert Scissorhands(window=1).score(both)[0, 0].tolist() == [0, -0.5, -0.5, 0]


def test_scissorhands_counts_fade():
    policy, layer = Scissorhands(window=4), observation()
    first = policy.tally.after(layer, None)
    later = LayerKV(keys=layer.keys, values=layer.values, queries=layer.queries[:, :, -1:])
    assert_close(policy.tally.after(later, first), policy.tally.after(later, None) + first * 0.75)


def test_expected_attention_is_the_gaussian_of_the_queries():
    layer, window = observation(), 12
    score = ExpectedAttention(window=window, epsilon=0.01).score(layer)[0]
    for head in range(HEADS):
        keys = layer.keys[0, head].double().numpy()
        weights = np.zeros(TOKENS)
        for q in layer.queries[0, head * GROUPS : (head + 1) * GROUPS, -window:].double().numpy():
            mean, covariance = q.mean(0), np.cov(q.T, ddof=0)
            log = keys @ mean / DIM**0.5 + ((keys @ covariance) * keys).sum(1) / (2 * DIM)
            weights += np.exp(log) / np.exp(log).sum() / GROUPS
        want = (weights + 0.01) * np.linalg.norm(layer.values[0, head].numpy(), axis=1)
        assert_close(score[head].double(), torch.from_numpy(want), rtol=1e-4, atol=1e-6)


def test_pyramidkv_is_snapkv_with_a_pyramid_on_top_of_the_window():
    plan = pyramidkv(64, 8, window=8)
    assert plan.total(n_heads=1) == 8 * 64
    budgets = [layer.budget for layer in plan.layers]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] == pytest.approx(8 + 56 / 20, abs=1)
    assert {layer.policy for layer in plan.layers} == {
        SnapKV(window=8, kernel=7, pooling="maximum")
    }
    with pytest.raises(ValueError, match="budget=8 tokens, but the window alone takes 8"):
        pyramidkv(8, 8, window=8)


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float32)[None, None]


def test_d2o_merges_what_is_similar_enough():
    """Kept: 0, 1. Token 2 points like 0 (cosine 1), token 3 like neither (best 0.6, with 1).

    The threshold is their mean, 0.8: token 2 counts e of 2 e in token 0, token 3 is dropped.
    """
    layer = LayerKV(
        keys=tensor([[1, 0], [0, 2], [3, 0], [-4, 3]]),
        values=tensor([[1, 1], [2, 2], [5, 7], [9, 9]]),
    )
    kept = torch.tensor([[[0, 1]]])
    merged = D2O().merge(layer, kept)
    assert_close(merged.keys, tensor([[2, 0], [0, 2]]))
    assert_close(merged.values, tensor([[3, 4], [2, 2]]))
    assert_close(merged.threshold, torch.tensor([[0.8]]))


def test_d2os_threshold_moves_and_several_share_a_token():
    layer = LayerKV(
        keys=tensor([[1, 0], [0.6, 0.8], [0.8, 0.6]]),
        values=tensor([[0, 0], [1, 0], [0, 1]]),
        threshold=torch.tensor([[0.3]]),
    )
    merged = D2O(beta=0.25).merge(layer, torch.tensor([[[0]]]))
    assert_close(merged.threshold, torch.tensor([[0.25 * 0.7 + 0.75 * 0.3]]))
    a, b = math.exp(0.6), math.exp(0.8)
    total = math.e + a + b
    assert_close(merged.values, tensor([[a / total, b / total]]))
    assert_close(
        merged.keys, tensor([[(math.e + 0.6 * a + 0.8 * b) / total, (0.8 * a + 0.6 * b) / total]])
    )


def cam_layer(attention):
    """One head whose newest query gives the tokens attention in these proportions."""
    keys = torch.tensor(attention).log()[:, None].expand(-1, 2)
    values = torch.arange(1, len(attention) + 1.0)[:, None].expand(-1, 2)
    return LayerKV(
        keys=keys[None, None].clone(),
        values=values[None, None].clone(),
        queries=torch.full((1, 1, 1, 2), 0.5),
        scale=1.0,
    )


def test_cam_hands_a_leaving_value_on_to_the_next_ones():
    """Budget 4 of 6 keeps 0, 1 and 4, 5; 2 and 3 leave, each with at least its followers' attention.

    With `merged=2`, value 3 (of token 2) reaches tokens 3 (evicted: lost) and 4, value 4 (of token
    3) reaches 4 and 5, each halved.
    """
    layer, policy = cam_layer([1.0, 1, 5, 4, 2, 2]), CAM(merged=2)
    kept = keep(policy, layer, (4,))
    assert kept[0].tolist() == [0, 1, 4, 5]
    merged = policy.merge(layer, kept[0][None, None])
    assert merged.values[0, 0, :, 0].tolist() == pytest.approx([1, 2, 5 + 3 / 2 + 4 / 2, 6 + 4 / 2])
    assert torch.equal(merged.keys[0, 0], layer.keys[0, 0, kept[0]])


def test_cam_step_by_step():
    """Budget 3 keeps token 0 and two recent ones; each step the older of these leaves.

    Token 1 leaves with the attention of its followers or more: half of its value, 2, reaches 2 and
    3. Then token 2 leaves with what it has, 3 + 1, and half of that reaches 3 and 4.
    """
    policy, [group] = CAM(start=0.34, merged=2), [Group(heads=(0,), budget=3)]
    layer = cam_layer([1.0, 4, 4, 2, 2])
    held = None
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        new = LayerKV(
            keys=layer.keys[:, :, start:stop],
            values=layer.values[:, :, start:stop],
            queries=torch.full((1, 1, stop - start, 2), 0.5),
            scale=1.0,
            positions=torch.arange(start, stop)[None, None],
        )
        [held] = step(policy, new if held is None else append(held, new), [group], set())
    assert held.positions[0, 0].tolist() == [0, 3, 4]
    assert held.values[0, 0, :, 0].tolist() == pytest.approx([1, 4 + 2 / 2 + 4 / 2, 5 + 4 / 2])


def test_cam_draws_by_the_ratio_of_attention():
    """A token with half of its followers' attention is merged for half of all positions."""
    layer, policy = cam_layer([1.0, 2, 2]), CAM(merged=2)
    kept = torch.tensor([[[1, 2]]])
    outcomes = []
    for position in range(400):
        at = torch.tensor([[[position, position + 1, position + 2]]])
        moved = LayerKV(
            keys=layer.keys, values=layer.values, queries=layer.queries, scale=1.0, positions=at
        )
        added = policy.merge(moved, kept).values[0, 0, 0, 0] - 2
        assert added in (0.0, 0.5)
        outcomes.append(float(added > 0))
    assert np.mean(outcomes) == pytest.approx(0.5, abs=0.07)
    runs = 1 + np.abs(np.diff(outcomes)).sum()  # as many runs as coins would give
    assert runs == pytest.approx(200, abs=40)


def test_heads_of_a_layer_plan_merge_each_by_its_own_kept_tokens():
    layer = observation()
    policy = D2O(n_sink=2)
    kept, merged = LayerPlan(policy=policy, budget=(8, TOKENS)).evict(layer)
    assert [len(t) for t in kept] == [8, TOKENS]
    assert torch.equal(merged.keys[:, 1], layer.keys[:, 1])  # it kept everything
    alone = LayerKV(keys=layer.keys[:, :1], values=layer.values[:, :1])
    want = policy.merge(alone, kept[0][None, None])
    assert_close(merged.values[:, 0, kept[0]], want.values[:, 0])
    assert not torch.equal(merged.values[:, 0], layer.values[:, 0])
    assert LayerPlan(policy=H2O(), budget=8).evict(layer)[1] is None


def test_wrapped_policies_still_merge_and_count():
    assert merger_of(Guarded(policy=D2O())) == D2O()
    assert merger_of(RankMerge(first=H2O(), second=KeyNorm())) is None
    both = RankMerge(first=H2O(recent=0.1), second=Guarded(policy=Scissorhands(window=9)))
    assert tallies_of(both) == {H2O().tally, Scissorhands(window=9).tally}


def test_steps_add_up_to_one_pass():
    """Sums kept over steps in which nothing is evicted are those of the whole prompt at once."""
    layer = observation()
    positions = torch.arange(TOKENS).expand(1, HEADS, TOKENS)
    groups, held = [Group(heads=(0, 1), budget=TOKENS)], None
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        new = LayerKV(
            keys=layer.keys[:, :, start:stop],
            values=layer.values[:, :, start:stop],
            queries=layer.queries[:, :, start:stop],
            positions=positions[:, :, start:stop],
        )
        [held] = step(H2O(), new if held is None else append(held, new), groups, {H2O().tally})
    assert_close(held.tallies[H2O().tally], H2O().score(layer))
    assert torch.equal(held.keys, layer.keys)


def test_heads_that_hold_different_tokens_are_scored_one_by_one():
    """TOVA's mean over all heads would add up weights of different tokens."""
    layer = observation()
    at = torch.stack([torch.randperm(TOKENS)[:12].sort().values for _ in range(HEADS)])[None]
    index = at[..., None].expand(-1, -1, -1, DIM)
    held = LayerKV(
        keys=layer.keys.gather(2, index),
        values=layer.values.gather(2, index),
        queries=layer.queries[:, :, -1:],
        positions=at,
    )
    [left] = step(TOVA(), held, [Group(heads=(0, 1), budget=6)], set())
    for head in range(HEADS):
        own = held.queries[0, head * GROUPS : (head + 1) * GROUPS, 0]
        weights = (own @ held.keys[0, head].mT * DIM**-0.5).softmax(-1).mean(0)
        best = set(at[0, head, weights[:-1].topk(5).indices].tolist()) | {int(at[0, head, -1])}
        assert set(left.positions[0, head].tolist()) == best


def test_a_decode_phase_survives_the_disk(tmp_path):
    plan = Plan.uniform(SnapKV(), 64, 2).decoding(D2O(recent=0.25), [32, (16, 48)])
    path = plan.save(tmp_path / "plan.yaml")
    assert Plan.load(path) == plan
    lines = path.read_text().splitlines()
    assert lines[4] == "decode:"
    assert len(lines) == 7
    path.write_text("schema: 1\nprefill: []\ndecode: [{policy: H2O, budget: 0}]")
    with pytest.raises(ValueError, match="decode, layer 0: budget 0; pass tokens"):
        Plan.load(path)
    path.write_text("prefill: []\ndecode: H2O")
    with pytest.raises(ValueError, match="`decode:` is a list with an entry a layer, or left out"):
        Plan.load(path)
    with pytest.raises(ValueError, match="layer 1 of the decode plan has 2 budgets"):
        plan.check(2, 3)
