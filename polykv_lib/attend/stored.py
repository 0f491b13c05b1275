"""What attention needs to know of a layer at rest, whatever its codecs."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from polykv_lib.kv import Rows


@dataclass(frozen=True, kw_only=True)
class Codes:
    """What is at rest, for a kernel that reads it itself.

    Numbers as they are, int8, or packed codes (quantize/packing.py).
    """

    planes: tuple[Tensor, ...]  # each [head, token, bytes], or [head, token, dim]
    # Of int8: what 1 stands for in each channel.
    scale: Float[Tensor, "#head one #dim"] | None = None
    # Of packed codes: what they stand for, in the basis of rows @ rotation; the factor of each
    # token, bytes or fp16, and what these are multiples of (quantize/base.py).
    levels: Float[Tensor, " level"] | None = None
    rotation: Float[Tensor, "dim dim"] | None = None
    norms: Float[Tensor, "head token"] | UInt8[Tensor, "head token"] | None = None
    unit: Float[Tensor, "*any"] | None = None
    # Harmonics over tokens, added to the decoded codes outside their basis: real and imaginary
    # amplitudes, and frequencies that all heads share.
    harmonics: Float[Tensor, "head three pair"] | None = None


@runtime_checkable
class Stored(Protocol):
    """Keys or values at rest: x_hat[t] = gain[t] * levels[t] @ B (see quantize/base.py)."""

    def levels(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "head token dim"]:
        """Decoded levels of tokens start..stop."""
        ...

    def gains(self, start: int, stop: int) -> Float[Tensor, "head token"] | None:
        """The fp32 factor of each token."""
        ...

    def codes(self) -> Codes | None:
        """The codes behind the levels; None: in a form that no kernel reads."""
        ...

    def to_levels(self, rows: Rows) -> Rows:
        """The rows times B^T."""
        ...

    def from_levels(self, rows: Rows) -> Rows:
        """The rows times B."""
        ...


@runtime_checkable
class Piece(Protocol):
    """Tokens that some KV heads hold, the same number for each."""

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads; None for all of the layer."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens held by each head."""
        ...

    @property
    def keys(self) -> Stored:
        """The keys, after RoPE."""
        ...

    @property
    def values(self) -> Stored:
        """The values."""
        ...
