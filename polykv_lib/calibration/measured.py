"""What the passes over a model measured, item by item, and its means.

Axes: layer, head (KV heads), policy (candidates, in the order given), point (budgets on the error
curve, as fractions of the context).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from polykv_lib.evict import EvictionPolicy

Phase: TypeAlias = Literal["prefill", "decode"]
ARRAYS = ("entropy", "cosine", "error", "head_error", "nll", "kl")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One item. In every measurement one layer is evicted, in one phase, and all others are full.

    In the decode phase cosine, errors and entropy are those of the answer's steps; the first answer
    token is read before anything is evicted and counts in nll and kl.
    """

    item: str
    family: str
    n_tokens: int  # of the context
    full_nll: float  # nats an answer token over the full cache
    entropy: Float[ndarray, " layer"]  # nats, of the attention to all tokens
    cosine: Float[ndarray, "layer policy point"]  # of the layer's output
    error: Float[ndarray, "layer policy point"]  # relative, of the layer's output
    head_error: Float[ndarray, "layer head policy point"]  # one head evicted
    nll: Float[ndarray, "layer policy"] | None  # nats an answer token, at the target budget
    kl: Float[ndarray, "layer policy"] | None  # nats an answer token to the full cache's


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """All items, under the same candidates and budgets."""

    policies: tuple[EvictionPolicy, ...]
    fractions: tuple[float, ...]  # the points of the error curves, ascending, target among them
    target: float  # fraction of the context that a uniform plan would keep
    items: tuple[Measured, ...]
    phase: Phase = "prefill"

    def mean(self, name: str) -> Float[ndarray, "..."]:
        """Mean inside each family, then over the families, so that no family outweighs another.

        Raises:
            ValueError: what was asked for needs single-layer passes, and none were made.
        """
        families: dict[str, list[Any]] = {}
        for item in self.items:
            families.setdefault(item.family, []).append(getattr(item, name))
        if any(value is None for values in families.values() for value in values):
            raise ValueError(
                f"{name!r} was not measured; it needs a pass over the model for each layer and "
                "policy. Measure with single_layer=True."
            )
        return np.asarray(np.mean([np.mean(v, axis=0) for v in families.values()], axis=0))

    @property
    def error_at_target(self) -> Float[ndarray, "layer policy"]:
        """Mean relative output error at the target budget."""
        return self.mean("error")[..., self.fractions.index(self.target)]


def to_json(items: Sequence[Measured]) -> str:
    """The items as JSON; numbers survive to the last bit."""
    return json.dumps([asdict(item) for item in items], default=lambda array: array.tolist())


def from_json(text: str) -> tuple[Measured, ...]:
    """The items that `to_json` wrote."""
    return tuple(
        Measured(**{k: _array(v) if k in ARRAYS else v for k, v in entry.items()})
        for entry in json.loads(text)
    )


def _array(value: Any) -> Any:
    return None if value is None else np.array(value)
