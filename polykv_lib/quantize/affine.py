"""Unsigned integers with a scale and a zero point a group: the family of KIVI."""

from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.quantize.base import (
    Quantized,
    check_finite,
    check_input,
    decode,
    in_range,
    to_half,
)
from polykv_lib.quantize.packing import pack, unpack


@dataclass(frozen=True)
class Affine:
    """x_hat = code * scale + zero, scale = (max - min) / (2^bits - 1), zero = min.

    The quantizer of KIVI (arXiv:2402.02750).

    Args:
        bits: 2 to 8.
        group: numbers that share a scale and a zero.
        axis: "token": `group` tokens of one channel (KIVI's keys); "channel": `group` channels of
            one token (KIVI's values).

    Stored: bits + 32 / group bits a number (fp16 scale and zero). A last, shorter group has a scale
    of its own; KIVI keeps such a remainder in full precision instead.
    """

    bits: int
    group: int = 32
    axis: Literal["token", "channel"] = "channel"

    def __post_init__(self) -> None:
        whole = isinstance(self.bits, Integral) and isinstance(self.group, Integral)
        known = self.axis in ("token", "channel")
        if not (whole and known and 2 <= self.bits <= 8 and self.group >= 1):
            raise ValueError(
                f"{self}: bits must be 2 to 8 and group at least 1, whole numbers, and axis "
                "'token' or 'channel'."
            )

    def quantize(self, x: Float[Tensor, "*batch token dim"]) -> Quantized:
        """Packed codes [*batch, token, dim * bits / 8] and a scale and a zero a group."""
        check_input(x, self)
        x32 = x.detach().float()
        low, high = self._extremes(x32)
        check_finite(torch.stack((low, high)), self)
        both, unit = to_half(torch.stack(((high - low) / (2**self.bits - 1), low)))
        scale, zero = both
        step = self._spread(scale.float() * unit, x32)
        offset = self._spread(zero.float() * unit, x32)
        codes = torch.round((x32 - offset) / torch.where(step == 0, 1.0, step))
        return Quantized(
            planes=pack(codes.clamp(0, 2**self.bits - 1).to(torch.uint8), self.bits),
            scale=scale.clone(),
            zero=zero.clone(),
            unit=unit,
            shape=tuple(x.shape),
            dtype=x.dtype,
        )

    def dequantize(self, q: Quantized) -> Float[Tensor, "*batch token dim"]:
        """The codes times their scale, plus their zero."""
        return decode(self, q)

    def levels(
        self, q: Quantized, start: int, stop: int, dtype: torch.dtype
    ) -> Float[Tensor, "*batch token dim"]:
        """Tokens start..stop, decoded."""
        assert q.scale is not None
        assert q.zero is not None
        assert q.unit is not None
        x = unpack(tuple(p[..., start:stop, :] for p in q.planes), self.bits).float()
        step, offset = q.scale.float() * q.unit, q.zero.float() * q.unit
        if self.axis == "channel":
            step, offset = step[..., start:stop, :], offset[..., start:stop, :]
        first = start if self.axis == "token" else 0
        # Groups of full length become an axis of their own, so their numbers need not be copied.
        n_groups = 0 if first % self.group else x.shape[self._axis] // self.group
        cut = n_groups * self.group
        if n_groups:
            grouped = x.narrow(self._axis, 0, cut).unflatten(self._axis, (n_groups, self.group))
            at = [
                s.narrow(self._axis, first // self.group, n_groups).unsqueeze(self._axis)
                for s in (step, offset)
            ]
            grouped.mul_(at[0]).add_(at[1])
        rest = x.narrow(self._axis, cut, x.shape[self._axis] - cut)
        rest.mul_(self._spread(step, rest, first + cut)).add_(
            self._spread(offset, rest, first + cut)
        )
        return in_range(x, dtype)

    def gains(self, q: Quantized, start: int, stop: int) -> None:
        """None: levels are the values."""

    def to_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows themselves: B is the identity."""
        return rows

    from_levels = to_levels

    @property
    def _axis(self) -> int:
        return -2 if self.axis == "token" else -1

    def _extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest number of each group, groups along the axis."""
        groups = x.split(self.group, dim=self._axis) if x.numel() else ()
        if not groups:
            shape = list(x.shape)
            shape[self._axis] = -(-shape[self._axis] // self.group)
            return x.new_zeros(shape), x.new_zeros(shape)
        low = torch.cat([g.amin(self._axis, keepdim=True) for g in groups], dim=self._axis)
        high = torch.cat([g.amax(self._axis, keepdim=True) for g in groups], dim=self._axis)
        return low, high

    def _spread(self, per_group: Tensor, like: Tensor, first: int = 0) -> Tensor:
        """A group's number at each of its elements; `first` is where `like` begins on the axis."""
        index = torch.arange(first, first + like.shape[self._axis], device=like.device)
        return per_group.index_select(self._axis, index // self.group)
