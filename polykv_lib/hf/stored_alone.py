"""What storing one layer alone changes: its keys and values read back, every other layer full."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from transformers import Cache, PreTrainedModel

from polykv_lib.calibration import EncodedItem
from polykv_lib.hf.baselines import full_cache
from polykv_lib.hf.reading import read_document
from polykv_lib.hf.resumed import FullLayer
from polykv_lib.hf.suffix import logits_from, tail_states
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.pool import Side
from polykv_lib.pool.freeze import pieces_of
from polykv_lib.pool.pieces import dense
from polykv_lib.quantize import FullPrecision


def read_back(layer: LayerKV, keys: Side, values: Side, n_sink: int) -> LayerKV:
    """The layer as a pool returns it: all but its first tokens stored and decoded."""
    k, v = dense(list(pieces_of(layer, keys, values, n_sink, None)))
    return LayerKV(keys=k[None], values=v[None])


def kl_of_each(
    model: PreTrainedModel,
    item: EncodedItem,
    layers: Sequence[LayerKV],
    changed: Iterable[tuple[int, LayerKV]],
) -> Iterator[float]:
    """KL of the item's answer, nats a token, with one layer of its context changed at a time."""
    full, entering = tail_states(model, full_cache(layers), item)
    for i, layer in changed:
        cache = Cache(layers=[FullLayer(own) for own in (*layers[:i], layer, *layers[i + 1 :])])
        yield float(kl_nats(full, logits_from(model, i, entering[i], cache, item)).mean())


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
        items: calibration items; a pass from each layer on for every codec and item.
        codecs: by name, such as those of `presets`; a lossless one costs 0 and takes no pass.
        say: told after each item.
    """
    lossy = {n: c for n, c in codecs.items() if not c.keys == c.values == FullPrecision()}
    families: dict[str, list[Float[ndarray, "layer codec"]]] = {}
    for done, item in enumerate(items, 1):
        layers = read_document(model, torch.tensor([item.context_ids]))
        changed = (
            (i, read_back(layer, codec.keys, codec.values, codec.n_sink))
            for i, layer in enumerate(layers)
            for codec in lossy.values()
        )
        kl = list(kl_of_each(model, item, layers, changed))
        families.setdefault(item.family, []).append(np.reshape(kl, (len(layers), len(lossy))))
        if say is not None:
            say(f"{done} of {len(items)} items stored layer by layer")
    means = np.mean([np.mean(own, axis=0) for own in families.values()], axis=0)
    found = dict(zip(lossy, means.T, strict=True))
    return {name: found.get(name, np.zeros(len(means))) for name in codecs}
