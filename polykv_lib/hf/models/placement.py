"""Where a model goes and in which dtype."""

from importlib.util import find_spec
from typing import Any, Final

import torch
from transformers import BitsAndBytesConfig

SHARE: Final = 0.6  # of each GPU's free memory that weights may take; the rest is for the caches


def spread(asked: str | torch.device | None, place: torch.device) -> dict[str, Any]:
    """Loading options that fill several GPUs in order, where no device was asked for; else none.

    A model that fits the first GPU stays there; a pool's layers follow their layer's device.
    """
    n_gpus = torch.cuda.device_count() if place.type == "cuda" and asked is None else 0
    if n_gpus < 2:
        return {}
    free = {i: int(SHARE * torch.cuda.mem_get_info(i)[0]) for i in range(n_gpus)}
    return {"device_map": "sequential", "max_memory": free}


def four_bit(dtype: torch.dtype) -> dict[str, Any]:
    """Loading options for 4-bit weights: NF4 with quantised scales, computing in `dtype`.

    Without a compute dtype bitsandbytes computes in float32, which is slow and says nothing.

    Raises:
        ModuleNotFoundError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise ModuleNotFoundError(
            "4-bit weights are loaded by bitsandbytes, which is not installed: "
            "pip install --no-deps bitsandbytes",
            name="bitsandbytes",
        )
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": quantised}


def keep_compute_dtype(model: torch.nn.Module) -> None:
    """Has 4-bit layers on a CPU compute in the dtype they were loaded with.

    Where a CPU multiplies bfloat16, bitsandbytes would use that whatever the dtype, and repack the
    weights on first use, which changes the model's fingerprint.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype for a device, as `load_model` documents; the GPU's own answer is not asked.

    `torch.cuda.is_bf16_supported()` is true on a T4, where bfloat16 is emulated and slow.
    """
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def checked_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name; ValueError for anything a KV cache is not kept in."""
    known = {
        str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)
    }
    given = str(dtype).removeprefix("torch.")
    if given not in known:
        raise ValueError(f"dtype={given!r} is not supported; use one of {', '.join(known)}")
    return known[given]
