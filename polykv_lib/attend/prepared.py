"""What the native kernel is told of a layer's pieces: where numbers lie, and in which form."""

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from polykv_lib import native
from polykv_lib.attend.stored import Codes, Piece

# Digits of a query and terms of a weight, at least as fine as the dtype itself.
PRECISION: Final = {torch.bfloat16: (2, 1), torch.float16: (3, 2), torch.float32: (3, 2)}
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as layer.c calls them
DIMS: Final = (64, 128, 192, 256)
FEW: Final = 64  # tokens in full precision that are read one by one


class _Packed(ctypes.Structure):
    """`Packed` of task.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "tops", "norms", "unit", "levels")),
        *((name, ctypes.c_int64) for name in ("bits", "norm_bytes")),
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


class _Few(ctypes.Structure):
    """`Few` of layer.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("tokens", "head", "key", "value", "dtype")),
    ]  # fmt: skip


class _Piece(ctypes.Structure):
    """`Piece` of layer.c."""

    _fields_ = [
        ("task", _Task),
        ("few", _Few),
        *((name, ctypes.c_void_p) for name in ("scale", "to", "back", "heads")),
    ]  # fmt: skip


class Prepared:
    """The pieces of a layer as the kernel is told of them, and what their addresses point to."""

    def __init__(self, pieces: Sequence[Piece], n_heads: int, dim: int, dtype: torch.dtype):
        """For queries of `dtype`; all pieces are `readable`."""
        self.n_heads, self.dim, self.dtype = n_heads, dim, dtype
        self.held: list[Any] = []
        self.pieces = (_Piece * len(pieces))(*(self._piece(piece) for piece in pieces))

    @classmethod
    def of(
        cls, pieces: Sequence[Piece], n_heads: int, dim: int, dtype: torch.dtype
    ) -> "Prepared | None":
        """For a layer's pieces; None where the kernel can not read all of them."""
        if dtype not in PRECISION or dim not in DIMS:
            return None
        held = [piece for piece in pieces if piece.n_tokens]
        if not all(readable(piece, dim, dtype) for piece in held):
            return None
        return cls(held, n_heads, dim, dtype)

    def _piece(self, piece: Piece) -> _Piece:
        heads = self.n_heads if piece.heads is None else len(piece.heads)
        digits, terms = PRECISION[self.dtype]
        shape = heads, piece.n_tokens, self.dim
        made = _Piece(task=_Task(
            heads=heads, tokens=piece.n_tokens, dim=self.dim, digits=digits, terms=terms,
        ))  # fmt: skip
        if piece.heads is not None:
            made.heads = self._address(torch.tensor(piece.heads), torch.int64, heads)
        keys, values = piece.keys.codes(), piece.values.codes()
        assert keys is not None
        assert values is not None
        if _are_few(keys, values, piece.n_tokens):
            made.few = self._few(keys, values, shape)
            return made
        if keys.scale is not None:
            scale = keys.scale.expand(heads, 1, self.dim).contiguous()
            made.scale = self._address(scale, torch.float32, heads, 1, self.dim)
            made.task.keys = self._address(keys.planes[0], torch.int8, *shape)
        else:
            made.to = None if keys.rotation is None else self._matrix(keys.rotation)
            made.task.packed_keys = self._packed(keys, shape)
        if keys.harmonics is not None:
            made.task.waves.lines = self._address(
                keys.harmonics, torch.float32, heads, 3, self.dim // 2
            )
        if values.rotation is not None:
            made.back = self._matrix(values.rotation.mT.contiguous())
        made.task.values = self._packed(values, shape)
        return made

    def _few(self, keys: Codes, values: Codes, shape: tuple[int, int, int]) -> _Few:
        _, tokens, dim = shape
        dtype = keys.planes[0].dtype
        return _Few(
            keys=self._address(keys.planes[0], dtype, *shape),
            values=self._address(values.planes[0], dtype, *shape),
            tokens=tokens, head=tokens * dim, key=dim, value=dim, dtype=DTYPES[dtype],
        )  # fmt: skip

    def _packed(self, codes: Codes, shape: tuple[int, int, int]) -> _Packed:
        heads, tokens, dim = shape
        if codes.levels is None:  # numbers as they are
            numbers = self._address(codes.planes[0], torch.bfloat16, *shape)
            return _Packed(words=numbers, bits=16, norm_bytes=0)
        assert codes.norms is not None
        bits = len(codes.levels).bit_length() - 1
        words, *tops = codes.planes
        n_bytes = dim * (2 if bits == 3 else bits) // 8
        norms = torch.uint8 if codes.norms.dtype == torch.uint8 else torch.float16
        unit = torch.Size([2] if norms == torch.uint8 else [])
        return _Packed(
            words=self._address(words, torch.uint8, heads, tokens, n_bytes),
            tops=self._address(tops[0], torch.uint8, heads, tokens, dim // 8) if tops else None,
            norms=self._address(codes.norms, norms, heads, tokens),
            unit=self._address(codes.unit, torch.float32, *unit),
            levels=self._address(codes.levels, torch.float32, 2**bits),
            bits=bits, norm_bytes=norms.itemsize,
        )  # fmt: skip

    def _matrix(self, basis: Tensor | None) -> int:
        return self._address(basis, torch.float32, self.dim, self.dim)

    def _address(self, x: Tensor | None, dtype: torch.dtype, *shape: int) -> int:
        """Where a tensor's numbers are, for as long as this object lives.

        Raises:
            ValueError: it is not what the kernel will read there.
        """
        if x is None or x.dtype != dtype or x.shape != shape or not x.is_contiguous():
            found = None if x is None else f"{x.dtype} {list(x.shape)} of strides {x.stride()}"
            raise ValueError(
                f"native attention wants a contiguous {dtype} tensor {list(shape)}, got {found}."
            )
        self.held.append(x)
        return x.data_ptr()


def readable(piece: Piece, dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel reads a piece for queries of a dtype.

    That is int8 keys with a scale a tensor or channel, or TurboQuant keys with or without
    harmonics, beside TurboQuant values, of every width; keys and values in bf16, for queries in
    it; few tokens in full precision of any kind; on a CPU, with head_dim 64, 128, 192 or 256.
    """
    keys, values = piece.keys.codes(), piece.values.codes()
    if keys is None or values is None or dtype not in PRECISION or dim not in DIMS:
        return False
    planes = (*keys.planes, *values.planes)
    if not all(plane.device.type == "cpu" and plane.is_contiguous() for plane in planes):
        return False
    if _are_few(keys, values, piece.n_tokens):
        return True
    floats = {p.dtype for p in planes if p.is_floating_point()}
    if floats and not floats == {dtype} == {torch.bfloat16}:
        return False
    return values.scale is None and values.harmonics is None and _is_faster(keys, dtype)


def _are_few(keys: Codes, values: Codes, n_tokens: int) -> bool:
    """Whether these are a few tokens in full precision, such as sinks."""
    same = keys.planes[0].dtype == values.planes[0].dtype
    return same and keys.planes[0].dtype in DTYPES and n_tokens <= FEW


def _is_faster(keys: Codes, dtype: torch.dtype) -> bool:
    """Packed keys with queries of three terms are up to nine products, too many without AMX."""
    return keys.levels is None or dtype == torch.bfloat16 or native.instructions() == "AMX"
