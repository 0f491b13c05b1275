"""What storing one layer alone changes: its keys and values read back, every other layer full."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from transformers import Cache, PreTrainedModel

from polykv_lib.calibration import EncodedItem
from polykv_lib.hf.baselines import full_cache
from polykv_lib.hf.calibration.resumed import FullLayer
from polykv_lib.hf.calibration.suffix import logits_from, tail_states
from polykv_lib.hf.reading import read_document
from polykv_lib.kv import LayerKV, stacked
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.pool import Side, is_lossless
from polykv_lib.pool.freeze import pieces_of
from polykv_lib.pool.pieces import dense


def read_back(layer: LayerKV, keys: Side, values: Side, n_sink: int) -> LayerKV:
    """The layer as a pool returns it: all but its first tokens stored and decoded."""
    k, v = dense(list(pieces_of(layer, keys, values, n_sink, None)))
    return LayerKV(keys=k[None], values=v[None])


def kl_of_each(
    model: PreTrainedModel,
    item: EncodedItem,
    layers: Sequence[LayerKV],
    changed: Iterable[Sequence[LayerKV]],
) -> Float[ndarray, "layer change"]:
    """KL of the item's answer, nats a token, with one layer of its context changed at a time.

    Args:
        model: a prepared model.
        item: what is asked and answered after the context.
        layers: the context as it is.
        changed: for every layer, what may stand in its place; read as one batch.
    """
    full, entering = tail_states(model, full_cache(layers), item)
    found = []
    for i, some in enumerate(changed):
        each = (*layers[:i], stacked(some), *layers[i + 1 :])
        cache = Cache(layers=[FullLayer(own) for own in each])
        hidden = entering[i].expand(len(some), -1, -1)
        rows = logits_from(model, i, hidden, cache, item)
        found.append([float(kl_nats(full, own).mean()) for own in rows])
    return np.array(found)


@torch.no_grad()
def codec_kl(
    model: PreTrainedModel,
    items: Sequence[EncodedItem],
    codecs: Mapping[str, Any],
    say: Callable[[str], None] | None = None,
) -> dict[str, Float[ndarray, " layer"]]:
    """What each layer's codec costs alone, nats an answer token: means in families, then over them.

    Args:
        model: a prepared model.
        items: calibration items; a pass from each layer on for every item, all codecs in it.
        codecs: by name, such as those of `presets`; a lossless one costs 0 and takes no pass.
        say: told after each item.
    """
    lossy = {n: c for n, c in codecs.items() if not is_lossless(c.keys, c.values)}
    if not lossy:
        n_layers = model.config.get_text_config().num_hidden_layers
        return {name: np.zeros(n_layers) for name in codecs}
    families: dict[str, list[Float[ndarray, "layer codec"]]] = {}
    for done, item in enumerate(items, 1):
        layers = read_document(model, torch.tensor([item.context_ids]))
        changed = (
            [read_back(layer, own.keys, own.values, own.n_sink) for own in lossy.values()]
            for layer in layers
        )
        kl = kl_of_each(model, item, layers, changed)
        families.setdefault(item.family, []).append(kl)
        if say is not None:
            say(f"{done} of {len(items)} items stored layer by layer")
    means = np.mean([np.mean(own, axis=0) for own in families.values()], axis=0)
    found = dict(zip(lossy, means.T, strict=True))
    return {name: found.get(name, np.zeros(len(means))) for name in codecs}
