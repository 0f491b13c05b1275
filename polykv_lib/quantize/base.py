"""The one contract of this package, and what every codec shares.

A codec stores x so that each token t reads back as

    x_hat[t] = gain[t] * levels[t] @ B

levels are small numbers decoded from codes, gain one number a token (or none), B a linear map along
head_dim (a diagonal of channel scales, a rotation, or the identity). Attention never needs x_hat:
q . x_hat[t] = gain[t] * (q @ B^T) . levels[t], and sum_t p_t x_hat[t] = (sum_t p_t gain[t]
levels[t]) @ B.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

BYTE_RANGE = 24  # powers of two that 8-bit norms span


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A tensor at rest: codes and scales. Read back by the codec that wrote it."""

    planes: tuple[Tensor, ...]  # codes, packed along dim; each plane is [..., token, bytes]
    scale: Tensor | None = None
    zero: Tensor | None = None
    unit: Tensor | None = None  # fp32: what fp16 scales are multiples of, or what bytes stand for
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the tensor that was stored

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by a name that is stable on disk."""
        named = {f"planes.{i}": plane for i, plane in enumerate(self.planes)}
        rest = {"scale": self.scale, "zero": self.zero, "unit": self.unit}
        return named | {name: t for name, t in rest.items() if t is not None}

    @property
    def nbytes(self) -> int:
        """Bytes really held: codes and scales, nothing assumed."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@runtime_checkable
class Quantizer(Protocol):
    """Maps keys or values to their stored form and back; attention reads the parts in between."""

    def quantize(self, x: Float[Tensor, "*batch token dim"]) -> Quantized:
        """The stored form of x."""
        ...

    def dequantize(self, q: Quantized) -> Float[Tensor, "*batch token dim"]:
        """The stored tensor read back, in the dtype that it had."""
        ...

    def levels(
        self, q: Quantized, start: int, stop: int, dtype: torch.dtype
    ) -> Float[Tensor, "*batch token dim"]:
        """Decoded levels of tokens start..stop."""
        ...

    def gains(self, q: Quantized, start: int, stop: int) -> Float[Tensor, "*batch token"] | None:
        """The fp32 factor of each token, or None where it is 1."""
        ...

    def to_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows times B^T: what a query becomes before it meets levels."""
        ...

    def from_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows times B: what a weighted sum of levels becomes afterwards."""
        ...


def encode(
    codec: Quantizer,
    x: Float[Tensor, "*batch token dim"],
    moments: Float[Tensor, "*batch dim dim"] | None,
) -> Quantized:
    """The stored form of keys; codecs that shape their errors get the queries' second moments."""
    return codec.quantize(x, moments) if is_shaped(codec) else codec.quantize(x)  # type: ignore[call-arg]


def is_shaped(codec: Quantizer) -> bool:
    """Whether the codec needs the queries' second moments (`quantize/shaping.py`)."""
    return getattr(codec, "shaped", False)


def decode(codec: Quantizer, q: Quantized) -> Float[Tensor, "*batch token dim"]:
    """x_hat = (gain * levels) @ B, computed in fp32 and returned in the stored tensor's dtype."""
    n_tokens = q.shape[-2]
    x = codec.levels(q, 0, n_tokens, torch.float32)
    gains = codec.gains(q, 0, n_tokens)
    if gains is not None:
        x = x * gains.unsqueeze(-1)
    return in_range(codec.from_levels(q, x), q.dtype)


def in_range(x: Float[Tensor, "*any"], dtype: torch.dtype) -> Float[Tensor, "*any"]:
    """Numbers in a dtype; what rounds past the largest fp16 number is that number, not infinity."""
    if dtype is torch.float16:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def to_half(x: Float[Tensor, "*any"]) -> tuple[Float[Tensor, "*any"], Float[Tensor, ""]]:
    """A pair (h, unit) with h fp16 and x ~ h * unit; unit is one power of two for the tensor.

    The largest |h| lies in [2^14, 2^15), so neither a tiny tensor underflows nor a large one
    overflows.
    """
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    exponent = torch.frexp(largest).exponent.clamp(min=-110)
    unit = torch.ldexp(torch.ones_like(largest), exponent - 15)
    return (x / unit).half(), unit


def to_byte(
    x: Float[Tensor, "*any"],
) -> tuple[UInt8[Tensor, "*any"], Float[Tensor, " two"]]:
    """A pair (code, unit) with x ~ largest * 2^((code - 255) step), unit = (largest, step).

    For numbers that are not negative. 0 has code 0; what is smaller than 2^-BYTE_RANGE of the
    largest is rounded up to that. A step is at most BYTE_RANGE / 254, 6.8 %.
    """
    largest = x.amax() if x.numel() else x.new_zeros(())
    depth = -(x / torch.where(largest == 0, 1.0, largest)).clamp(2.0**-BYTE_RANGE, 1).log2()
    depth = torch.where(x == 0, 0.0, depth)
    deepest = depth.amax() if x.numel() else x.new_zeros(())
    step = deepest / 254
    code = 255 - torch.round(depth / torch.where(step == 0, 1.0, step))
    return torch.where(x == 0, 0.0, code).to(torch.uint8), torch.stack((largest, step))


def from_byte(code: UInt8[Tensor, "*any"], unit: Float[Tensor, " two"]) -> Float[Tensor, "*any"]:
    """The numbers that `to_byte` stored."""
    largest, step = unit
    return torch.where(code == 0, 0.0, largest * torch.exp2((code.float() - 255) * step))


def check_input(x: object, codec: Quantizer) -> None:
    """Refuse what no codec can store, in one sentence."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{codec} got a {type(x).__name__}; pass a tensor [..., token, dim].")
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(
            f"{codec} got a {x.dtype} tensor of shape {list(x.shape)}; it stores floating-point "
            "tensors [..., token, dim]. Pass keys or values as the cache holds them."
        )


def check_moments(x: Tensor, moments: Tensor | None, codec: Quantizer) -> None:
    """Refuse a shaped codec without moments, moments of another shape, and moments for others."""
    wanted = [*x.shape[:-2], x.shape[-1], x.shape[-1]]
    if is_shaped(codec) != (moments is not None):
        raise ValueError(
            f"{codec} got {'no ' if moments is None else ''}second moments of queries; codecs of "
            "keys with shaped=True need them, others do not take them. The layers that "
            "`read_document` and `evict_document` return have them."
        )
    if moments is not None and list(moments.shape) != wanted:
        raise ValueError(
            f"{codec} got second moments of shape {list(moments.shape)} for keys of shape "
            f"{list(x.shape)}; it needs {wanted}."
        )


def all_finite(x: Float[Tensor, "*any"]) -> bool:
    """No infinity and no NaN. Extremes show both, many times faster than `isfinite` of each."""
    return not x.numel() or all(map(math.isfinite, torch.aminmax(x)))


def check_finite(extremes: Tensor, codec: Quantizer) -> None:
    """Refuse a tensor whose largest numbers, group by group, are infinite or NaN.

    Raises:
        ValueError: one such number would spoil every code that shares its scale.
    """
    if not all_finite(extremes):
        raise ValueError(
            f"{codec} got a tensor with infinite or NaN numbers, which have no code. If the model "
            "runs in float16, load it in bfloat16 or float32; or use FullPrecision, which stores "
            "any number."
        )


def check_codec(codec: object, name: str) -> None:
    """Refuse what is no codec.

    Raises:
        ValueError: names the argument and what was given.
    """
    if isinstance(codec, type) or not isinstance(codec, Quantizer):
        raise ValueError(
            f"{name}={codec!r}; pass a codec, such as pk.Int8() or pk.TurboQuant(bits=3). "
            "polykv_lib.presets.codec('polykv') gives both by name."
        )


@dataclass(frozen=True)
class FullPrecision:
    """Stores the tensor as it is: the baseline that every other codec is measured against.

    Infinite and NaN numbers are stored too; every other codec refuses them.
    """

    def quantize(self, x: Float[Tensor, "*batch token dim"]) -> Quantized:
        """A contiguous copy, at its own bits a number."""
        check_input(x, self)
        copy = x.detach().clone(memory_format=torch.contiguous_format)
        return Quantized(planes=(copy,), shape=tuple(x.shape), dtype=x.dtype)

    def dequantize(self, q: Quantized) -> Float[Tensor, "*batch token dim"]:
        """The tensor, bit for bit."""
        return q.planes[0]

    def levels(
        self, q: Quantized, start: int, stop: int, dtype: torch.dtype
    ) -> Float[Tensor, "*batch token dim"]:
        """Tokens start..stop."""
        return q.planes[0][..., start:stop, :].to(dtype)

    def gains(self, q: Quantized, start: int, stop: int) -> None:
        """None: levels are the values."""

    def to_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows themselves: B is the identity."""
        return rows

    def from_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows themselves: B is the identity."""
        return rows
