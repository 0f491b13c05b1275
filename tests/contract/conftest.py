"""Tiny random models of every supported family, built in memory; no weights are fetched."""

from collections.abc import Callable

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.kv import LayerKV
from polykv_lib.pool import SharedKVPool

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip

FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {},
    "Phi3": {},
    "Granite": {
        "embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 1.5,
    },
}  # fmt: skip


def tiny(family: str, **changes: object) -> PreTrainedModel:
    """A prepared two-layer model; weights are sharpened, since random ones give near-uniform attention."""
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, **FAMILIES.get(family, {}), **changes}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(3)
    return pk.prepare(model)


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny("Llama")


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny(family, **changes to its configuration)`."""
    return tiny


@pytest.fixture
def masked_forward() -> Callable[..., torch.Tensor]:
    """`masked(model, pool, own)`: logits of a dense forward over a full-length cache.

    The cache holds what the pool kept, dequantised, each token at its place; all others are masked.
    """

    def attention(module, q, k, v, mask, scaling=None, **_):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.nan_to_num().mT * scaling + mask
        weights = scores.masked_fill(k.isnan().any(-1)[:, :, None], -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    def masked(model: PreTrainedModel, pool: SharedKVPool, own: torch.Tensor) -> torch.Tensor:
        shape = (1, pool.geometry.n_kv_heads, pool.n_tokens, pool.geometry.head_dim)
        layers = [
            LayerKV(keys=torch.full(shape, torch.nan), values=torch.zeros(shape))
            for _ in pool.layers
        ]
        for layer, pieces in zip(layers, pool.layers, strict=True):
            for piece in pieces:
                for row, head in enumerate(piece.heads or range(shape[1])):
                    at = piece.positions[row].long()
                    layer.keys[0, head, at] = piece.keys.dense()[row]
                    layer.values[0, head, at] = piece.values.dense()[row]
        AttentionInterface.register("masked", attention)
        AttentionMaskInterface.register("masked", eager_mask)
        model.set_attn_implementation("masked")
        try:
            return hf.logits(model, hf.full_cache(layers, len(own)), own, pool.n_tokens)
        finally:
            pk.prepare(model)

    return masked


@pytest.fixture
def replayed() -> Callable[..., list[torch.Tensor]]:
    """`replayed(model, pieces, held)`: logits of a full cache in which a query sees what is listed.

    `held[n][layer][head]` are the positions that the head holds when the first n tokens have been
    seen; every query also sees the new tokens up to itself. Where a list holds (positions, keys,
    values) instead, the full cache's entries are replaced by these. With `sums`, a dict, the
    attention that each token received is added up in it by layer, [q_head, token].
    """

    def replay(model, pieces, held, sums=None):
        def attention(module, q, k, v, mask, scaling=None, **_):
            n_new, n_seen, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
            old = n_seen - n_new
            visible = torch.zeros(k.shape[1], n_new, n_seen, dtype=torch.bool)
            visible[:, :, old:] = torch.ones(n_new, n_new, dtype=torch.bool).tril()
            k, v = k.clone(), v.clone()
            for head, entry in enumerate(held[old][module.layer_idx] if old else ()):
                positions, *changed = entry if isinstance(entry, tuple) else (entry,)
                visible[head, :, positions] = True
                for side, new in zip((k, v), changed, strict=False):
                    side[0, head, positions] = new
            k, v, visible = (x.repeat_interleave(groups, -3) for x in (k, v, visible))
            weights = (q @ k.mT * scaling).masked_fill(~visible, -torch.inf).softmax(-1)
            if sums is not None:
                before = sums.get(module.layer_idx, torch.zeros(q.shape[1], 0))
                before = torch.nn.functional.pad(before, (0, n_seen - before.shape[1]))
                sums[module.layer_idx] = before + weights[0].sum(1)
            return (weights @ v).transpose(1, 2).contiguous(), None

        AttentionInterface.register("replay", attention)
        AttentionMaskInterface.register("replay", eager_mask)
        model.set_attn_implementation("replay")
        cache, seen, logits = transformers.DynamicCache(), 0, []
        try:
            for ids in pieces:
                logits.append(hf.logits(model, cache, ids, seen))
                seen += ids.shape[1]
        finally:
            pk.prepare(model)
        return logits

    return replay


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """Random token ids of a shape, from a seed."""

    def draw(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer without a chat template: a token a word, by its length."""
    vocabulary = {"x" * n: n for n in range(1, 20)} | {"?": 0}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw)
