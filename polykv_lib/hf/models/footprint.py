"""What a model's weights weigh, from its config alone: no weight is read or downloaded."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polykv_lib.hf.models.sources import HUB_IDS, locate, split_form
from polykv_lib.kv import Geometry

NF4_BITS: Final = 4 + 8 / 64 + 32 / (64 * 256)  # code, 8-bit scale of 64, fp32 scale of 256 scales
# Model type and shape of the grids' models, so that they are known without a network.
KNOWN: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "smollm2-135m": (
        "llama",
        {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
            "tie_word_embeddings": True,
        },
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        "llama",
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49_152,
            "tie_word_embeddings": True,
        },
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": (
        "llama",
        {
            "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        },
    ),
    "Qwen/Qwen3-8B": (
        "qwen3",
        {
            "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151_936,
        },
    ),
    "Qwen/Qwen3-1.7B": (
        "qwen3",
        {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151_936, "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        "qwen2",
        {
            "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
        },
    ),
}  # fmt: skip
KNOWN["meta-llama/Llama-3.1-8B-Instruct"] = KNOWN["meta-llama/Meta-Llama-3-8B-Instruct"]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A model's sizes: numbers of weights, and widths of what passes through a layer."""

    geometry: Geometry
    hidden: int
    intermediate: int
    vocabulary: int
    n_weights: int
    n_linear: int  # of them in linear layers but the output head: what 4-bit loading quantises
    in_four_bits: bool

    def weight_bytes(self, element_bytes: int) -> int:
        """Bytes of the loaded weights, 2 an element in float16 and 4 in float32."""
        if not self.in_four_bits:
            return self.n_weights * element_bytes
        return int((self.n_weights - self.n_linear) * element_bytes + self.n_linear * NF4_BITS / 8)


def footprint(name: str) -> Footprint:
    """The sizes of a model named as for `load_model`; its layers are built without storage.

    Raises:
        ValueError: Unknown name, or a config that is no decoder-only language model's.
        FileNotFoundError: A folder without a config.
        OSError: The config is neither here nor to be had from the hub.
    """
    plain, in_four_bits = split_form(name)
    config = _config(plain)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = (m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
    text = config.get_text_config()
    return Footprint(
        geometry=geometry_of(config),
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", 4 * text.hidden_size),
        vocabulary=text.vocab_size,
        n_weights=sum(weight.numel() for weight in model.parameters()),
        n_linear=sum(layer.weight.numel() for layer in linear),
        in_four_bits=in_four_bits,
    )


def geometry_of(config: Any) -> Geometry:
    """The cache geometry that a model's config describes."""
    text = config.get_text_config()
    n_q = text.num_attention_heads
    return Geometry(
        n_layers=text.num_hidden_layers,
        n_q_heads=n_q,
        n_kv_heads=getattr(text, "num_key_value_heads", None) or n_q,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // n_q,
    )


def _config(plain: str) -> Any:
    hub_id = HUB_IDS.get(plain, plain)
    if hub_id in KNOWN:
        kind, shape = KNOWN[hub_id]
        return AutoConfig.for_model(kind, **shape)
    source, options = locate(plain)
    return AutoConfig.from_pretrained(source, **options)
