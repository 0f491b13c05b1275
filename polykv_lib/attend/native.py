"""Attention over packed keys and values in one C kernel, where compiler and CPU allow it.

The kernel (native/source/attend.c) unpacks, multiplies and weighs a block of tokens while it is in
the CPU's cache. Every process checks it once against the plain equation. Without it torch computes
the same; `status` says which and why.
"""

import ctypes
import math
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from polykv_lib import native
from polykv_lib.attend.dense import attend_plain
from polykv_lib.attend.stored import Codes, Piece
from polykv_lib.kv import Rows

# Digits of a query and terms of a weight, at least as fine as the dtype itself.
PRECISION: Final = {torch.bfloat16: (2, 1), torch.float16: (3, 2), torch.float32: (3, 2)}
ERROR: Final = 1e-5  # of the check at the start, which uses the finest


class _Packed(ctypes.Structure):
    """`Packed` of task.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "tops", "gain", "levels")),
        ("bits", ctypes.c_int64),
    ]  # fmt: skip


class _Waves(ctypes.Structure):
    """`Waves` of task.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("rows", "lines")]


class _Task(ctypes.Structure):
    """`Task` of task.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys")),
        *((name, _Packed) for name in ("packed_keys", "values")),
        ("waves", _Waves),
        *((name, ctypes.c_void_p) for name in ("out", "lse")),
        *((name, ctypes.c_int64) for name in (
            "heads", "rows", "tokens", "dim", "digits", "terms", "threads",
        )),
    ]  # fmt: skip


def status() -> str:
    """Whether the kernel is used: "on: " and by which instructions, or "off: " and why.

    Compiles and checks it once.
    """
    if not native.enabled():
        return "off: POLYKV_NATIVE=0"
    kernel = _kernel()
    return kernel if isinstance(kernel, str) else f"on: {native.instructions()}"


def attend(rows: Rows, piece: Piece, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Attention of the rows over a whole piece, or None where the kernel can not read it.

    Rows are scaled, scores and lse in base 2, results fp32. The kernel reads int8 keys without
    gains or TurboQuant keys with or without harmonics, and TurboQuant values, of every width, with
    head_dim 64, 128, 192 or 256. For bf16 the queries are numbers of 15 bits (16 for packed
    keys) and the weights of 8, otherwise of 23 (24) and 16.
    """
    if dtype not in PRECISION or rows.device.type != "cpu" or rows.requires_grad:
        return None
    if not rows.numel() or not piece.n_tokens or rows.shape[-1] not in (64, 128, 192, 256):
        return None
    if not status().startswith("on"):
        return None
    keys, values = piece.keys.codes(), piece.values.codes()
    if keys is None or values is None or values.levels is None or values.harmonics is not None:
        return None
    if not _is_faster(keys, dtype):
        return None
    if not all(plane.is_contiguous() for plane in (*keys.planes, *values.planes)):
        return None
    found = _call(_kernel(), piece.keys.to_levels(rows), keys, values, *PRECISION[dtype], rows)
    return None if found is None else (piece.values.from_levels(found[0]), found[1])


def _is_faster(keys: Codes, dtype: torch.dtype) -> bool:
    """Packed keys with queries of three terms are up to nine products, too many without AMX."""
    return keys.levels is None or dtype == torch.bfloat16 or native.instructions() == "AMX"


def _call(
    kernel: Any,
    q: Rows,
    keys: Codes,
    values: Codes,
    digits: int,
    terms: int,
    turning: Rows | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Out and lse in the basis of the values' levels; None: no memory for it.

    `q` are the rows in the basis of the keys' levels, `turning` in that of their harmonics.
    """
    heads, rows, dim = q.shape
    tokens = keys.planes[0].shape[1]
    out, lse = torch.empty(heads, rows, dim), torch.empty(heads, rows)
    task = _Task(
        q=_address(q, torch.float32, heads, rows, dim),
        values=_packed(values, heads, tokens, dim),
        out=out.data_ptr(), lse=lse.data_ptr(),
        heads=heads, rows=rows, tokens=tokens, dim=dim,
        digits=digits, terms=terms, threads=torch.get_num_threads(),
    )  # fmt: skip
    if keys.levels is None:
        task.keys = _address(keys.planes[0], torch.int8, heads, tokens, dim)
    else:
        task.packed_keys = _packed(keys, heads, tokens, dim)
    if keys.harmonics is not None and turning is not None:
        task.waves = _Waves(
            rows=_address(turning, torch.float32, heads, rows, dim),
            lines=_address(keys.harmonics, torch.float32, heads, 3, dim // 2),
        )
    return None if kernel(ctypes.byref(task)) else (out, lse)


def _packed(codes: Codes, heads: int, tokens: int, dim: int) -> _Packed:
    assert codes.levels is not None
    assert codes.gain is not None
    bits = len(codes.levels).bit_length() - 1
    words, *tops = codes.planes
    n_bytes = dim * (2 if bits == 3 else bits) // 8
    return _Packed(
        words=_address(words, torch.uint8, heads, tokens, n_bytes),
        tops=_address(tops[0], torch.uint8, heads, tokens, dim // 8) if bits == 3 else None,
        gain=_address(codes.gain, torch.float32, heads, tokens),
        levels=_address(codes.levels, torch.float32, 2**bits),
        bits=bits,
    )


def _address(x: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Where a tensor's numbers are.

    Raises:
        ValueError: it is not what the kernel will read there.
    """
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"native attention wants a contiguous {dtype} tensor {list(shape)}, "
            f"got {x.dtype} {list(x.shape)} of strides {x.stride()}."
        )
    return x.data_ptr()


@cache
def _kernel() -> Any:
    """The compiled function, or what `status` says where there is none."""
    functions = native.functions()
    if isinstance(functions, str):
        return f"off: {functions}"
    kernel = functions.polykv_attend
    kernel.argtypes, kernel.restype = [ctypes.POINTER(_Task)], ctypes.c_int
    return kernel if _error(kernel) < ERROR else "off: it differs from the plain equation"


def _error(kernel: Any) -> float:
    """Largest difference of the kernel from the equation, over random queries and 3-bit codes."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 7, 64, generator=random) / 256
    keys = torch.randint(-127, 128, (2, 300, 64), generator=random).to(torch.int8)
    codes = torch.randint(0, 8, (2, 300, 64), generator=random)
    gain, levels = torch.rand(2, 300, generator=random), torch.linspace(-2, 2, 9)[:8]
    words = (codes.unflatten(-1, (16, 4)) << torch.tensor([0, 3, 6, 9])).sum(-1)
    tops = (words >> 8)[..., :8] | (words >> 8)[..., 8:] << 4
    planes = ((words & 255).to(torch.uint8), tops.to(torch.uint8))
    found = _call(kernel, q, Codes((keys,)), Codes(planes, levels, gain), 3, 2)
    if found is None:
        return math.inf
    v = levels[codes] * gain[..., None]
    out, lse = attend_plain(q[None], keys[None].float(), v[None], math.log(2), None)
    pairs = zip(found, (out[0], lse[0] / math.log(2)), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)
