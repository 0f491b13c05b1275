"""What a layer of the pool is made of: tokens that some heads hold under one pair of codecs."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polykv_lib.attend.stored import Codes
from polykv_lib.kv import Rows
from polykv_lib.quantize import (
    Affine,
    FullPrecision,
    HarmonicTurboQuant,
    Int8,
    Quantized,
    Quantizer,
    TurboQuant,
)
from polykv_lib.quantize.codebooks import stored_levels

CODECS: Final[dict[str, type[Quantizer]]] = {
    "FullPrecision": FullPrecision,
    "Int8": Int8,
    "TurboQuant": TurboQuant,
    "Affine": Affine,
    "HarmonicTurboQuant": HarmonicTurboQuant,
}


class PoolError(ValueError):
    """A pool that can not be built, opened or read; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Keys or values at rest, bound to the codec that reads them (`attend.Stored`)."""

    codec: Quantizer
    data: Quantized

    def levels(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "head token dim"]:
        """Decoded levels of tokens start..stop."""
        return self.codec.levels(self.data, start, stop, dtype)

    def gains(self, start: int, stop: int) -> Float[Tensor, "head token"] | None:
        """The fp32 factor of each token."""
        return self.codec.gains(self.data, start, stop)

    def codes(self) -> Codes | None:
        """The codes behind the levels, of the codecs that the native kernel reads."""
        match self.codec:
            case Int8(scale="tensor" | "channel"):
                return Codes(self.data.planes)
            case TurboQuant(bits=bits):
                return Codes(self.data.planes, stored_levels(bits))
        return None

    def to_levels(self, rows: Rows) -> Rows:
        """What a query becomes before it meets levels."""
        return self.codec.to_levels(self.data, rows)

    def from_levels(self, rows: Rows) -> Rows:
        """What a weighted sum of levels becomes afterwards."""
        return self.codec.from_levels(self.data, rows)

    def dense(self) -> Float[Tensor, "head token dim"]:
        """Everything dequantised."""
        return self.codec.dequantize(self.data)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens held by a set of KV heads, the same number for each (`attend.Piece`)."""

    heads: tuple[int, ...] | None  # None: all heads of the layer
    keys: Stored
    values: Stored
    positions: Int[Tensor, "head token"] | None = None  # None: consecutive tokens

    @property
    def n_tokens(self) -> int:
        """Tokens held by each head."""
        return self.keys.data.shape[-2]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by a name that is stable on disk."""
        named = {f"keys.{name}": t for name, t in self.keys.data.tensors.items()}
        named |= {f"values.{name}": t for name, t in self.values.data.tensors.items()}
        return named if self.positions is None else named | {"positions": self.positions}

    def to(self, device: torch.device) -> "Piece":
        """The piece with its tensors on a device."""
        if all(t.device == device for t in self.tensors.values()):
            return self
        return restore(describe(self), {name: t.to(device) for name, t in self.tensors.items()})


def describe(piece: Piece) -> dict[str, Any]:
    """All of a piece that is not a tensor, as JSON."""
    sides = {"keys": piece.keys, "values": piece.values}
    return {"heads": piece.heads} | {name: _describe_side(side) for name, side in sides.items()}


def _describe_side(side: Stored) -> dict[str, Any]:
    return {
        "codec": {"type": type(side.codec).__name__, **asdict(side.codec)},  # type: ignore[call-overload]
        "shape": side.data.shape,
        "dtype": str(side.data.dtype).removeprefix("torch."),
    }


def restore(description: dict[str, Any], tensors: dict[str, Tensor]) -> Piece:
    """The piece that `describe` described, over tensors named as `Piece.tensors` names them."""
    heads = description["heads"]
    return Piece(
        heads=None if heads is None else tuple(heads),
        keys=_restore_side(description["keys"], tensors, "keys."),
        values=_restore_side(description["values"], tensors, "values."),
        positions=tensors.get("positions"),
    )


def _restore_side(description: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> Stored:
    codec = dict(description["codec"])
    own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    planes = tuple(own[name] for name in sorted(own) if name.startswith("planes."))
    data = Quantized(
        planes=planes,
        scale=own.get("scale"),
        zero=own.get("zero"),
        unit=own.get("unit"),
        shape=tuple(description["shape"]),
        dtype=getattr(torch, description["dtype"]),
    )
    return Stored(codec=CODECS[codec.pop("type")](**codec), data=data)
