"""Eight-bit symmetric integers with one scale a tensor, channel, token or block of 32."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.quantize import native
from polykv_lib.quantize.base import (
    Quantized,
    check_finite,
    check_input,
    decode,
    in_range,
    to_half,
)

BLOCK = 32  # numbers that share a scale in llama.cpp's q8_0


@dataclass(frozen=True)
class Int8:
    """round(x / scale), scale = max|x| / 127 over the group (PolyKV, arXiv:2604.24971, section 3).

    scale     one number for                        bits a number, d = head_dim, T tokens
    tensor    the whole layer (the paper's)         8 + 32 / all
    channel   a head's channel, over the tokens     8 + 32 / T          (default)
    token     a head's token                        8 + 16 / d
    block     32 neighbouring channels of a token   8.5                 (q8_0 of llama.cpp)

    Scales of tensor and channel are fp32, the others fp16 multiples of one power of two.
    """

    scale: Literal["tensor", "channel", "token", "block"] = "channel"

    def __post_init__(self) -> None:
        if self.scale not in ("tensor", "channel", "token", "block"):
            raise ValueError(
                f"Int8(scale={self.scale!r}); choose one of: tensor, channel, token, block."
            )

    def quantize(self, x: Float[Tensor, "*batch token dim"]) -> Quantized:
        """Codes of int8 [*batch, token, dim] and their scales."""
        check_input(x, self)
        grouped = self._grouped(x.detach())
        axes = {"tensor": tuple(range(grouped.dim())), "channel": (-2,)}.get(self.scale, (-1,))
        by_channel = plane = None
        across_tokens = self.scale in ("tensor", "channel")
        if across_tokens:
            grouped = grouped.float()
            by_channel = native.largest(grouped)
        largest = _largest(grouped if by_channel is None else by_channel, axes).float()
        check_finite(largest, self)
        scale, unit = largest / 127, None
        if self.scale in ("token", "block"):
            scale, unit = to_half(scale)
        divisor = scale.float() if unit is None else scale.float() * unit
        if across_tokens:
            plane = native.rounded(grouped, divisor)
        if plane is None:
            codes = grouped / torch.where(divisor == 0, 1.0, divisor)
            plane = codes.round_().clamp_(-127, 127).to(torch.int8).view(x.shape)
        return Quantized(
            planes=(plane,), scale=scale, unit=unit, shape=tuple(x.shape), dtype=x.dtype
        )

    def dequantize(self, q: Quantized) -> Float[Tensor, "*batch token dim"]:
        """The codes times their scale."""
        return decode(self, q)

    def levels(
        self, q: Quantized, start: int, stop: int, dtype: torch.dtype
    ) -> Float[Tensor, "*batch token dim"]:
        """The codes themselves (exact in bf16 and fp16); with scale="block", already scaled."""
        codes = q.planes[0][..., start:stop, :]
        if self.scale != "block":
            return codes.to(dtype)
        assert q.scale is not None
        assert q.unit is not None
        scale = q.scale[..., start:stop, :, :].float() * q.unit
        return in_range((self._grouped(codes.float()) * scale).view(codes.shape), dtype)

    def gains(self, q: Quantized, start: int, stop: int) -> Float[Tensor, "*batch token"] | None:
        """The scale of each token, with scale="token"."""
        if self.scale != "token":
            return None
        assert q.scale is not None
        assert q.unit is not None
        return q.scale[..., start:stop, 0].float() * q.unit

    def to_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows times the scales of tensor or channel, which fold into the query."""
        if self.scale not in ("tensor", "channel"):
            return rows
        assert q.scale is not None
        return rows * q.scale

    from_levels = to_levels  # a diagonal map is its own transpose

    def _grouped(self, x: Tensor) -> Tensor:
        if self.scale != "block":
            return x
        if x.shape[-1] % BLOCK:
            raise ValueError(
                f"Int8(scale='block') needs head_dim in multiples of {BLOCK}, got {x.shape[-1]}. "
                "Use scale='token' or scale='channel'."
            )
        return x.unflatten(-1, (-1, BLOCK))


def _largest(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The largest magnitude along the axes, which stay as ones; 0 of nothing."""
    if x.numel():
        return x.abs().amax(axes, keepdim=True)
    return x.sum(axes, keepdim=True)
