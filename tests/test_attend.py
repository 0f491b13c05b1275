"""Attention in pieces is attention over the whole."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from polykv_lib import attend as attend_module
from polykv_lib.attend import attend, attend_pieces, attend_plain, fold, merge, unfold
from polykv_lib.kv import LayerKV
from polykv_lib.pool import freeze
from polykv_lib.quantize import FullPrecision, Int8, TurboQuant


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(tokens=st.integers(2, 40), cut=st.integers(1, 39), seed=st.integers(0, 99))
def test_attention_does_not_care_where_the_cache_is_cut(tokens, cut, seed):
    cut = min(cut, tokens - 1)
    q, k, v = (draw(2, 3, n, 8, seed=seed + i) for i, n in enumerate((5, tokens, tokens)))
    parts = [
        attend_plain(q, k[:, :, s], v[:, :, s], 0.3, None) for s in (slice(cut), slice(cut, None))
    ]
    whole = attend_plain(q, k, v, 0.3, None)
    for got, want in zip(merge(*parts[0], *parts[1]), whole, strict=True):
        assert_close(got, want)


def test_merging_with_nothing_changes_nothing():
    out, lse = draw(4, 8), draw(4)
    nothing = torch.zeros(4, 8), torch.full((4,), -math.inf)
    assert_close(merge(out, lse, *nothing)[0], out)
    assert (merge(*nothing, *nothing)[0] == 0).all()


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


@pytest.mark.parametrize("block", [7, 2048])
@pytest.mark.parametrize("codecs", [(FullPrecision(), FullPrecision()), (Int8(), TurboQuant(3))])
def test_a_layer_of_pieces_is_dense_attention_in_double_precision(monkeypatch, codecs, block):
    monkeypatch.setattr(attend_module, "BLOCK", block)
    keys, values = draw(1, 2, 300, 64), draw(1, 2, 300, 64, seed=1)
    pool = freeze([LayerKV(keys=keys, values=values)], keys=codecs[0], values=codecs[1])
    q = draw(3, 6, 2, 64, seed=2)
    k, v = (x.double().repeat_interleave(3, 1) for x in pool.read(0))
    want, want_lse = (q.double() @ k.mT / 8).softmax(-1) @ v, (q.double() @ k.mT / 8).logsumexp(-1)
    out, lse = attend_pieces(q, pool.layers[0], 2, 1 / 8)
    assert_close(out.double(), want, atol=3e-6, rtol=0)
    assert_close(lse.double(), want_lse, atol=3e-6, rtol=0)


@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_in_bfloat16_the_error_is_no_larger_than_dense_attentions(sharpness):
    keys, values = draw(1, 2, 512, 64) * sharpness, draw(1, 2, 512, 64, seed=1)
    pool = freeze([LayerKV(keys=keys, values=values)], keys=Int8(), values=TurboQuant(3), n_sink=0)
    q = draw(4, 6, 1, 64, seed=2).bfloat16()
    k, v = (x.repeat_interleave(3, 1) for x in pool.read(0))
    exact = (q.double() @ k.double().mT / 8).softmax(-1) @ v.double()
    ours = attend_pieces(q, pool.layers[0], 2, 1 / 8)[0].double()
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, *(x.bfloat16().expand(4, -1, -1, -1) for x in (k, v))
    )
    assert (ours - exact).norm() <= (dense.double() - exact).norm()
