"""A document read chunk by chunk gives the pool of one prefill."""

import pytest
from torch.testing import assert_close

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.evict import Plan, SnapKV
from polykv_lib.quantize.shaping import second_moments

N_TOKENS = 90
CODECS = [
    {"keys": pk.FullPrecision(), "values": pk.FullPrecision()},
    {"keys": pk.HarmonicTurboQuant(3, shaped=True), "values": pk.TurboQuant(3)},
    {"keys": pk.Tiered((pk.Int8(), pk.TurboQuant(2)), (0.3,)), "values": pk.TurboQuant(3)},
]


@pytest.mark.parametrize("chunk", [40, 999])
def test_all_that_is_read_is_that_of_one_prefill(model, tokens, chunk):
    document = tokens(1, N_TOKENS)
    whole = hf.read_document(model, document)
    parts = hf.read_document(model, document, chunk=chunk)
    for one, other in zip(whole, parts, strict=True):
        for name in ("keys", "values", "moments", "attention"):
            assert_close(getattr(other, name), getattr(one, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("codecs", CODECS, ids=["full", "shaped", "tiers"])
def test_the_pool_is_that_of_one_prefill(llama, tokens, codecs):
    document, own = tokens(1, N_TOKENS), tokens(2, 5, seed=1)
    one, other = (pk.build_pool(llama, document, **codecs, chunk=c) for c in (None, 40))
    a, b = (hf.logits(llama, pool.agent_cache(2), own, N_TOKENS) for pool in (one, other))
    assert one.nbytes == other.nbytes
    assert_close(b, a, atol=1e-5, rtol=1e-5)


def test_the_last_chunk_alone_says_something_else(llama, tokens, monkeypatch):
    document = tokens(1, N_TOKENS)
    whole = hf.read_document(llama, document)
    forgetful = hf.reading._seen
    monkeypatch.setattr(hf.reading, "_seen", lambda layer, before: forgetful(layer))
    for one, other in zip(whole, hf.read_document(llama, document, chunk=40), strict=True):
        assert_close(other.keys, one.keys, atol=1e-5, rtol=1e-5)
        assert (other.moments - one.moments).abs().max() > 1e-2
        assert (other.attention - one.attention).abs().max() > 1e-3


def test_queries_are_held_a_chunk_at_a_time(llama, tokens, monkeypatch):
    lengths = []

    def counted(queries, n_heads):
        lengths.append(queries.shape[2])
        return second_moments(queries, n_heads)

    monkeypatch.setattr(hf.reading, "second_moments", counted)
    pk.build_pool(llama, tokens(1, N_TOKENS), **CODECS[0], chunk=64)
    assert lengths == [64, 64, 26, 26]


def test_what_is_no_chunk_or_meets_a_plan_is_refused(llama, tokens):
    document, plan = tokens(1, 20), Plan.uniform(SnapKV(), 12, 2)
    with pytest.raises(ValueError, match="chunk=0; pass tokens to prefill at a time, 1 or more"):
        pk.build_pool(llama, document, **CODECS[0], chunk=0)
    with pytest.raises(ValueError, match="chunk=8 with a plan, whose policies see the whole"):
        pk.build_pool(llama, document, **CODECS[0], plan=plan, chunk=8)
