"""Orthogonal maps along head_dim, used to spread a vector evenly before rounding it."""

import math
from functools import cache
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

RotationName: TypeAlias = Literal["signed", "plain", "double", "none"]


@cache
def rotation(
    dim: int, name: RotationName, seed: int, device: torch.device
) -> Float[Tensor, "dim dim"]:
    """Orthogonal R [dim, dim] in fp32; a vector is rotated as v @ R and back as y @ R^T.

    plain   H                   the authors' code: no randomness, one Walsh function maps to a spike
    signed  D H                 D a diagonal of seeded random signs (QuIP#, TurboQuant)
    double  D H D' H            two rounds: also spreads one-hot vectors
    none    I

    A matrix product is faster than butterflies here up to dim 256, and serves every dim alike.
    """
    h = hadamard(dim)
    match name:
        case "none":
            r = torch.eye(dim, dtype=torch.float64)
        case "plain":
            r = h
        case "signed":
            r = random_signs(dim, seed)[:, None] * h
        case "double":
            first, second = random_signs(2 * dim, seed).chunk(2)
            r = first[:, None] * h.flip(1) @ (second[:, None] * h)
    return r.float().to(device)


def hadamard(dim: int) -> Float[Tensor, "dim dim"]:
    """Orthonormal Walsh-Hadamard matrix in fp64 (Sylvester order).

    Where dim is no power of two it is block-diagonal over dim's binary digits (80 = 64 + 16), so no
    byte is padded; `double` flips the channels between its rounds, which mixes the blocks.
    """
    blocks = [1 << b for b in reversed(range(dim.bit_length())) if dim >> b & 1]
    return torch.block_diag(*[_sylvester(b) / math.sqrt(b) for b in blocks])


def _sylvester(dim: int) -> Float[Tensor, "dim dim"]:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def random_signs(dim: int, seed: int) -> Float[Tensor, " dim"]:
    """Rademacher diagonal, the same on every machine for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (dim,), generator=generator).double() * 2 - 1
