"""Scalar codebooks: the sorted levels that a number may be rounded to."""

from functools import cache

import numpy as np
import torch
from jaxtyping import Float, UInt8
from scipy.special import ndtr, ndtri
from torch import Tensor


@cache
def lloyd_max_levels(bits: int) -> tuple[float, ...]:
    r"""The 2**bits levels that minimise E[(z - Q(z))^2] for z ~ N(0, 1).

    Lloyd's two conditions (Lloyd 1982, Max 1960), iterated to a fixed point:
        t_i = (c_i + c_{i+1}) / 2                     edges half-way between levels
        c_i = E[z | t_{i-1} < z < t_i]                levels at the mean of their cell
    """
    levels = ndtri((np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(5_000):
        edges = np.concatenate(([-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]))
        density = np.exp(-(edges**2) / 2) / np.sqrt(2 * np.pi)
        levels = -np.diff(density) / np.diff(ndtr(edges))
    return tuple(levels.tolist())


@cache
def stored_levels(bits: int) -> Float[Tensor, " level"]:
    """Lloyd-Max levels rounded to bfloat16, so that they are exact in bf16, fp16 and fp32 alike."""
    return torch.tensor(lloyd_max_levels(bits)).bfloat16().float()


@cache
def stored_edges(bits: int) -> tuple[float, ...]:
    """The numbers half-way between stored levels, exact in fp32."""
    levels = stored_levels(bits)
    return tuple(((levels[1:] + levels[:-1]) / 2).tolist())


def nearest_code(x: Float[Tensor, "*shape"], bits: int) -> UInt8[Tensor, "*shape"]:
    """Index of the stored level nearest to each number; half-way, of the lower one.

    One comparison an edge, summed: several times faster than a search. The sums are kept in x's
    dtype and become bytes by way of int8, for which torch's CPU kernels are the fastest.
    """
    first, *others = stored_edges(bits)
    codes, above = torch.gt(x, first, out=torch.empty_like(x)), torch.empty_like(x)
    for edge in others:
        codes += torch.gt(x, edge, out=above)
    return codes.to(torch.int8).view(torch.uint8)
