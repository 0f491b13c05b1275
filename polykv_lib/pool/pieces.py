"""What a layer of the pool is made of: tokens that some heads hold under one pair of codecs."""

from collections.abc import Sequence
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
        codec, data = self.codec, self.data
        match codec:
            case Int8(scale="tensor" | "channel"):
                return Codes(planes=data.planes, scale=data.scale)
            case TurboQuant() | HarmonicTurboQuant():
                turbo = codec.rest() if isinstance(codec, HarmonicTurboQuant) else codec
                return Codes(
                    planes=data.planes,
                    levels=stored_levels(turbo.bits),
                    rotation=turbo.basis(data.planes[0].device, data.shape[-1]),
                    norms=data.scale,
                    unit=data.unit,
                    harmonics=data.zero,
                )
            case FullPrecision():
                return Codes(planes=data.planes)
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
    where: Tensor | None = None  # of the document's tokens (`located`); None: consecutive ones

    @property
    def n_tokens(self) -> int:
        """Tokens held by each head."""
        return self.keys.data.shape[-2]

    @property
    def positions(self) -> Int[Tensor, "head token"] | None:
        """The tokens' places in the document, ascending; None: consecutive tokens."""
        if self.where is None or self.where.dtype != torch.uint8:
            return self.where
        bits = self.where[..., None] >> torch.arange(8, device=self.where.device) & 1
        return bits.flatten(1).nonzero()[:, 1].view(-1, self.n_tokens).to(torch.int32)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by a name that is stable on disk."""
        named = {f"keys.{name}": t for name, t in self.keys.data.tensors.items()}
        named |= {f"values.{name}": t for name, t in self.values.data.tensors.items()}
        return named if self.where is None else named | {"positions": self.where}

    def to(self, device: torch.device) -> "Piece":
        """The piece with its tensors on a device."""
        if all(t.device == device for t in self.tensors.values()):
            return self
        return restore(describe(self), {name: t.to(device) for name, t in self.tensors.items()})


def located(positions: Int[Tensor, "head token"], n_tokens: int) -> Tensor:
    """Ascending positions at rest, in the fewer bytes: int32 numbers, or a bit for each token.

    Bit i of byte j, from the lowest, is token 8 j + i: uint8 [head, n_tokens / 8, rounded up].
    """
    n_heads, n_kept = positions.shape
    n_bytes = -(-n_tokens // 8)
    if positions_nbytes(n_kept, n_tokens) == 4 * n_kept:
        return positions.to(torch.int32)
    bits = torch.zeros(n_heads, 8 * n_bytes, dtype=torch.int64, device=positions.device)
    bits.scatter_(1, positions.long(), 1)
    weights = 1 << torch.arange(8, device=positions.device)
    return (bits.view(n_heads, n_bytes, 8) * weights).sum(-1).to(torch.uint8)


def positions_nbytes(n_kept: int, n_tokens: int) -> int:
    """Bytes that `located` takes for a head that keeps so many of a document's tokens."""
    return min(4 * n_kept, -(-n_tokens // 8))


def dense(pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Dequantised keys and values [head, token, dim] of pieces of all heads, as they were written.

    Tokens of pieces without positions come first.
    """
    keys, values = (
        torch.cat([getattr(piece, side).dense() for piece in pieces], dim=-2)
        for side in ("keys", "values")
    )
    if all(piece.where is None for piece in pieces):
        return keys, values
    order = torch.cat([_places(piece, keys.shape[0]) for piece in pieces], dim=-1).argsort(-1)
    index = order[..., None].expand_as(keys)
    return keys.gather(1, index), values.gather(1, index)


def _places(piece: Piece, n_heads: int) -> Int[Tensor, "head token"]:
    positions = piece.positions
    if positions is None:
        device = piece.keys.data.planes[0].device
        return torch.arange(piece.n_tokens, device=device).expand(n_heads, -1)
    return positions.long()


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
        where=tensors.get("positions"),
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
