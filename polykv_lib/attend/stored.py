"""What attention needs to know of a layer at rest, whatever its codecs."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.kv import Rows


@runtime_checkable
class Stored(Protocol):
    """Keys or values at rest: x_hat[t] = gain[t] * levels[t] @ B (see quantize/base.py)."""

    def levels(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "head token dim"]:
        """Decoded levels of tokens start..stop."""
        ...

    def gains(self, start: int, stop: int) -> Float[Tensor, "head token"] | None:
        """The fp32 factor of each token."""
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
