"""transformers' own `generate` on our caches, and what happens around it."""

import threading

import pytest
import torch

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.hf.compat import cache_argument
from polykv_lib.pool import PoolError

DOCUMENT = 37
PAPER = {"keys": pk.Int8("tensor"), "values": pk.TurboQuant(3, "plain"), "n_sink": 0}
LOSSLESS = {"keys": pk.FullPrecision(), "values": pk.FullPrecision()}


def generate(model, document, own, mask, cache, **arguments):
    """Full-length ids and mask: the one form that is right on every release."""
    n = len(own)
    return model.generate(
        torch.cat([document.expand(n, -1), own], 1),
        attention_mask=torch.cat([torch.ones(n, DOCUMENT, dtype=torch.int64), mask], 1),
        **{cache_argument(model): cache}, do_sample=False, pad_token_id=0, **arguments,
    )[:, DOCUMENT + own.shape[1] :]  # fmt: skip


@pytest.fixture
def left_padded(tokens):
    own, mask = tokens(3, 6, seed=1), torch.ones(3, 6, dtype=torch.int64)
    own[1, :3], mask[1, :3] = 0, 0
    return own, mask


def test_generate_is_our_greedy_loop(model, tokens, left_padded):
    document, (own, mask) = tokens(1, DOCUMENT), left_padded
    pool = pk.build_pool(model, document, **PAPER)
    theirs = generate(model, document, own, mask, pool.agent_cache(3), max_new_tokens=8)
    prompts = [ids[keep.bool()].tolist() for ids, keep in zip(own, mask, strict=True)]
    ours = hf.greedy(model, pool.agent_cache(3), prompts, n_seen=DOCUMENT, max_new_tokens=8)
    assert theirs.tolist() == ours


def test_beams_are_those_of_the_ordinary_cache(model, tokens, left_padded):
    document, (own, mask) = tokens(1, DOCUMENT), left_padded
    pool = pk.build_pool(model, document, **LOSSLESS)
    beams = {"num_beams": 2, "max_new_tokens": 6}
    shared = generate(model, document, own, mask, pool.agent_cache(3), **beams)
    plain = generate(model, document, own, mask, None, **beams)
    assert torch.equal(shared, plain)


def test_the_pool_is_read_by_threads_and_by_two_pools_in_turn(llama, tokens):
    documents = [tokens(1, DOCUMENT, seed=s) for s in (0, 1)]
    pools = [pk.build_pool(llama, d, **PAPER) for d in documents]
    prompts = [tokens(n, seed=n).tolist() for n in (5, 9)]

    def answer(pool):
        return hf.greedy(llama, pool.agent_cache(2), prompts, n_seen=DOCUMENT, max_new_tokens=8)

    before = [{k: t.clone() for k, t in pool.tensors.items()} for pool in pools]
    alone = [answer(pool) for pool in pools]
    assert alone[0] != alone[1]
    together: dict[int, list] = {}
    threads = [
        threading.Thread(target=lambda i=i: together.update({i: answer(pools[i % 2])}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        llama(documents[0])  # a plain forward in between
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(4)] == alone * 2
    for pool, tensors in zip(pools, before, strict=True):
        assert all(torch.equal(pool.tensors[k], t) for k, t in tensors.items())


def test_a_cache_can_be_cropped_and_reset(llama, tokens):
    document, own = tokens(1, DOCUMENT), tokens(2, 8, seed=1)
    pool = pk.build_pool(llama, document, **PAPER)
    cache = pool.agent_cache(2)
    first = hf.logits(llama, cache, own, DOCUMENT)
    for layer in cache.layers:
        layer.crop(-3)
    assert cache.get_seq_length() == DOCUMENT + 5
    again = hf.logits(llama, cache, own[:, 5:], DOCUMENT + 5)
    assert torch.allclose(again, first[:, 5:], atol=1e-5)
    with pytest.raises(PoolError, match="crop would remove 20 tokens, but the agents hold 8"):
        cache.layers[0].crop(-20)
    cache.reset()
    assert torch.allclose(hf.logits(llama, cache, own, DOCUMENT), first, atol=1e-5)


def test_an_agent_costs_its_own_suffix_whatever_the_document(llama, tokens):
    own = tokens(4, 10, seed=1)
    held = []
    for n_tokens in (20, 200):
        pool = pk.build_pool(llama, tokens(1, n_tokens), **PAPER)
        cache = pool.agent_cache(4)
        hf.logits(llama, cache, own, n_tokens)
        held.append(cache.nbytes)
    assert held[0] == held[1] == 4 * 10 * pool.geometry.elements_per_token * 4  # fp32


def test_room_reserved_ahead_is_a_twentieth_at_most(llama, tokens):
    pool = pk.build_pool(llama, tokens(1, 20), **PAPER)
    cache = pool.agent_cache(2)
    for i in range(100):
        hf.logits(llama, cache, tokens(2, 1, seed=i), 20 + i)
        held = sum(layer.buffer.numel() * 4 for layer in cache.layers)
        assert cache.nbytes <= held <= 1.05 * cache.nbytes
