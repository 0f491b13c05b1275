"""Where a model lies: in an installed package, in a folder, in a Kaggle mount, or on the hub."""

import difflib
import re
from pathlib import Path
from typing import Any, Final

import huggingface_hub

from polykv_lib.hf.models.embedded import embedded_folder

EMBEDDED: Final = "smollm2-135m"
HUB_IDS: Final = {
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
}
KAGGLE_MODELS: Final = {  # the same weights on Kaggle; no SmolLM2 is known there
    "meta-llama/Meta-Llama-3-8B-Instruct": "metaresearch/llama-3/transformers/8b-chat-hf/1",
    "meta-llama/Llama-3.1-8B-Instruct": "metaresearch/llama-3.1/transformers/8b-instruct/2",
    "Qwen/Qwen3-8B": "qwen-lm/qwen-3/transformers/8b/1",
    "Qwen/Qwen2.5-7B-Instruct": "qwen-lm/qwen2.5/transformers/7b-instruct/1",
}
KAGGLE_INPUT: Final = Path("/kaggle/input")
FOUR_BIT: Final = "@4bit"  # ends the name of a model whose weights are to be loaded in 4 bits


def split_form(name: str) -> tuple[str, bool]:
    """A model's name without its `@4bit`, and whether it had one."""
    return name.removesuffix(FOUR_BIT), name.endswith(FOUR_BIT)


def kaggle_handle(name: str) -> str | None:
    """`owner/model/framework/variation/version` of a model's copy on Kaggle, if one is known."""
    plain, _ = split_form(name)
    return KAGGLE_MODELS.get(HUB_IDS.get(plain, plain))


def locate(name: str) -> tuple[str, dict[str, Any]]:
    """Where a model lies, as transformers takes it: a folder or a hub id, and loading options.

    Raises:
        ValueError: Unknown name, or several mounts match it.
        FileNotFoundError: A folder without a model, or the embedded model is not installed.
    """
    if name == EMBEDDED:
        return str(embedded_folder()), {}
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{name!r} is a folder without config.json, so not a model")
        return str(folder), {}
    hub_id = HUB_IDS.get(name, name)
    if mount := kaggle_mount(hub_id, name):
        return str(mount), {}
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id) or name.startswith("."):
        raise ValueError(_unknown(name))
    return hub_id, {"local_files_only": not _reachable(hub_id)}


def kaggle_mount(hub_id: str, name: str) -> Path | None:
    """The model folder mounted on Kaggle that holds this model.

    Mounts look like `qwen-3/transformers/8b/1` or `models/qwen-lm/qwen-3/transformers/8b/1`, and
    weights may lie a folder deeper. A known copy is found by its model and variation. Else the path
    must end with the hub id's or the short name, where framework, version and everything but
    letters and digits do not count: `8b-base` is not `8b`.

    Raises:
        ValueError: Several mounts match.
    """
    folders = sorted({c.parent for c in KAGGLE_INPUT.glob("**/config.json")})
    known = KAGGLE_MODELS.get(hub_id, "").split("/")
    matches = [[f for f in folders if _is_copy(f, known)]] if len(known) == 5 else []
    matches += [[f for f in folders if _ends(f, w)] for w in (hub_id.rpartition("/")[2], name)]
    found = next(filter(None, matches), [])
    if len(found) > 1:
        raise ValueError(
            f"{name!r} matches {len(found)} mounted models ({', '.join(map(str, found))}); "
            "pass one of these folders as the name"
        )
    return found[0] if found else None


def _is_copy(folder: Path, handle: list[str]) -> bool:
    _, model, framework, variation, _ = handle
    parts = [part.lower() for part in folder.relative_to(KAGGLE_INPUT).parts]
    return any(parts[i : i + 3] == [model, framework, variation] for i in range(len(parts)))


def _ends(folder: Path, wanted: str) -> bool:
    parts = folder.relative_to(KAGGLE_INPUT).parts
    named = [p for p in parts if p.lower() not in {"transformers", "pytorch"} and not p.isdigit()]
    return _spelled("".join(named)).endswith(_spelled(wanted))


def _spelled(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _reachable(hub_id: str) -> bool:
    """Whether the hub answers for this model at once; transformers itself would retry for 23 s."""
    try:
        huggingface_hub.model_info(hub_id, timeout=10)
    except Exception:  # whichever HTTP library this release of the hub client is built on
        return False
    return True


def _unknown(name: str) -> str:
    names = [EMBEDDED, *HUB_IDS]
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5) or names
    if name.startswith(("/", ".", "~")):
        return f"there is no model folder {name!r}; pass the path of one that holds a config.json."
    return (
        f"unknown model {name!r}; near names are {', '.join(near)}. "
        "Or pass a hub id (owner/model) or the path of a model folder."
    )
