"""What can not work says so in one sentence, before any compute."""

import inspect

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.evict import H2O, LayerPlan, Plan
from polykv_lib.hf.compat import cache_argument
from polykv_lib.kv import LayerKV
from polykv_lib.pool import PoolError, freeze

PAPER = {"keys": pk.Int8("tensor"), "values": pk.TurboQuant(3, "plain")}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.ones(1, 4), r"document_ids are torch.float32 of shape \[1, 4\]; pass token ids as int64"),
        (torch.ones(2, 4, dtype=torch.int64), r"of shape \[2, 4\].*one document a pool"),
        (torch.ones(1, 0, dtype=torch.int64), "document_ids are empty"),
        (torch.full((1, 4), 128), "document_ids reach 128, but the model's vocabulary has 128 tokens"),
        (torch.ones(1, 513, dtype=torch.int64), "the document has 513 tokens, but the model has 512 positions"),
    ],
)  # fmt: skip
def test_bad_documents(llama, ids, message):
    with pytest.raises(ValueError, match=message):
        pk.build_pool(llama, ids, **PAPER)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": "int8"}, r"keys='int8'; pass a codec, such as pk.Int8\(\) or pk.TurboQuant"),
        ({"values": pk.Int8}, r"values=<class .*Int8'>; pass a codec"),
        ({"values": None}, "values=None; pass a codec"),
    ],
)
def test_codecs_are_objects(llama, tokens, arguments, message):
    unchecked = inspect.unwrap(pk.build_pool)  # types are checked in tests only
    with pytest.raises(ValueError, match=message):
        unchecked(llama, tokens(1, 8), **{**PAPER, **arguments})


@pytest.mark.parametrize(
    ("ids", "chunk", "message"),
    [
        ([1, 2], None, r"ids are \[1, 2\]; pass token ids as an int64 tensor \[rows, T\]"),
        (torch.ones(4, dtype=torch.int64), None, r"ids are torch.int64 of shape \[4\]"),
        (torch.ones(2, 0, dtype=torch.int64), 2, r"of shape \[2, 0\]"),
        (torch.ones(1, 4, dtype=torch.int64), -1, "chunk=-1; pass tokens to prefill at a time"),
        (torch.ones(1, 4, dtype=torch.int64), 0, "chunk=0; pass tokens"),
        (torch.ones(1, 4, dtype=torch.int64), "2", "chunk='2'; pass tokens"),
        (torch.full((2, 4), 128), None, "ids reach 128, but the model's vocabulary has 128 tokens"),
    ],
)
def test_what_can_not_be_prefilled(llama, ids, chunk, message):
    unchecked = inspect.unwrap(pk.prefill)
    with pytest.raises(ValueError, match=message):
        unchecked(llama, ids, Plan.uniform(H2O(), 2, 2), chunk=chunk)


def test_a_mask_covers_the_ids(llama, tokens):
    mask = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 3\], ids \[2, 4\]"):
        pk.prefill(llama, tokens(2, 4), Plan.uniform(H2O(), 2, 2), attention_mask=mask)


def test_a_plan_of_codecs_comes_with_them(llama, tokens):
    layer = LayerPlan(policy=H2O(), budget=4, codec="polykv")
    with pytest.raises(ValueError, match=r"pass what polykv_lib.presets.of_plan\(plan\) returns"):
        pk.build_pool(llama, tokens(1, 8), **PAPER, plan=Plan(layers=(layer,) * 2))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([[torch.arange(4)] * 2], "kept names 1 layers, and 0 heads of layer 1; pass for every"),
        ([[torch.arange(4)]] * 2, "kept names 2 layers, and 1 heads of layer 0"),
        ([[torch.tensor([0, 9])] * 2] * 2, "head 0 of layer 0 keeps 2 tokens that do not ascend"),
        ([[torch.tensor([3, 1])] * 2] * 2, "within the document's 8"),
    ],
)
def test_kept_tokens_are_those_of_every_head(kept, message):
    layers = [LayerKV(keys=torch.randn(1, 2, 8, 64), values=torch.randn(1, 2, 8, 64))] * 2
    with pytest.raises(PoolError, match=message):
        inspect.unwrap(freeze)(layers, **PAPER, kept=kept)


@pytest.mark.parametrize(("function", "options"), [(pk.prefill, {}), (pk.build_pool, PAPER)])
def test_a_plan_is_no_path(llama, tokens, function, options):
    unchecked = inspect.unwrap(function)
    with pytest.raises(ValueError, match=r"plan='plan.yaml'; pass a Plan. Plan.load\(path\) reads"):
        unchecked(llama, tokens(1, 8), plan="plan.yaml", **options)


def test_bare_tensors_take_codecs_too():
    layers = [LayerKV(keys=torch.randn(1, 2, 8, 64), values=torch.randn(1, 2, 8, 64))]
    with pytest.raises(ValueError, match=r"keys='int8'; pass a codec, such as pk.Int8"):
        inspect.unwrap(freeze)(layers, keys="int8", values=pk.TurboQuant(3))


def test_generating_without_the_documents_tokens(llama, tokens):
    document, own = tokens(1, 8), tokens(2, 3, seed=1)
    pool = pk.build_pool(llama, document, **PAPER)
    both = torch.cat([document.expand(2, -1), own], 1)
    shifted = torch.cat([own[:, :1], both], 1)  # padding belongs after the document
    for ids in (own, torch.cat([own] * 4, 1), both[:, :8], both.flip(1), shifted):
        with pytest.raises(PoolError, match=r"drops the 8 that.*; pass the document's 8 tokens"):
            llama.generate(ids, max_new_tokens=2, **{cache_argument(llama): pool.agent_cache(2)})
    used = pool.agent_cache(2)
    longer = llama.generate(both, max_new_tokens=2, **{cache_argument(llama): used})
    again = torch.cat([longer, own], 1)  # a next turn goes on with the same cache
    assert llama.generate(again, max_new_tokens=2, **{cache_argument(llama): used}).shape == (2, 18)
    with pytest.raises(PoolError, match="it drops the 17 that the cache has seen"):
        llama.generate(both, max_new_tokens=2, **{cache_argument(llama): used})
    with pytest.raises(PoolError, match="no token is new: the cache has seen 8 already"):
        pool.agent_cache(1).layers[0].get_mask_sizes(0)


def test_ways_of_generating_that_feed_the_document_again(llama, tokens):
    document, own = tokens(1, 8), tokens(1, 3, seed=1)
    lossless = {"keys": pk.FullPrecision(), "values": pk.FullPrecision()}
    pool, both = pk.build_pool(llama, document, **lossless), torch.cat([document, own], 1)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = llama.generate(both, **options)
    if cache_argument(llama) == "cache":  # before 5.24 chunks hold the document's tokens too
        found = llama.generate(both, **options, prefill_chunk_size=2, cache=pool.agent_cache(1))
        assert torch.equal(found, plain)
        with pytest.raises(PoolError, match="feeds the document's tokens again"):
            llama.generate(both, **options, prompt_lookup_num_tokens=3, cache=pool.agent_cache(1))
    embeds = llama.get_input_embeddings()(both)
    cache = {cache_argument(llama): pool.agent_cache(1)}
    found = llama.generate(inputs_embeds=embeds, **options, **cache)
    assert torch.equal(found, plain[:, both.shape[1] :])


def test_a_model_that_does_not_generate_reads_pools(llama, tokens):
    body = pk.prepare(type(llama.model)(llama.config).eval())
    pool = pk.build_pool(body, tokens(1, 8), **PAPER)
    with torch.no_grad():
        out = body(tokens(1, 2), **{cache_argument(body): pool.agent_cache(1)})
    assert out.last_hidden_state.shape[:2] == (1, 2)


def test_a_model_that_changes_values_after_its_cache(tokens):
    config = DiffLlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=64,
    )  # fmt: skip
    model = DiffLlamaForCausalLM(config).eval()
    if not model._supports_attention_backend:  # in 5.0
        with pytest.raises(ValueError, match="does not use transformers' attention interface"):
            pk.prepare(model)
        return
    pk.prepare(model)
    refused = "DiffLlamaAttention changes values after its cache has stored them"
    with pytest.raises(ValueError, match=refused):
        pk.build_pool(model, tokens(1, 8), **PAPER)
    layers = [LayerKV(keys=torch.randn(1, 2, 8, 16), values=torch.randn(1, 2, 8, 16))] * 2
    lossless = {"keys": pk.FullPrecision(), "values": pk.FullPrecision()}
    pool = hf.share(model, layers, tokens(1, 8), **lossless)
    with pytest.raises(ValueError, match=refused):
        hf.logits(model, pool.agent_cache(1), tokens(1, 2), 8)


def test_a_model_that_changes_keys_after_its_cache(tokens):
    config = DeepseekV2Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2,
        kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=2, vocab_size=128, max_position_embeddings=64,
    )  # fmt: skip
    model = pk.prepare(DeepseekV2ForCausalLM(config).eval())
    document, own = tokens(1, 8), tokens(1, 3, seed=1)
    lossless = {"keys": pk.FullPrecision(), "values": pk.FullPrecision()}
    try:
        pool = pk.build_pool(model, document, **lossless)
    except ValueError as error:
        if "deepseek_v2 changes keys after its cache has stored them" not in str(error):
            raise
        return
    with torch.no_grad():  # up to 5.12 its cache stores what attention reads
        plain = model(torch.cat([document, own], 1)).logits[:, 8:]
    torch.testing.assert_close(
        hf.logits(model, pool.agent_cache(1), own, 8), plain, atol=1e-5, rtol=0
    )


def test_a_model_that_was_not_prepared(llama, tokens):
    pool = pk.build_pool(llama, tokens(1, 8), **PAPER)
    llama.set_attn_implementation("sdpa")
    try:
        with pytest.raises(
            ValueError, match=r"'sdpa', which can not read a pool. Call polykv_lib.prepare"
        ):
            pk.build_pool(llama, tokens(1, 8), **PAPER)
        with pytest.raises(PoolError, match="the document would be lost"):
            hf.logits(llama, pool.agent_cache(1), tokens(1, 2), 8)
    finally:
        pk.prepare(llama)


def test_an_encoder_decoder_model():
    model = T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    )
    with pytest.raises(ValueError, match="t5 is an encoder-decoder model"):
        pk.prepare(model)


def test_a_model_without_the_attention_interface():
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_head=4, n_layer=1, vocab_size=16))
    with pytest.raises(ValueError, match="bloom does not use transformers' attention interface"):
        pk.prepare(model)


def test_a_model_with_capped_scores(tiny_model):
    with pytest.raises(ValueError, match="gemma2 caps its attention scores"):
        tiny_model("Gemma2", head_dim=16)


def test_sliding_windows_hold_within_the_window_and_are_refused_beyond(tiny_model, tokens):
    model = tiny_model("Gemma3", sliding_window=32, head_dim=16)
    own = tokens(2, 4, seed=1)
    pool = pk.build_pool(model, tokens(1, 24), keys=pk.FullPrecision(), values=pk.FullPrecision())
    whole = torch.cat([tokens(1, 24).expand(2, -1), own], 1)
    with torch.no_grad():
        want = model(whole).logits[:, 24:]
    assert torch.allclose(hf.logits(model, pool.agent_cache(2), own, 24), want, atol=1e-5)
    with pytest.raises(PoolError, match="36 tokens, but this model has layers with a window of 32"):
        hf.logits(model, pool.agent_cache(2), tokens(2, 12, seed=1), 24)
    with pytest.raises(
        ValueError, match="40 tokens, but gemma3_text has layers with a window of 32"
    ):
        pk.build_pool(model, tokens(1, 40), **PAPER)


def test_nan_in_the_cache():
    kv = torch.randn(1, 2, 8, 16)
    spoiled = kv.clone()
    spoiled[0, 1, 3, 2] = torch.nan
    with pytest.raises(PoolError, match="the values of layer 1 hold NaN or infinity"):
        freeze([LayerKV(keys=kv, values=kv), LayerKV(keys=kv, values=spoiled)], **PAPER)


@pytest.mark.parametrize(
    ("layers", "n_sink", "message"),
    [
        (
            [((1, 2, 8, 16), (1, 2, 4, 16))],
            0,
            r"layer 0 has keys \[1, 2, 8, 16\] and values \[1, 2, 4, 16\]",
        ),
        ([((2, 2, 8, 16), (2, 2, 8, 16))], 0, "one document of at least one token, of one shape"),
        ([((1, 2, 0, 16), (1, 2, 0, 16))], 0, "one document of at least one token, of one shape"),
        (
            [((1, 2, 8, 16),) * 2, ((1, 2, 9, 16),) * 2],
            0,
            r"layer 1 has shape .* the layers before it",
        ),
        ([((1, 2, 8, 16),) * 2], -1, "n_sink=-1; pass the number of first tokens"),
        ([((1, 2, 8, 16),) * 2], 1.5, "n_sink=1.5; pass the number of first tokens"),
        ([((1, 2, 8, 16),) * 2], "4", "n_sink='4'; pass the number of first tokens"),
    ],
)
def test_tensors_that_are_no_document(layers, n_sink, message):
    kv = [LayerKV.__new__(LayerKV) for _ in layers]
    for layer, (keys, values) in zip(kv, layers, strict=True):
        for name, shape in (("keys", keys), ("values", values)):
            object.__setattr__(layer, name, torch.zeros(shape))
    with pytest.raises(PoolError, match=message):
        inspect.unwrap(freeze)(kv, keys=PAPER["keys"], values=PAPER["values"], n_sink=n_sink)


def test_no_layers_no_agents_no_model():
    kv = torch.randn(1, 2, 8, 16)
    with pytest.raises(PoolError, match="there is no layer to freeze"):
        freeze([], **PAPER)
    pool = freeze([LayerKV(keys=kv, values=kv)], **PAPER)
    with pytest.raises(PoolError, match="belongs to no model"):
        pool.agent_cache(1)
    for n in (0, 1.5, "2"):
        with pytest.raises(PoolError, match=rf"agent_cache\({n!r}\); pass a number of agents"):
            inspect.unwrap(type(pool).agent_cache)(pool, n)
    ids = torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(PoolError, match=r"document_ids have shape \[1, 5\] for a document of 8"):
        freeze([LayerKV(keys=kv, values=kv)], **PAPER, document_ids=ids)
    assert pool == pool
    assert len({pool, freeze([LayerKV(keys=kv, values=kv)], **PAPER)}) == 2


def test_a_batch_that_is_not_the_agents(llama, tokens):
    pool = pk.build_pool(llama, tokens(1, 8), **PAPER)
    with pytest.raises(PoolError, match="a batch of 3 rows met a cache of 2 agents"):
        hf.logits(llama, pool.agent_cache(2), tokens(3, 2), 8)
