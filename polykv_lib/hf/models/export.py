"""A model folder that older transformers releases load too."""

import json
import os
from pathlib import Path

from transformers import PreTrainedModel


def export_model(model: PreTrainedModel, folder: str | os.PathLike[str]) -> Path:
    """Write config and weights; the RoPE base also under its name before transformers 5."""
    place = Path(folder)
    model.save_pretrained(place)
    config = json.loads((place / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    config["torch_dtype"] = str(model.dtype).removeprefix("torch.")
    (place / "config.json").write_text(json.dumps(config, indent=1))
    return place
