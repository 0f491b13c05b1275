"""How the attention of scored tokens is spread: its entropy, and how much of it falls where."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch

from polykv_lib.evict.attention import window_weights
from polykv_lib.kv import LayerKV

SINKS = 4  # first tokens of the document
ROWS = 32  # last queries that are looked at: the spread changes little from one to the next


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Means over query heads and queries of one layer (or of all)."""

    entropy: float  # nats, over everything a query sees
    sink_mass: float  # share of the attention on the document's first tokens
    document_mass: float  # share on the document

    @classmethod
    def of(cls, layer: LayerKV, n_document: int) -> "AttentionShape":
        """Of a layer that its attention has been observed on, the document first in its keys."""
        assert layer.queries is not None
        window = min(ROWS, layer.queries.shape[2])
        weights = window_weights(layer.queries, layer.keys, layer.softmax_scale, window)
        return cls(
            entropy=torch.special.entr(weights).sum(-1).mean().item(),
            sink_mass=weights[..., : min(SINKS, n_document)].sum(-1).mean().item(),
            document_mass=weights[..., :n_document].sum(-1).mean().item(),
        )


def mean_shape(shapes: Sequence[AttentionShape]) -> AttentionShape:
    """The mean over layers."""
    entropy, sink_mass, document_mass = np.mean([astuple(s) for s in shapes], axis=0).tolist()
    return AttentionShape(entropy=entropy, sink_mass=sink_mass, document_mass=document_mass)
