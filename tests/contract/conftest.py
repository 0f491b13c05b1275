"""Tiny random models of every supported family, built in memory; no weights are fetched."""

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import polykv_lib as pk

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
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES.get(family, {}), **changes})
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
def tokens() -> Callable[..., torch.Tensor]:
    """Random token ids of a shape, from a seed."""

    def draw(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))

    return draw
