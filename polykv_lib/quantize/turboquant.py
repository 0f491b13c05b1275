"""Rotate, then round every channel with one Gaussian codebook (TurboQuant, arXiv:2504.19874)."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.quantize.base import (
    Quantized,
    check_finite,
    check_input,
    decode,
    from_byte,
    to_byte,
    to_half,
)
from polykv_lib.quantize.codebooks import nearest_code, stored_levels
from polykv_lib.quantize.packing import look_up, pack, word_table
from polykv_lib.quantize.rotations import RotationName, rotation


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
    """

    bits: int = 3
    rotation: RotationName = "signed"
    seed: int = 0
    match_norm: bool = False
    norms: Literal["half", "byte"] = "half"

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 3, 4):
            raise ValueError(f"TurboQuant(bits={self.bits}); bits must be 1, 2, 3 or 4.")
        if self.rotation not in ("signed", "plain", "double", "none"):
            raise ValueError(
                f"TurboQuant(rotation={self.rotation!r}); "
                "choose one of: signed, plain, double, none."
            )
        if self.norms not in ("half", "byte"):
            raise ValueError(f"TurboQuant(norms={self.norms!r}); choose one of: half, byte.")

    def quantize(self, x: Float[Tensor, "*batch token dim"]) -> Quantized:
        """Packed codes [*batch, token, dim * bits / 8] and fp16 norms [*batch, token]."""
        check_input(x, self)
        x32 = x.detach().float().contiguous()
        dim = x32.shape[-1]
        # Two steps, so that neither a tiny nor a huge vector leaves the range of fp32 when squared.
        largest = x32.abs().amax(-1, keepdim=True)
        check_finite(largest, self)
        x32 = x32 / torch.where(largest == 0, 1.0, largest)
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        unit_vectors = x32 / torch.where(norm == 0, 1.0, norm)
        z = unit_vectors @ self._rotation(x.device, dim) * math.sqrt(dim)
        levels = stored_levels(self.bits)
        codes = nearest_code(z, levels)
        length = largest * norm
        if self.match_norm:
            decoded = levels.to(x.device)[codes.long()]
            length = length / torch.linalg.vector_norm(decoded, dim=-1, keepdim=True)
        else:
            length = length / math.sqrt(dim)
        scale, unit = (to_half if self.norms == "half" else to_byte)(length[..., 0])
        return Quantized(
            planes=pack(codes, self.bits),
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
        return rows @ self._rotation(rows.device, q.shape[-1]).to(rows.dtype)

    def from_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows, rotated back: rows @ R^T."""
        return rows @ self._rotation(rows.device, q.shape[-1]).to(rows.dtype).mT

    def _rotation(self, device: torch.device, dim: int) -> Float[Tensor, "dim dim"]:
        return rotation(dim, self.rotation, self.seed, device)


@cache
def _table(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return word_table(stored_levels(bits).to(device), bits, dtype)
