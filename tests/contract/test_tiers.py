"""Codecs by rank: which tokens get which codec, and that attention over them is exact."""

import pytest
import torch
from torch.testing import assert_close

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.evict import LayerPlan, Plan, SnapKV
from polykv_lib.evict.attention import recent_attention
from polykv_lib.hf.observe import observe
from polykv_lib.kv import LayerKV
from polykv_lib.pool import PoolError, freeze, load
from polykv_lib.pool.pieces import located

FINE, COARSE = pk.Int8("token"), pk.TurboQuant(1)
KEYS = pk.Tiered((FINE, COARSE), (0.25,))
VALUES = pk.Tiered((FINE, pk.TurboQuant(3), COARSE), (0.1, 0.4))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def layer() -> LayerKV:
    """[1, 2, 100, 64], attention without ties."""
    attention = torch.stack([torch.randperm(100) for _ in range(2)])[None].float()
    return LayerKV(
        keys=draw(1, 2, 100, 64), values=draw(1, 2, 100, 64, seed=1), attention=attention
    )


def relative_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got - want).square().sum(-1) / want.square().sum(-1)


def test_the_most_read_tokens_get_the_first_codec(layer):
    keys, values = freeze([layer], keys=KEYS, values=VALUES, n_sink=4).read(0)
    for head in range(2):
        rank = layer.attention[0, head, 4:].argsort(descending=True) + 4
        wrong = relative_errors(keys[0, head], layer.keys[0, head])
        assert wrong[:4].max() == 0, "sinks are exact"
        assert wrong[rank[:24]].max() < 1e-3 < 0.2 < wrong[rank[24:]].min()
        wrong = relative_errors(values[0, head], layer.values[0, head])
        assert wrong[rank[:10]].max() < 1e-3 < wrong[rank[10:48]].min()
        assert wrong[rank[10:48]].max() < 0.1 < 0.2 < wrong[rank[48:]].min()


def test_every_token_is_in_one_piece(layer):
    pieces = freeze([layer], keys=KEYS, values=VALUES, n_sink=4).layers[0]
    assert [piece.n_tokens for piece in pieces] == [4, 10, 14, 24, 48]
    assert pieces[0].positions is None
    for head in range(2):
        found = [p.positions[head] for p in pieces[1:]]
        assert torch.cat(found).sort().values.tolist() == list(range(4, 100))
        assert all((p.diff() > 0).all() for p in found)


def test_a_pool_of_tiers_is_counted_saved_and_read_like_any(layer, tmp_path):
    pool = freeze([layer], keys=KEYS, values=VALUES, n_sink=4)
    bits = 8 * 2 * (24 + 10) + 1 * 2 * (72 + 48) + 3 * 2 * 38  # two heads
    assert pool.nbytes * 8 > 64 * bits
    opened = load(pool.save(tmp_path / "p"))
    assert opened.nbytes == pool.nbytes
    for got, want in zip(opened.read(0), pool.read(0), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("budgets", [(20, 20), (9, 31)])
def test_with_eviction_it_is_the_masked_full_cache(llama, tokens, masked_forward, budgets):
    document, own = tokens(1, 60), tokens(2, 5, seed=1)
    plan = Plan(layers=(LayerPlan(policy=SnapKV(), budget=budgets),) * 2)
    pool = pk.build_pool(llama, document, keys=KEYS, values=VALUES, plan=plan)
    assert pool.kept_per_head == (budgets, budgets)
    got = hf.logits(llama, pool.agent_cache(2), own, 60)
    assert_close(got, masked_forward(llama, pool, own), atol=1e-5, rtol=0)


def test_attention_is_the_last_queries(llama, tokens):
    q, k = draw(1, 6, 50, 16), draw(1, 2, 50, 16, seed=1)
    scores = (q.unflatten(1, (2, 3)) @ k[:, :, None].mT * 0.3).masked_fill(
        ~torch.ones(50, 50, dtype=torch.bool).tril(), -torch.inf
    )
    weights = scores.softmax(-1).mean(2)
    assert_close(recent_attention(q, k, 0.3, window=7), weights[:, :, -7:].mean(2))
    assert_close(recent_attention(q, k, 0.3), weights.mean(2))
    ids, seen = tokens(1, 90), {}
    observe(llama, ids, lambda i, layer: seen.update({i: layer}))
    for i, layer in enumerate(hf.read_document(llama, ids)):
        own = seen[i]
        assert_close(layer.attention, recent_attention(own.queries, own.keys, own.softmax_scale))


@pytest.mark.parametrize(("n_kept", "n_tokens"), [(1, 100), (3, 100), (4, 100), (97, 100), (2, 8)])
def test_positions_take_the_fewer_bytes(layer, n_kept, n_tokens):
    generator = torch.Generator().manual_seed(n_kept)
    kept = [torch.randperm(n_tokens, generator=generator)[:n_kept].sort().values for _ in range(2)]
    stored = located(torch.stack(kept), n_tokens)
    assert stored.nbytes == 2 * min(4 * n_kept, -(-n_tokens // 8))
    own = LayerKV(keys=layer.keys[:, :, :n_tokens], values=layer.values[:, :, :n_tokens])
    [piece] = freeze([own], keys=FINE, values=FINE, n_sink=0, kept=[kept]).layers[0]
    assert piece.tensors["positions"].nbytes == stored.nbytes
    assert torch.equal(piece.positions.long(), torch.stack(kept))


def test_few_tokens_and_small_shares_leave_no_empty_piece(layer):
    few = LayerKV(
        keys=layer.keys[:, :, :6],
        values=layer.values[:, :, :6],
        attention=layer.attention[:, :, :6],
    )
    pool = freeze([few], keys=KEYS, values=VALUES, n_sink=4)
    assert all(piece.n_tokens for piece in pool.layers[0])
    assert pool.kept == (6,)


def test_what_cannot_be_ranked_or_shared_is_refused(layer):
    bare = LayerKV(keys=layer.keys, values=layer.values)
    with pytest.raises(PoolError, match="`read_document` and `evict_document` return do"):
        freeze([bare], keys=KEYS, values=FINE)
    for codecs, shares in [((FINE,), (0.5,)), ((FINE, COARSE), (1.0,)), ((FINE,) * 3, (0.5, 0.5))]:
        with pytest.raises(ValueError, match="pass a share between 0 and 1 for every codec but"):
            pk.Tiered(codecs, shares)
