"""Rounding errors of keys, steered to where queries do not look.

An error e of a key changes a score by q . e, so what counts is E[(q . e)^2] = e M e^T with
M = E[q q^T], not |e|^2. With M = L D L^T, L unit lower triangular,

    e M e^T = sum_i D_i (e_i + sum_{j > i} L_ji e_j)^2

so channels are rounded last to first, and each one's error is fed into the channels still to come,
which round x_i + sum_{j > i} L_ji e_j (noise shaping; for weights it is LDLQ, arXiv:2307.13304).
Only the choice of codes changes: nothing more is stored, and reading is the same.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from polykv_lib.quantize import native
from polykv_lib.quantize.codebooks import nearest_code, stored_levels

RIDGE = 0.1  # added to M, of its mean diagonal: few queries say little about rare directions
GROUP = 16  # channels rounded between two matrix products

Moments = Float[Tensor, "*batch dim dim"]


def second_moments(
    queries: Float[Tensor, "batch q_head query dim"], n_heads: int
) -> Float[Tensor, "batch head dim dim"]:
    """E[q q^T] over the queries (after RoPE) of the query heads that read each KV head."""
    rows = queries.float().unflatten(1, (n_heads, -1)).flatten(2, 3)
    return rows.mT @ rows / max(1, rows.shape[2])


def weighted(moments: Moments, rotation: Float[Tensor, "dim dim"]) -> Moments:
    """M in the basis in which vectors are rounded: a mean diagonal of 1, and the ridge."""
    m = rotation.double().mT @ moments.double() @ rotation.double()
    mean = m.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    m = m / torch.where(mean > 0, mean, 1.0)
    return m + RIDGE * torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)


def shaped_codes(
    x: Float[Tensor, "*batch token dim"], m: Moments, bits: int
) -> tuple[UInt8[Tensor, "*batch token dim"], Float[Tensor, "*batch token"]]:
    """Codes whose levels are near x where m is large, and the factor that fits levels to x best.

    The factor is the least-squares one, (levels m x^T) / (levels m levels^T).
    """
    chol = torch.linalg.cholesky(m)
    feed = (chol / chol.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).float()
    found = native.shaped(x, feed, m.float(), bits)
    if found is not None:
        return found
    table = stored_levels(bits).to(x.device)
    x = x.mT.contiguous()  # channels as rows
    aim, error = x.clone(), torch.empty_like(x)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    for stop in range(x.shape[-2], 0, -GROUP):
        start = max(0, stop - GROUP)
        for j in range(stop - 1, start - 1, -1):
            code = nearest_code(aim[..., j, :], bits)
            codes[..., j, :] = code
            level = table.index_select(0, code.int().flatten()).view(code.shape)
            torch.sub(x[..., j, :], level, out=error[..., j, :])
            ahead = aim[..., start:j, :]
            ahead.addcmul_(feed[..., j, start:j, None], error[..., None, j, :])
        before = aim[..., :start, :]
        before += feed[..., start:stop, :start].mT @ error[..., start:stop, :]
    levels = x - error
    seen = m.float() @ levels
    fit = (seen * x).sum(-2) / (seen * levels).sum(-2)
    return codes.mT.clone(memory_format=torch.contiguous_format), fit.clamp_min_(0)
