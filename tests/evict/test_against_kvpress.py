"""What is kept, against kvpress on the same model and prompt; runs where kvpress is installed.

kvpress needs transformers < 5.3, so this has an environment of its own:
pip install kvpress==0.5.5 transformers==5.2.0
"""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from polykv_lib import hf
from polykv_lib.evict import TOVA, KeyDiff, KeyNorm, Plan, SnapKV, StreamingLLM, keep
from polykv_lib.evict.kvpress import KVPress

kvpress = pytest.importorskip("kvpress", exc_type=ImportError)

TOKENS, BUDGET = 96, 24
RATIO = 1 - BUDGET / TOKENS
PAIRS = {
    "SnapKV": (SnapKV(window=16, kernel=5), "SnapKVPress", {"window_size": 16, "kernel_size": 5}),
    "TOVA": (TOVA(), "TOVAPress", {}),
    "StreamingLLM": (StreamingLLM(n_sink=4), "StreamingLLMPress", {"n_sink": 4}),
    "KeyDiff": (KeyDiff(), "KeyDiffPress", {}),
    "KeyNorm": (KeyNorm(), "KnormPress", {}),
}


def press_of(name, arguments):
    return getattr(kvpress, name)(compression_ratio=RATIO, **arguments)


def prompt(seed):
    """No token twice: in the first layer equal tokens have keys of equal norm, which would tie."""
    return torch.randperm(128, generator=torch.Generator().manual_seed(seed))[None, :TOKENS]


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def model(request):
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512,
    }  # fmt: skip
    config, cls = {
        "Llama": (LlamaConfig, LlamaForCausalLM), "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[request.param]  # fmt: skip
    torch.manual_seed(0)
    made = cls(config(**sizes)).eval()
    for parameter in made.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(3)
        else:  # norm weights of one would give Qwen3's keys equal norms: ties
            parameter.data.mul_(torch.rand(parameter.shape) + 0.5)
    return made


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seed", range(3))
def test_kept_sets_are_kvpresss(model, name, seed):
    policy, press_name, arguments = PAIRS[name]
    ids = prompt(seed)
    model.set_attn_implementation("sdpa")
    theirs = DynamicCache()
    with torch.no_grad(), press_of(press_name, arguments)(model):
        model(ids, past_key_values=theirs)
    hf.prepare(model)
    layers, [kept] = hf.evict_document(model, ids, [Plan.uniform(policy, BUDGET, 2)])
    for full, of_layer, pruned in zip(layers, kept, theirs.layers, strict=True):
        assert pruned.keys.shape[2] == BUDGET
        for head, tokens in enumerate(of_layer):
            distance = torch.cdist(pruned.keys[0, head], full.keys[0, head])
            assert set(distance.argmin(1).tolist()) == set(tokens.tolist())


@pytest.mark.parametrize("name", PAIRS)
def test_a_press_is_a_policy(model, name):
    policy, press_name, arguments = PAIRS[name]
    ids = prompt(7)
    hf.prepare(model)
    pair = (policy, KVPress(press=press_of(press_name, arguments)))
    _, [ours, theirs] = hf.evict_document(model, ids, [Plan.uniform(p, BUDGET, 2) for p in pair])
    for a, b in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, a, b))


def test_a_press_that_needs_the_model(model):
    ids = prompt(7)
    hf.prepare(model)
    press = kvpress.ExpectedAttentionPress(compression_ratio=RATIO)
    layers = hf.read_document(model, ids)
    with pytest.raises(ValueError, match=r"Press scores by the model .*; use it through kvpress"):
        keep(KVPress(press=press), layers[0], (BUDGET, BUDGET))
