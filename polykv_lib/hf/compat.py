"""Every difference between transformers 5.0 and the newest release that this library meets."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def query_length(x: int | Tensor) -> int:
    """Argument of `get_mask_sizes`: positions of the queries up to 5.3, their number since 5.4."""
    return x if isinstance(x, int) else x.shape[0]


def tokens_to_crop(n: int, length: int) -> int:
    """Argument of `crop`: a length or a negative count up to 5.14, only the latter since 5.17."""
    return -n if n <= 0 else max(0, length - n)


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache in a model's forward: `past_key_values`, and `cache` since 5.24."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def forward(model: PreTrainedModel, ids: Tensor | None, cache: Any, **arguments: Any) -> Any:
    """Run model(ids) with its cache under the name that this release gives it."""
    return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **arguments)


def attention_window(model: PreTrainedModel) -> int | None:
    """The shortest sliding window of any layer, or None where every layer sees everything.

    Raises:
        ValueError: a layer that is neither full nor sliding-window attention.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}, which hold no "
            "keys and values to share. Use a model with full or sliding-window attention."
        )
    window = getattr(config, "sliding_window", None)
    # Mistral and Phi-3 name no kinds: their window, where they have one, is every layer's.
    return window if not kinds or "sliding_attention" in kinds else None


def layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """Device of each decoder layer, where its part of a pool belongs."""
    layers = model.base_model.layers
    return [next(layer.parameters()).device for layer in layers]
