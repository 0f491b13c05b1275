"""Encoding in C, where compiler and CPU allow it: one pass where torch makes a dozen.

Every process checks the functions once against torch's; without them torch computes the same, but
for the last bit of a rotated number, which may move a number on an edge to the next level.
"""

import ctypes
import math
from functools import cache
from typing import Any, Final

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from polykv_lib import native
from polykv_lib.quantize.codebooks import nearest_code, stored_edges, stored_levels
from polykv_lib.quantize.packing import Planes, pack

DIMS: Final = (64, 128, 192, 256)


class _Vectors(ctypes.Structure):
    """`Vectors` of encode.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("y", "edges", "levels", "words", "tops", "length")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "bits", "matched", "threads")),
    ]  # fmt: skip


class _Channels(ctypes.Structure):
    """`Channels` of encode.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "scale", "codes")),
        *((name, ctypes.c_int64) for name in ("heads", "tokens", "dim", "threads")),
    ]  # fmt: skip


class _Shaped(ctypes.Structure):
    """`Shaped` of encode.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "x", "feed", "moments", "edges", "levels", "codes", "fit",
        )),
        *((name, ctypes.c_int64) for name in ("heads", "tokens", "dim", "bits", "threads")),
    ]  # fmt: skip


def turbo(
    x: Float[Tensor, "*batch token dim"],
    rotation: Float[Tensor, "dim dim"],
    bits: int,
    matched: bool,
) -> tuple[Planes, Float[Tensor, "*batch token"]] | None:
    """Packed codes of vectors once rotated, and what multiplies levels; None: torch's to do.

    That is so on a GPU, of other dims, without the library, and where a vector is huge, tiny or not
    finite.
    """
    if x.device.type != "cpu" or x.shape[-1] not in DIMS or not x.numel() or not _works():
        return None
    planes, length = _turbo((x.float() @ rotation).contiguous(), bits, matched)
    return (planes, length) if length.isfinite().all() else None


def shaped(
    x: Float[Tensor, "*batch token dim"],
    feed: Float[Tensor, "*batch dim dim"],
    moments: Float[Tensor, "*batch dim dim"],
    bits: int,
) -> tuple[UInt8[Tensor, "*batch token dim"], Float[Tensor, "*batch token"]] | None:
    """What `shaping.shaped_codes` returns; None: torch's to do."""
    if not _takes(x) or x.shape[-1] not in DIMS:
        return None
    return _shaped(x.contiguous(), feed.contiguous(), moments.contiguous(), bits)


def rounded(
    x: Float[Tensor, "*batch token dim"], scale: Float[Tensor, "*any"]
) -> Int8[Tensor, "*batch token dim"] | None:
    """Numbers over their channels' scales as int8; None: torch's to do."""
    if not _takes(x):
        return None
    return _rounded(x.contiguous(), scale.expand(*x.shape[:-2], 1, x.shape[-1]).contiguous())


def largest(x: Float[Tensor, "*batch token dim"]) -> Float[Tensor, "*batch one dim"] | None:
    """The largest magnitude of each channel, NaN where there is one; None: torch's to do."""
    if not _takes(x):
        return None
    return _largest(x.contiguous())


def _takes(x: Tensor) -> bool:
    small = x.shape[-1] % 16 or not x.numel()
    return x.device.type == "cpu" and x.dtype == torch.float32 and not small and _works()


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    codes = torch.empty(x.shape, dtype=torch.int8)
    native.functions().polykv_round(ctypes.byref(_channels(x, scale, codes)))
    return codes


def _largest(x: Tensor) -> Tensor:
    top = torch.empty(*x.shape[:-2], 1, x.shape[-1])
    native.functions().polykv_largest(ctypes.byref(_channels(x, top, None)))
    return top


def _channels(x: Tensor, scale: Tensor, codes: Tensor | None) -> _Channels:
    tokens, dim = x.shape[-2:]
    return _Channels(
        x=x.data_ptr(), scale=scale.data_ptr(),
        codes=None if codes is None else codes.data_ptr(),
        heads=x.numel() // (tokens * dim), tokens=tokens, dim=dim,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def _shaped(x: Tensor, feed: Tensor, moments: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    *batch, tokens, dim = x.shape
    codes, fit = torch.empty(x.shape, dtype=torch.uint8), torch.empty(*batch, tokens)
    edges, levels = _edges(bits), stored_levels(bits)
    task = _Shaped(
        x=x.data_ptr(), feed=feed.data_ptr(), moments=moments.data_ptr(),
        edges=edges.data_ptr(), levels=levels.data_ptr(),
        codes=codes.data_ptr(), fit=fit.data_ptr(),
        heads=math.prod(batch), tokens=tokens, dim=dim, bits=bits,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    native.functions().polykv_shape(ctypes.byref(task))
    return codes, fit


def _turbo(y: Tensor, bits: int, matched: bool) -> tuple[Planes, Tensor]:
    *batch, dim = y.shape
    words = torch.empty(*batch, dim * (2 if bits == 3 else bits) // 8, dtype=torch.uint8)
    tops = torch.empty(*batch, dim // 8 if bits == 3 else 0, dtype=torch.uint8)
    length, edges, levels = torch.empty(batch), _edges(bits), stored_levels(bits)
    task = _Vectors(
        y=y.data_ptr(), edges=edges.data_ptr(), levels=levels.data_ptr(),
        words=words.data_ptr(), tops=tops.data_ptr(), length=length.data_ptr(),
        rows=length.numel(), dim=dim, bits=bits, matched=matched,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    native.functions().polykv_encode(ctypes.byref(task))
    return (words, tops) if bits == 3 else (words,), length


@cache
def _edges(bits: int) -> Tensor:
    return torch.tensor(stored_edges(bits))


def _works() -> bool:
    return native.enabled() and _is_right()


@cache
def _is_right() -> bool:
    """There is a library, and it does what torch does."""
    functions: Any = native.functions()
    if isinstance(functions, str):
        return False
    for name in ("polykv_encode", "polykv_largest", "polykv_round", "polykv_shape"):
        getattr(functions, name).restype = None
    y = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    z = y / y.norm(dim=-1, keepdim=True) * 8
    for bits in (1, 2, 3, 4):
        planes, length = _turbo(y, bits, False)
        codes = nearest_code(z, bits)
        same = map(torch.equal, planes, pack(codes, bits))
        if not all(same) or not torch.allclose(length, y.norm(dim=-1) / 8):
            return False
        alike, fit = _shaped(z, torch.eye(64), torch.eye(64), bits)  # nothing to feed
        levels = stored_levels(bits)[codes.long()]
        best = (levels * z).sum(-1) / levels.square().sum(-1)
        if not torch.equal(alike, codes) or not torch.allclose(fit, best):
            return False
    top = y.abs().amax(0, keepdim=True)
    codes = (y / (top / 127)).round().to(torch.int8)
    return torch.equal(_largest(y), top) and torch.equal(_rounded(y, top / 127), codes)
