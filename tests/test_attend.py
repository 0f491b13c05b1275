"""Attention in pieces is attention over the whole."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import polykv_lib as pk
from polykv_lib.attend import attend, attend_pieces, attend_plain, blocks
from polykv_lib.attend.blocks import fold, unfold
from polykv_lib.hf.observe import observe
from polykv_lib.kv import LayerKV
from polykv_lib.pool import freeze
from polykv_lib.quantize import Affine, FullPrecision, Int8, TurboQuant
from polykv_lib.tasks import texts

CODECS = {
    "lossless": (FullPrecision(), FullPrecision()),
    "default": (Int8(), TurboQuant(3)),
    "token": (Int8("token"), Int8("token")),
    "block": (Int8("block"), Int8("block")),
    "turbo": (TurboQuant(4), TurboQuant(2)),
    "affine": (Affine(4, 64, "token"), Affine(3, 32, "channel")),
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def frozen(keys, values, codecs, n_sink=4, kept=None):
    return freeze(
        [LayerKV(keys=keys, values=values)],
        keys=codecs[0], values=codecs[1], n_sink=n_sink, kept=None if kept is None else [kept],
    )  # fmt: skip


@given(tokens=st.integers(2, 40), cut=st.integers(1, 39), seed=st.integers(0, 99))
def test_attention_does_not_care_where_the_cache_is_cut(tokens, cut, seed):
    cut = min(cut, tokens - 1)
    q, k, v = (draw(2, 6, n, 8, seed=seed + i) for i, n in enumerate((5, tokens, tokens)))
    k, v = k[:1, :3], v[:1, :3]
    shared = frozen(k[:, :, :cut], v[:, :, :cut], CODECS["lossless"])
    k, v = (x.expand(2, -1, -1, -1).repeat_interleave(2, 1) for x in (k, v))
    own = attend_plain(q, k[:, :, cut:], v[:, :, cut:], 0.3, None)
    together = attend_pieces(q, shared.layers[0], 3, 0.3, own)
    for got, want in zip(together, attend_plain(q, k, v, 0.3, None), strict=True):
        assert_close(got, want)


def test_attention_to_nothing_adds_nothing():
    q, keys, values = draw(2, 6, 3, 8), draw(1, 3, 20, 8, seed=1), draw(1, 3, 20, 8, seed=2)
    pieces = frozen(keys, values, CODECS["lossless"]).layers[0]
    nothing = torch.zeros(2, 6, 3, 8), torch.full((2, 6, 3), -math.inf)
    alone = attend_pieces(q, pieces, 3, 0.3)
    for got, want in zip(attend_pieces(q, pieces, 3, 0.3, nothing), alone, strict=True):
        assert_close(got, want)
    out, lse = attend_pieces(q, [], 3, 0.3, nothing)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@given(
    agents=st.integers(1, 4),
    heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    queries=st.integers(1, 4),
)
def test_unfold_inverts_fold(agents, heads, groups, queries):
    q = draw(agents, heads * groups, queries, 8)
    assert torch.equal(unfold(fold(q, heads), agents, queries), q)


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fast_suffix_is_the_equation(queries, masked):
    q, k, v = draw(3, 6, queries, 16), draw(3, 2, 9, 16, seed=1), draw(3, 2, 9, 16, seed=2)
    mask = torch.ones(queries, 9, dtype=torch.bool).tril(9 - queries)[None, None]
    if masked:
        mask = mask.expand(3, -1, -1, -1).clone()
        mask[1, ..., :3] = False
        mask[2, :, 0] = False  # a padded row: sees nothing
    got = attend(q, k, v, 0.25, mask if masked else None)
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    want = attend_plain(q, k, v, 0.25, mask)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("block", [7, 128, 2048])
@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
def test_a_layer_of_pieces_is_dense_attention_in_double_precision(monkeypatch, codecs, block):
    monkeypatch.setattr(blocks, "BLOCK", block)
    pool = frozen(draw(1, 2, 300, 64), draw(1, 2, 300, 64, seed=1), codecs)
    q = draw(3, 6, 2, 64, seed=2)
    k, v = (x.double().repeat_interleave(3, 1) for x in pool.read(0))
    want, want_lse = (q.double() @ k.mT / 8).softmax(-1) @ v, (q.double() @ k.mT / 8).logsumexp(-1)
    out, lse = attend_pieces(q, pool.layers[0], 2, 1 / 8)
    assert_close(out.double(), want, atol=3e-6, rtol=0)
    assert_close(lse.double(), want_lse, atol=3e-6, rtol=0)


@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
def test_heads_of_different_lengths_are_each_attended_alone(monkeypatch, codecs):
    """Three heads, two of them equally long and no neighbours; blocks end inside the longest."""
    monkeypatch.setattr(blocks, "BLOCK", 128)
    keys, values = draw(1, 3, 300, 64), draw(1, 3, 300, 64, seed=1)
    kept = [torch.arange(50), torch.arange(0, 300, 2), torch.arange(10, 60)]
    pieces = frozen(keys, values, codecs, n_sink=0, kept=kept).layers[0]
    q, own = draw(3, 6, 1, 64, seed=2), (draw(3, 6, 1, 64, seed=3), draw(3, 6, 1, seed=4) + 5)
    before = [x.clone() for x in own]
    out, lse = attend_pieces(q, pieces, 3, 1 / 8, own)
    for piece in pieces:
        for row, head in enumerate(piece.heads):
            of_head = slice(2 * head, 2 * head + 2)
            k, v = (side.dense()[row].double() for side in (piece.keys, piece.values))
            scores = torch.cat([q[:, of_head].double() @ k.mT / 8, own[1][:, of_head, :, None]], -1)
            seen = torch.cat([v.expand(3, 2, -1, -1), own[0][:, of_head].double()], -2)
            want = scores.softmax(-1)[..., None, :] @ seen[:, :, None]
            assert_close(out[:, of_head].double(), want[..., 0, :], atol=3e-6, rtol=0)
            assert_close(lse[:, of_head].double(), scores.logsumexp(-1), atol=3e-6, rtol=0)
    assert all(torch.equal(x, y) for x, y in zip(own, before, strict=True))


def errors(q, pool, layer, scale):
    """Relative errors, from fp64, of the pool's attention and of dense attention in q's dtype."""
    groups = q.shape[1] // pool.geometry.n_kv_heads
    k, v = (x.float().repeat_interleave(groups, 1) for x in pool.read(layer))
    exact = (q.double() @ k.double().mT * scale).softmax(-1) @ v.double()
    ours = attend_pieces(q, pool.layers[layer], pool.geometry.n_kv_heads, scale)[0].to(q.dtype)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, *(x.to(q.dtype).expand(len(q), -1, -1, -1) for x in (k, v)), scale=scale
    )
    return [float((x.double() - exact).norm() / exact.norm()) for x in (ours, dense)]


@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_in_bfloat16_the_error_is_no_larger_than_dense_attentions(sharpness):
    keys, values = draw(1, 2, 512, 64) * sharpness, draw(1, 2, 512, 64, seed=1)
    pool = frozen(keys, values, CODECS["default"], n_sink=0)
    ours, dense = errors(draw(4, 6, 1, 64, seed=2).bfloat16(), pool, 0, 1 / 8)
    assert ours <= dense


def test_on_real_activations_too():
    """Queries, keys and values of the embedded model: the last 15 tokens on 600, in every layer."""
    model, tokenizer = pk.load_model("smollm2-135m", dtype="bfloat16")
    ids = pk.document_ids(tokenizer, next(texts.articles(min_chars=3_000)).text)[:, :600]
    queries: list[torch.Tensor] = []
    layers, _ = observe(model, ids, lambda _, layer: queries.append(layer.queries[0, :, -15:]))
    pool = freeze(
        [LayerKV(keys=x.keys.float(), values=x.values.float()) for x in layers],
        keys=Int8(), values=TurboQuant(3),
    )  # fmt: skip
    rows = [q.transpose(0, 1)[:, :, None].contiguous() for q in queries]
    ours, dense = zip(*(errors(q, pool, i, 1 / 8) for i, q in enumerate(rows)), strict=True)
    assert sum(ours) < 0.7 * sum(dense)
    assert max(ours) <= max(dense)
    # Where attention is flat, dense rounding averages out; ours rounds twice at the end.
    assert all(a <= 1.25 * b for a, b in zip(ours, dense, strict=True))
