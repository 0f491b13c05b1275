"""Attention over a piece by torch's fused kernels, in chunks that run side by side: for CUDA.

A kernel with one thread block a head would leave most of a GPU idle. So a piece is decoded into
scratch of half precision, viewed as chunks of tokens in the batch dimension, and read by all chunks
at once; their results merge by log-sum-exp. Checked on a CPU only, through the CPU's own kernel:
no GPU was at hand, so the first use on a device compares with the plain equation (`works_on`).
"""

import math
import warnings
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polykv_lib.attend.dense import LN2, attend_plain
from polykv_lib.attend.stored import Piece
from polykv_lib.kv import Rows

CHUNKS = 8  # thread blocks a KV head
SPAN = 16_384  # tokens decoded at a time: bounds the scratch whatever the document's length
FEW = 256  # tokens of the shortest chunk, and of the shortest piece that is worth a kernel
TOLERANCE = 5e-3  # of the self-test: half precision keeps 11 bits

Dense = Float[Tensor, "head token dim"]
Partial = tuple[Rows, Float[Tensor, "head row"]]  # output and lse in base 2


def attend(rows: Rows, piece: Piece, dtype: torch.dtype) -> Partial | None:
    """2^(rows . k) weighted mean of a piece's values, and its lse in base 2, both in fp32.

    None where the piece is for another path: on a CPU, of few tokens, or on a device whose kernel
    failed the self-test. `dtype` is the model's; one of 16 bits is read in fp16, whose error is
    the smaller, fp32 in fp32.
    """
    if piece.n_tokens < FEW or not runs_on(rows.device, rows.shape[-1], dtype):
        return None
    return attend_piece(rows, piece, _scratch(dtype))


def runs_on(device: torch.device, dim: int, dtype: torch.dtype) -> bool:
    """Whether pieces on a device are read in chunks."""
    return device.type == "cuda" and works_on(device, dim, _scratch(dtype))


def _scratch(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.float32 else torch.float16


@cache
def works_on(device: torch.device, dim: int, dtype: torch.dtype) -> bool:
    """Whether a device's kernel agrees with the equation on random numbers; tried once each.

    Where it does not, or can not run, a warning says so and attention goes the plain way.
    """
    source = torch.Generator().manual_seed(0)
    rows, keys, values = (
        torch.randn(2, n, dim, generator=source).to(device) for n in (33, 2 * FEW + 1, 2 * FEW + 1)
    )
    rows *= 2 * dim**-0.5
    want, want_lse = attend_plain(rows[None], keys[None], values[None], LN2, None)
    try:
        out, lse = attend_dense(rows, keys, values, dtype)
        apart = torch.stack(((out - want[0]).abs().amax(), (lse * LN2 - want_lse[0]).abs().amax()))
        reason = f"differs by {apart.tolist()} from the equation"
    except RuntimeError as error:
        apart = torch.full((2,), math.inf)
        reason = f"can not run: {error}"
    fine = bool((apart < TOLERANCE).all())  # not so for NaN
    if not fine:
        warnings.warn(
            f"the fused attention kernel for {dtype}, head_dim {dim} on {device} {reason}. "
            "Pools are read by the plain path there, which is exact and slower.",
            stacklevel=2,
        )
    return fine


def attend_piece(rows: Rows, piece: Piece, dtype: torch.dtype) -> Partial:
    """`attend` on any device, with scratch of a given dtype."""
    turned = piece.keys.to_levels(rows)
    partials = []
    for start in range(0, piece.n_tokens, SPAN):
        stop = min(start + SPAN, piece.n_tokens)
        keys, values = (
            _with_gains(side.levels(start, stop, torch.float32), side.gains(start, stop))
            for side in (piece.keys, piece.values)
        )
        partials.append(attend_dense(turned, keys, values, dtype))
    out, lse = merge(*map(torch.stack, zip(*partials, strict=True)))
    return piece.values.from_levels(out), lse


def _with_gains(levels: Dense, gains: Float[Tensor, "head token"] | None) -> Dense:
    return levels if gains is None else levels * gains[..., None]


def attend_dense(rows: Rows, keys: Dense, values: Dense, dtype: torch.dtype) -> Partial:
    """Attention over decoded keys and values, in chunks and in `dtype`.

    Powers of two, one a head, move between rows and keys until both are equally far from the ends
    of fp16; values are brought to about 1. So nothing overflows that fp32 holds, up to scores of
    10^9, and only rounding changes.
    """
    exponent = _exponent(values)
    shift = (_exponent(keys) - _exponent(rows)) // 2
    rows = torch.ldexp(rows, shift).to(dtype)
    keys = torch.ldexp(keys, -shift).to(dtype)
    values = torch.ldexp(values, -exponent).to(dtype)
    n_tokens = keys.shape[1]
    n_chunks = max(1, min(CHUNKS, n_tokens // FEW))
    size = n_tokens // n_chunks
    partials = []
    for start, n in ((0, n_chunks), (n_chunks * size, 1)):
        length = min(size, n_tokens - start)
        if length:
            chunks = (
                x[:, start : start + n * length].unflatten(1, (n, length)).transpose(0, 1)
                for x in (keys, values)
            )
            partials.append(_kernel(rows.expand(n, -1, -1, -1), *chunks))
    out, lse = merge(*map(torch.cat, zip(*partials, strict=True)))
    return torch.ldexp(out, exponent), lse


def _exponent(x: Float[Tensor, "head token dim"]) -> Int[Tensor, "head 1 1"]:
    """The power of two above each head's largest magnitude, within what `ldexp` can undo."""
    largest = torch.linalg.vector_norm(x, math.inf, dim=(1, 2), keepdim=True)
    return torch.frexp(largest).exponent.clamp(-110, 110)


def merge(
    outs: Float[Tensor, "part head row dim"], lses: Float[Tensor, "part head row"]
) -> Partial:
    """Attention over the tokens of all parts, from attention over each."""
    lse = (lses * LN2).logsumexp(0) / LN2
    return (outs * (lses - lse).exp2()[..., None]).sum(0), lse


def _kernel(
    rows: Float[Tensor, "chunk head row dim"],
    keys: Float[Tensor, "chunk head token dim"],
    values: Float[Tensor, "chunk head token dim"],
) -> tuple[Float[Tensor, "chunk head row dim"], Float[Tensor, "chunk head row"]]:
    """Output and lse in base 2 of every chunk, in fp32."""
    if rows.device.type == "cuda":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            rows, keys, values, None, True, scale=LN2
        )
        lse = lse[..., : rows.shape[2]]  # padded to a multiple of 32 rows
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, 0.0, False, scale=LN2
        )
    return out.float(), lse.float() / LN2
