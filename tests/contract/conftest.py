"""Tiny random models of every supported family, built in memory; no weights are fetched."""

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import AttentionInterface, PreTrainedModel
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
}


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
def tokens() -> Callable[..., torch.Tensor]:
    """Random token ids of a shape, from a seed."""

    def draw(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))

    return draw
