"""Rotate, then round every channel with one Gaussian codebook (TurboQuant, arXiv:2504.19874)."""

import math
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.quantize import native
from polykv_lib.quantize.base import (
    Quantized,
    check_finite,
    check_input,
    check_moments,
    decode,
    from_byte,
    to_byte,
    to_half,
)
from polykv_lib.quantize.codebooks import nearest_code, stored_levels
from polykv_lib.quantize.packing import (
    Planes,
    entries,
    look_up,
    stored_words,
    to_words,
    word_table,
)
from polykv_lib.quantize.rotations import RotationName, rotation
from polykv_lib.quantize.shaping import Moments, shaped_codes, weighted

BLOCK = 1 << 17  # numbers encoded at a time: scratch that stays in a core's cache
SHAPED_BLOCK = 1 << 19  # the same for shaped codes, which take many steps a block
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class TurboQuant:
    """x_hat = ||x|| / sqrt(d) * LEVELS[codes] @ R^T, the MSE variant (TurboQuant, Algorithm 1).

    For a unit vector u of dimension d the channels of sqrt(d) u @ R are nearly N(0, 1), so one
    Lloyd-Max codebook serves every token. Stored: bits + 16 / d bits a number (packed codes and one
    fp16 norm a vector). The paper's residual QJL bits and outlier channels are not used.

    Args:
        bits: 1 to 4.
        rotation: "signed" (seeded signs, then Hadamard), "plain" (PolyKV's code: Hadamard alone),
            "double" (two signed rounds) or "none".
        seed: of the signs.
        match_norm: store ||x|| / ||LEVELS[codes]|| instead, so that x_hat has the norm of x.
        norms: "half", fp16, or "byte", 8-bit steps of the logarithm: 8 / d bits a number instead of
            16 / d, and norms to 3 % at worst.
        shaped: of keys: choose codes for small errors of scores instead of small errors
            (`quantize/shaping.py`); the same bits, and norms fitted to scores.
    """

    bits: int = 3
    rotation: RotationName = "signed"
    seed: int = 0
    match_norm: bool = False
    norms: Literal["half", "byte"] = "half"
    shaped: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bits, Integral) or self.bits not in (1, 2, 3, 4):
            raise ValueError(f"TurboQuant(bits={self.bits!r}); bits must be 1, 2, 3 or 4.")
        if self.rotation not in ("signed", "plain", "double", "none"):
            raise ValueError(
                f"TurboQuant(rotation={self.rotation!r}); "
                "choose one of: signed, plain, double, none."
            )
        if self.norms not in ("half", "byte"):
            raise ValueError(f"TurboQuant(norms={self.norms!r}); choose one of: half, byte.")

    def quantize(
        self, x: Float[Tensor, "*batch token dim"], moments: Tensor | None = None
    ) -> Quantized:
        """Packed codes [*batch, token, dim * bits / 8] and fp16 norms [*batch, token].

        Args:
            x: keys or values.
            moments: with shaped=True E[q q^T] of the queries, [*batch, dim, dim].

        Raises:
            ValueError: shaped without moments, or moments without shaped, or of another shape.
        """
        check_input(x, self)
        check_moments(x, moments, self)
        found = None
        if moments is None:
            rotation = self.basis(x.device, x.shape[-1])
            found = native.turbo(x.detach(), rotation, self.bits, self.match_norm)
        planes, length = found or self._encode_blocks(x.detach(), moments)
        scale, unit = (to_half if self.norms == "half" else to_byte)(length)
        return Quantized(
            planes=planes,
            scale=scale,
            unit=unit,
            shape=tuple(x.shape),
            dtype=x.dtype,
        )

    def dequantize(self, q: Quantized) -> Float[Tensor, "*batch token dim"]:
        """The decoded levels times their norm, rotated back."""
        return decode(self, q)

    def levels(
        self, q: Quantized, start: int, stop: int, dtype: torch.dtype
    ) -> Float[Tensor, "*batch token dim"]:
        """LEVELS[codes], in the rotated basis; exact in bf16, fp16 and fp32."""
        planes = tuple(plane[..., start:stop, :] for plane in q.planes)
        return look_up(planes, self.bits, _table(self.bits, dtype, planes[0].device))

    def gains(self, q: Quantized, start: int, stop: int) -> Float[Tensor, "*batch token"]:
        """The stored norm of each vector, over sqrt(d)."""
        assert q.scale is not None
        assert q.unit is not None
        if self.norms == "byte":
            return from_byte(q.scale[..., start:stop], q.unit)
        return q.scale[..., start:stop].float() * q.unit

    def to_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows, rotated: rows @ R."""
        return rows @ self.basis(rows.device, q.shape[-1]).to(rows.dtype)

    def from_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows, rotated back: rows @ R^T."""
        return rows @ self.basis(rows.device, q.shape[-1]).to(rows.dtype).mT

    def _encode_blocks(
        self, x: Float[Tensor, "*batch token dim"], moments: Tensor | None
    ) -> tuple[Planes, Tensor]:
        """Packed codes and lengths, block by block."""
        m = None if moments is None else weighted(moments, self.basis(x.device, x.shape[-1]))
        size = SHAPED_BLOCK if self.shaped else BLOCK
        if x.device.type != "cpu":
            size = x.numel()
        step = max(1, size * x.shape[-2] // max(1, x.numel()))
        planes, lengths = zip(*(self._encode(b, m) for b in x.split(step, dim=-2)), strict=True)
        each = zip(*planes, strict=True)
        return tuple(torch.cat(plane, dim=-2) for plane in each), torch.cat(lengths, dim=-1)

    def _encode(
        self, x: Float[Tensor, "*batch token dim"], m: Moments | None
    ) -> tuple[Planes, Tensor]:
        """Packed codes of a block of tokens, and the number that multiplies each one's levels."""
        dim = x.shape[-1]
        rows = x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        # Two steps, so that neither a tiny nor a huge vector leaves the range of fp32 when squared.
        largest = rows.abs().amax(-1, keepdim=True)
        check_finite(largest, self)
        largest.clamp_min_(TINY)
        norm = torch.linalg.vector_norm(rows.div_(largest), dim=-1, keepdim=True).clamp_min_(TINY)
        z = rows.div_(norm) @ (self.basis(x.device, dim) * math.sqrt(dim))
        length = (largest * norm)[..., 0]
        if m is None:
            codes, fit = nearest_code(z, self.bits), None
        else:
            codes, fit = shaped_codes(z, m, self.bits)
        words = to_words(codes, self.bits)
        if fit is not None:
            length *= fit / math.sqrt(dim)
        elif self.match_norm:
            length /= entries(words, _squares(self.bits, x.device)).sum(-1).sqrt_()
        else:
            length /= math.sqrt(dim)
        return stored_words(words, self.bits), length

    def basis(self, device: torch.device, dim: int) -> Float[Tensor, "dim dim"]:
        """R: levels are those of x @ R."""
        return rotation(dim, self.rotation, self.seed, device)


@cache
def _table(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return word_table(stored_levels(bits).to(device), bits, dtype)


@cache
def _squares(bits: int, device: torch.device) -> Float[Tensor, "word one"]:
    """The squared norm of the levels behind every packed word."""
    return _table(bits, torch.float32, device).square().sum(-1, keepdim=True)
