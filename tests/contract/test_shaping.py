"""Shaped codecs in a real model: whose queries they look at, and that a plan changes nothing of it."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.evict import CAM, Plan, SnapKV
from polykv_lib.hf.observe import observe
from polykv_lib.quantize.shaping import second_moments

SHAPED = {
    "keys": pk.HarmonicTurboQuant(3, norms="byte", shaped=True),
    "values": pk.TurboQuant(3, match_norm=True),
}


def test_moments_are_of_the_queries_that_read_each_head(model, tokens):
    document = tokens(1, 37)
    seen = {}
    _, _ = observe(model, document, lambda i, layer: seen.update({i: layer.queries}))
    layers = hf.read_document(model, document)
    with torch.no_grad():
        plain = model(document, use_cache=True).past_key_values.layers
    for i, layer in enumerate(layers):
        assert_close(layer.moments, second_moments(seen[i], layer.keys.shape[1]))
        assert torch.equal(layer.keys, plain[i].keys)


@pytest.mark.parametrize("policy", [SnapKV(), CAM()], ids=["evicting", "merging"])
def test_with_a_plan_or_without_moments_are_the_documents(llama, tokens, policy):
    document, plan = tokens(1, 37), Plan.uniform(policy, 12, 2)
    whole = hf.read_document(llama, document)
    layers, [kept] = hf.evict_document(llama, document, [plan])
    for layer, own in zip(whole, layers, strict=True):
        assert_close(layer.moments, own.moments)
    pool = pk.build_pool(llama, document, **SHAPED, plan=plan)
    same = hf.share(llama, layers, document, **SHAPED, kept=kept)
    assert all(torch.equal(pool.tensors[name], t) for name, t in same.tensors.items())
    plain = SHAPED | {"keys": pk.HarmonicTurboQuant(3, norms="byte")}
    other = hf.share(llama, layers, document, **plain, kept=kept)
    assert pool.nbytes == other.nbytes
    assert not torch.equal(pool.read(0)[0].nan_to_num(), other.read(0)[0].nan_to_num())


def test_without_moments_the_way_to_them_is_said(llama, tokens):
    document = tokens(1, 37)
    layers = [replace(own, moments=None) for own in hf.read_document(llama, document)]
    with pytest.raises(ValueError, match="`read_document` and `evict_document` return have them"):
        hf.share(llama, layers, document, **SHAPED)
