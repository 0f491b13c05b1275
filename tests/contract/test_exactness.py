"""Every clever path against a plain one, in fp32, with controls that must fail."""

import gc
import weakref

import pytest
import torch
from torch.testing import assert_close

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.evict import H2O, Plan
from polykv_lib.hf.compat import forward
from polykv_lib.pool import freeze

DOCUMENT, AGENTS, OWN = 37, 3, 6
EXACT = {"atol": 1e-5, "rtol": 0.0}
LOSSLESS = {"keys": pk.FullPrecision(), "values": pk.FullPrecision()}
PAPER = {"keys": pk.Int8("tensor"), "values": pk.TurboQuant(3, "plain"), "n_sink": 0}
CODECS = {
    "lossless": LOSSLESS,
    "paper": PAPER,
    "default": {"keys": pk.Int8(), "values": pk.TurboQuant(3)},
    "token": {"keys": pk.Int8("token"), "values": pk.Int8("token")},
    "turbo-keys": {"keys": pk.TurboQuant(4, "double"), "values": pk.TurboQuant(2, match_norm=True)},
    "harmonic": {"keys": pk.HarmonicTurboQuant(3), "values": pk.TurboQuant(3, match_norm=True)},
    "shaped": {
        "keys": pk.HarmonicTurboQuant(3, shaped=True),
        "values": pk.TurboQuant(3, norms="byte"),
    },
    "tiers": {
        "keys": pk.Tiered((pk.Int8("token"), pk.HarmonicTurboQuant(3, shaped=True)), (0.25,)),
        "values": pk.Tiered((pk.TurboQuant(4), pk.TurboQuant(3), pk.TurboQuant(2)), (0.1, 0.4)),
    },
    "kivi": {"keys": pk.Affine(4, 8, "token"), "values": pk.Affine(4, 8, "channel")},
}


@torch.no_grad()
def plain(model, document, own):
    """Logits of the agents' tokens from one ordinary forward, no cache."""
    whole = torch.cat([document.expand(len(own), -1), own], dim=1)
    return model(whole).logits[:, document.shape[1] :]


def test_a_prepared_model_computes_what_it_did_before(model, tokens):
    ids = tokens(2, 20)
    with torch.no_grad():
        prepared = model(ids).logits
        model.set_attn_implementation("sdpa")
        before = model(ids).logits
    pk.prepare(model)
    assert torch.equal(prepared, before)


def test_a_lossless_pool_is_one_plain_forward(model, tokens):
    document, own = tokens(1, DOCUMENT), tokens(AGENTS, OWN, seed=1)
    pool = pk.build_pool(model, document, **LOSSLESS)
    assert_close(
        hf.logits(model, pool.agent_cache(AGENTS), own, DOCUMENT),
        plain(model, document, own),
        **EXACT,
    )


def test_shifted_positions_and_a_dropped_document_are_seen(model, tokens):
    """Negative controls: the comparison above does notice a wrong position and a missing prefix."""
    document, own = tokens(1, DOCUMENT), tokens(AGENTS, OWN, seed=1)
    pool = pk.build_pool(model, document, **LOSSLESS)
    want = plain(model, document, own)
    shifted = hf.logits(model, pool.agent_cache(AGENTS), own, DOCUMENT + 3)
    with torch.no_grad():
        dropped = model(own).logits
    assert (shifted - want).abs().max() > 1e-2
    assert (dropped - want).abs().max() > 1e-2


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_quantised_pool_is_the_ordinary_cache_of_its_dequantised_tensors(model, tokens, codec):
    document, own = tokens(1, DOCUMENT), tokens(AGENTS, OWN, seed=1)
    pool = pk.build_pool(model, document, **codec)
    shared = hf.logits(model, pool.agent_cache(AGENTS), own, DOCUMENT)
    dense = hf.logits(model, hf.expanded_cache(pool, AGENTS), own, DOCUMENT)
    assert_close(shared, dense, **EXACT)
    if codec is not LOSSLESS:
        assert (shared - plain(model, document, own)).abs().max() > 1e-3  # it did quantise


@pytest.mark.parametrize("codec", [LOSSLESS, PAPER], ids=["lossless", "paper"])
def test_a_ragged_batch_is_each_agent_alone(model, tokens, codec):
    document = tokens(1, DOCUMENT)
    prompts = [tokens(n, seed=n).tolist() for n in (5, 9, 1)]
    pool = pk.build_pool(model, document, **codec)
    batch = hf.greedy(model, pool.agent_cache(3), prompts, n_seen=DOCUMENT, max_new_tokens=10)
    alone = [hf.PooledAgent(model, pool).generate(p, 10) for p in prompts]
    assert batch == alone


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_logit(model, tokens, side):
    document = tokens(1, DOCUMENT)
    prompts = [tokens(n, seed=n) for n in (5, 9, 1)]
    pool = pk.build_pool(model, document, **PAPER)
    ids = torch.zeros(3, 9, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        where = slice(9 - len(prompt), 9) if side == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = prompt, 1
    with torch.no_grad():
        logits = forward(
            model,
            ids,
            pool.agent_cache(3),
            attention_mask=torch.cat([torch.ones(3, DOCUMENT, dtype=torch.int64), mask], 1),
            position_ids=DOCUMENT + (mask.cumsum(1) - 1).clamp_min(0),
        ).logits
    for row, prompt in enumerate(prompts):
        alone = hf.logits(model, hf.expanded_cache(pool), prompt[None], DOCUMENT)[0]
        assert_close(logits[row, mask[row].bool()], alone, **EXACT)


def test_token_by_token_is_all_at_once(model, tokens):
    document, own = (
        tokens(1, DOCUMENT),
        tokens(AGENTS, 70, seed=1),
    )  # the buffer grows in steps of 1, 2 and 3
    pool = pk.build_pool(model, document, **PAPER)
    cache = pool.agent_cache(AGENTS)
    steps = [hf.logits(model, cache, own[:, i : i + 1], DOCUMENT + i) for i in range(70)]
    at_once = hf.logits(model, pool.agent_cache(AGENTS), own, DOCUMENT)
    assert_close(torch.cat(steps, 1), at_once, **EXACT)


def kept_tokens(layer: int, ragged: bool) -> list[torch.Tensor]:
    heads = [
        torch.arange(0, DOCUMENT, 2 + layer),
        torch.cat([torch.arange(3), torch.arange(20, 37)]),
    ]
    return heads if ragged else [heads[layer % 2]] * 2


@pytest.mark.parametrize("ragged", [False, True], ids=["per-layer", "per-head"])
def test_an_evicted_pool_is_the_full_cache_with_the_rest_masked(
    llama, tokens, masked_forward, ragged
):
    """Layers, and heads, hold different numbers of tokens; the reference masks the full cache."""
    document, own = tokens(1, DOCUMENT), tokens(AGENTS, OWN, seed=1)
    layers = hf.read_document(llama, document)
    kept = [kept_tokens(i, ragged) for i in range(2)]
    pool = freeze(layers, **PAPER | {"n_sink": 2}, kept=kept, cache_factory=hf.AgentCache)
    assert pool.kept_per_head == tuple(tuple(map(len, heads)) for heads in kept)
    shared = hf.logits(llama, pool.agent_cache(AGENTS), own, DOCUMENT)

    assert_close(shared, masked_forward(llama, pool, own), **EXACT)
    assert (
        shared - hf.logits(llama, hf.full_cache(layers, AGENTS), own, DOCUMENT)
    ).abs().max() > 1e-3


def test_half_precision_is_as_near_as_the_dense_cache(llama, tokens):
    document, own = tokens(1, DOCUMENT), tokens(AGENTS, OWN, seed=1)
    exact = plain(llama, document, own)
    try:
        half = llama.to(torch.bfloat16)
        pool = pk.build_pool(half, document, **LOSSLESS)
        ours = (hf.logits(half, pool.agent_cache(AGENTS), own, DOCUMENT) - exact).square().mean()
        dense = (
            (hf.logits(half, hf.expanded_cache(pool, AGENTS), own, DOCUMENT) - exact)
            .square()
            .mean()
        )
    finally:
        llama.to(torch.float32)
    assert ours < 1.5 * dense


@pytest.mark.parametrize("kind", ["observed", "full", "agents", "evicting"])
def test_a_cache_is_freed_when_it_is_dropped(llama, tokens, kind):
    """Without waiting for the collector of cycles, which does not see how large tensors are."""
    document, own = tokens(1, DOCUMENT), tokens(1, OWN, seed=1)
    layers = hf.read_document(llama, document)
    if kind == "observed":
        cache = hf.observed_cache(layers, lambda i, layer: None)
    elif kind == "full":
        cache = hf.full_cache(layers)
    elif kind == "agents":
        cache = pk.build_pool(llama, document, **LOSSLESS).agent_cache(1)
    else:
        cache = pk.prefill(llama, document, Plan.uniform(H2O(), 20, 2).decoding(H2O(), 22))
    hf.logits(llama, cache, own, DOCUMENT)
    held = [weakref.ref(cache), *map(weakref.ref, cache.layers)]
    gc.collect()
    gc.disable()
    try:
        del cache
        assert not [found for ref in held if (found := ref()) is not None]
    finally:
        gc.enable()
