"""Chance that is the same on every machine, whatever was drawn before."""

from jaxtyping import Float, Int
from torch import Tensor

MASK = 0xFFFFFFFF


def uniform(positions: Int[Tensor, "*shape"], seed: int) -> Float[Tensor, "*shape"]:
    """A number in [0, 1) for each position, in double precision."""
    return mixed(positions.long() * 2654435761 + seed * 40503 + 1).double() / 2**32


def mixed(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Whole numbers of 32 bits that look unrelated wherever the given ones differ."""
    x = x & MASK
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & MASK
    return x ^ (x >> 16)
