"""What may happen to a document's keys and values: codecs, and controls that are none.

A control takes one property of a codec and leaves the rest away: noise of the same energy without
its shape, its mean shrinkage without its noise, a softmax temperature without either. Controls are
applied to the tensors of an ordinary cache, so none of them can be stored in a pool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.kv import LayerKV
from polykv_lib.quantize import FullPrecision, Int8, Quantizer, TurboQuant

Side = Float[Tensor, "batch head token dim"]


@runtime_checkable
class Change(Protocol):
    """Keys or values of one layer -> what is read in their place."""

    def __call__(self, x: Side, seed: int, layer: int) -> Side:
        """The changed tensor; equal seeds and layers give equal tensors."""
        ...


@dataclass(frozen=True)
class RoundTrip:
    """Stored by a codec and read back; a seeded codec takes the seed of the run."""

    codec: Quantizer

    def __call__(self, x: Side, seed: int, layer: int) -> Side:
        codec = self.codec
        if isinstance(codec, TurboQuant):
            codec = replace(codec, seed=seed)
        return codec.dequantize(codec.quantize(x))


@dataclass(frozen=True)
class Gaussian:
    """x + e, e an isotropic Gaussian direction with the norm that the codec's error has."""

    like: Quantizer

    def __call__(self, x: Side, seed: int, layer: int) -> Side:
        error = RoundTrip(self.like)(x, seed, layer) - x
        generator = torch.Generator().manual_seed(1_000 * seed + layer)
        noise = torch.randn(x.shape, generator=generator).to(x)
        return x + noise * (error.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))


@dataclass(frozen=True)
class Shrunk:
    """c x, c = sum <x, x_hat> / sum <x, x> over the layer: what is left of x in the codec's x_hat.

    A Lloyd-Max level is the mean of its cell, so x_hat = c x + r with c below 1 and r nearly
    orthogonal to x.
    """

    like: Quantizer

    def __call__(self, x: Side, seed: int, layer: int) -> Side:
        stored = self.like.dequantize(self.like.quantize(x))
        return x * ((x * stored).sum() / x.square().sum())


@dataclass(frozen=True)
class Temperature:
    """Keys over T: the softmax over the document at temperature T, above 1 flatter."""

    t: float

    def __call__(self, x: Side, seed: int, layer: int) -> Side:
        return x / self.t


@dataclass(frozen=True, kw_only=True)
class Control:
    """A change of keys and one of values, from token `n_sink` on."""

    label: str
    keys: Change = RoundTrip(FullPrecision())
    values: Change = RoundTrip(FullPrecision())
    n_sink: int = 0
    seeded: bool = False  # whether a seed changes anything

    def apply(self, layers: Sequence[LayerKV], seed: int) -> list[LayerKV]:
        """The layers as they are read; the originals stay."""

        def changed(x: Side, change: Change, layer: int) -> Side:
            sinks, rest = x[:, :, : self.n_sink], x[:, :, self.n_sink :]
            return torch.cat([sinks, change(rest, seed, layer)], dim=2)

        return [
            LayerKV(keys=changed(kv.keys, self.keys, i), values=changed(kv.values, self.values, i))
            for i, kv in enumerate(layers)
        ]


_KEYS, _VALUES = RoundTrip(Int8("tensor")), RoundTrip(TurboQuant(3))
PAPER: Final = "paper"
CONTROLS: Final[dict[str, Callable[[], Control]]] = {
    # The published codec with the signs of a seed, so that its rounding can be drawn again, and as
    # its authors run it, without signs.
    PAPER: lambda: Control(label="paper's codec", keys=_KEYS, values=_VALUES, seeded=True),
    "paper-plain": lambda: Control(
        label="the same without signs", keys=_KEYS, values=RoundTrip(TurboQuant(3, "plain"))
    ),
    "paper-sinks": lambda: Control(
        label="paper's codec, 4 sinks kept", keys=_KEYS, values=_VALUES, n_sink=4, seeded=True
    ),
    "k-only": lambda: Control(label="keys only", keys=_KEYS),
    "v-only": lambda: Control(label="values only", values=_VALUES, seeded=True),
    "v-matched": lambda: Control(
        label="values, norms matched",
        values=RoundTrip(TurboQuant(3, match_norm=True)),
        seeded=True,
    ),
    "v-gaussian": lambda: Control(
        label="values, Gaussian noise", values=Gaussian(TurboQuant(3)), seeded=True
    ),
    "v-shrunk": lambda: Control(label="values, shrinkage alone", values=Shrunk(TurboQuant(3))),
    **{
        f"temperature-{t}": partial(Control, label=f"temperature {t}", keys=Temperature(t))
        for t in (0.9, 0.95, 1.05, 1.1)
    },
}


def control(name: str) -> Control:
    """The control that a notebook parameter names."""
    if name not in CONTROLS:
        raise ValueError(f"no control {name!r}; choose from: {', '.join(CONTROLS)}.")
    return CONTROLS[name]()
