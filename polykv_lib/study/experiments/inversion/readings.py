"""A continuation after a document as it is and after changed ones, several in one batch.

Nothing of a batch depends on its other rows; together they keep the processor busier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from polykv_lib import hf
from polykv_lib.kv import LayerKV, stacked
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.study.estimate.work import AT_ONCE
from polykv_lib.study.experiments.inversion.attention_shape import AttentionShape, mean_shape
from polykv_lib.study.experiments.inversion.controls import Control


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A control with one seed."""

    control: Control
    seed: int
    watched: bool = False  # whether its attention is looked at

    def applied(self, layers: Sequence[LayerKV]) -> list[LayerKV]:
        """The document as it is read."""
        return self.control.apply(layers, self.seed)


class Reading(NamedTuple):
    """What a model expects after a document, and where it looked."""

    nll: Float[Tensor, " scored"]  # nats
    kl: float  # from the document as it is, nats a token
    shape: AttentionShape | None


def readings(
    model: Any, layers: Sequence[LayerKV], window: Int[Tensor, "1 window"], draws: Sequence[Draw]
) -> Iterator[Reading]:
    """A window after each draw of a document, in order; the first is what the others differ from.

    The window's first token is fed and not scored.
    """
    n_prefix, fed = layers[0].keys.shape[2], window[:, :-1]
    targets = window[0, 1:].to(model.device)
    full: Float[Tensor, "scored vocab"] | None = None
    for start in range(0, len(draws), AT_ONCE):
        some = draws[start : start + AT_ONCE]
        shapes: list[list[AttentionShape]] = [[] for _ in some]

        def see(_: int, layer: LayerKV, some: Any = some, shapes: Any = shapes) -> None:
            for i, draw in enumerate(some):
                if draw.watched:
                    shapes[i].append(AttentionShape.of(_row(layer, i), n_prefix))

        changed = zip(*(draw.applied(layers) for draw in some), strict=True)
        cache = hf.observed_cache([stacked(rows) for rows in changed], see)
        logits = hf.logits(model, cache, fed.expand(len(some), -1), n_prefix)
        full = logits[0].clone() if full is None else full
        for own, shape in zip(logits, shapes, strict=True):
            yield Reading(
                nll=token_nll(own, targets).cpu(),
                kl=kl_nats(full, own).mean().item(),
                shape=mean_shape(shape) if shape else None,
            )


def _row(layer: LayerKV, i: int) -> LayerKV:
    assert layer.queries is not None
    keys, values, queries = (x[i : i + 1] for x in (layer.keys, layer.values, layer.queries))
    return LayerKV(keys=keys, values=values, queries=queries, scale=layer.scale)
