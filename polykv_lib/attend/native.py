"""Attention over packed keys and values in one call of C, where compiler and CPU allow it.

The kernel (native/source/attend.c) unpacks, multiplies and weighs a block of tokens while it is in
the CPU's cache; layer.c does for a whole layer what else a step takes. Every process checks it once
against the plain equation. Without it torch computes the same; `status` says which and why.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polykv_lib import native
from polykv_lib.attend.dense import attend_plain
from polykv_lib.attend.stored import Codes, Piece

# Digits of a query and terms of a weight, at least as fine as the dtype itself.
PRECISION: Final = {torch.bfloat16: (2, 1), torch.float16: (3, 2), torch.float32: (3, 2)}
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as layer.c calls them
DIMS: Final = (64, 128, 192, 256)
FEW: Final = 64  # tokens in full precision: more are torch's
LN2: Final = math.log(2)
ERROR: Final = 1e-5  # of the check at the start, which uses the finest


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


class _Layer(ctypes.Structure):
    """`Layer` of layer.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "pieces", "q", "keys", "values", "visible", "out", "lse",
        )),
        *((name, ctypes.c_int64) for name in (
            "n_pieces", "agents", "heads", "group", "queries", "dim", "own",
        )),
        *((name, ctypes.c_int64 * 3) for name in ("q_strides", "key_strides", "value_strides")),
        *((name, ctypes.c_int64) for name in ("visible_stride", "dtype", "out_dtype", "threads")),
        ("factor", ctypes.c_float),
    ]  # fmt: skip


def status() -> str:
    """Whether the kernel is used: "on: " and by which instructions, or "off: " and why.

    Compiles and checks it once.
    """
    if not native.enabled():
        return "off: POLYKV_NATIVE=0"
    kernel = _kernel()
    if isinstance(kernel, str):
        return kernel
    if not _is_right():
        return "off: it differs from the plain equation"
    return f"on: {native.instructions()}"


def is_on() -> bool:
    """Whether the kernel is used."""
    return status().startswith("on")


class Prepared:
    """The pieces of a layer as the kernel is told of them, and what their addresses point to."""

    def __init__(self, pieces: Sequence[Piece], n_heads: int, dim: int, dtype: torch.dtype):
        """For queries of `dtype`; all pieces are `readable`."""
        self.n_heads, self.dim, self.dtype = n_heads, dim, dtype
        self.held: list[Any] = []
        self.pieces = (_Piece * len(pieces))(*(self._piece(piece) for piece in pieces))

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
        if keys.planes[0].is_floating_point():
            made.few = self._few(keys, values, shape)
            return made
        if keys.levels is None:
            assert keys.scale is not None
            scale = keys.scale.expand(heads, 1, self.dim).contiguous()
            made.scale = self._address(scale, torch.float32, heads, 1, self.dim)
            made.task.keys = self._address(keys.planes[0], torch.int8, *shape)
        else:
            made.to = self._matrix(keys.rotation)
            made.task.packed_keys = self._packed(keys, shape)
        if keys.harmonics is not None:
            made.task.waves.lines = self._address(
                keys.harmonics, torch.float32, heads, 3, self.dim // 2
            )
        assert values.rotation is not None
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
        assert codes.levels is not None
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
    harmonics, beside TurboQuant values, of every width; few tokens that are not quantised; on a
    CPU, with head_dim 64, 128, 192 or 256.
    """
    keys, values = piece.keys.codes(), piece.values.codes()
    if keys is None or values is None or dtype not in PRECISION or dim not in DIMS:
        return False
    planes = (*keys.planes, *values.planes)
    if not all(plane.device.type == "cpu" and plane.is_contiguous() for plane in planes):
        return False
    if keys.planes[0].is_floating_point():
        same = keys.planes[0].dtype == values.planes[0].dtype
        return same and keys.planes[0].dtype in DTYPES and piece.n_tokens <= FEW
    return values.levels is not None and values.harmonics is None and _is_faster(keys, dtype)


def prepared(
    pieces: Sequence[Piece], n_heads: int, dim: int, dtype: torch.dtype
) -> Prepared | None:
    """What the kernel needs to read a layer; None where it can not read all of its pieces."""
    if dtype not in PRECISION or dim not in DIMS:
        return None
    held = [piece for piece in pieces if piece.n_tokens]
    if not all(readable(piece, dim, dtype) for piece in held):
        return None
    return Prepared(held, n_heads, dim, dtype)


def _is_faster(keys: Codes, dtype: torch.dtype) -> bool:
    """Packed keys with queries of three terms are up to nine products, too many without AMX."""
    return keys.levels is None or dtype == torch.bfloat16 or native.instructions() == "AMX"


def attend(
    layer: Prepared, q: Float[Tensor, "agent q_head query dim"], scale: float
) -> tuple[Float[Tensor, "agent q_head query dim"], Float[Tensor, "agent q_head query"]] | None:
    """Out and lse, in fp32, of queries over the pieces; None where torch has to.

    For bf16 the queries are numbers of 15 bits (16 for packed keys) and the weights of 8, otherwise
    of 23 (24) and 16.
    """
    if q.requires_grad or q.stride(-1) != 1 or not q.numel():
        return None
    agents, q_heads, queries, dim = q.shape
    out, lse = torch.empty(agents, queries, q_heads, dim), torch.empty(agents, q_heads, queries)
    task = _layer(layer, q, scale, out)
    task.lse = lse.data_ptr()
    return None if _kernel()(ctypes.byref(task)) else (out.transpose(1, 2), lse)


def step(
    layer: Prepared,
    q: Float[Tensor, "agent q_head one dim"],
    keys: Float[Tensor, "agent head token dim"],
    values: Float[Tensor, "agent head token dim"],
    scale: float,
    visible: Bool[Tensor, "#agent one #row token"] | None,
) -> Float[Tensor, "agent one q_head dim"] | None:
    """Attention of one query an agent over its own tokens and the pieces, in q's dtype.

    None where torch has to compute it. `visible` says which of its own tokens each agent sees; a
    query that sees no token at all gets 0.
    """
    agents, q_heads, _, dim = q.shape
    if q.requires_grad or any(x.stride(-1) != 1 for x in (q, keys, values)):
        return None
    out = q.new_empty(agents, 1, q_heads, dim)
    task = _layer(layer, q, scale, out)
    task.keys, task.values, task.own = keys.data_ptr(), values.data_ptr(), keys.shape[2]
    task.key_strides, task.value_strides = keys.stride()[:3], values.stride()[:3]
    if visible is not None:
        task.visible = visible.data_ptr()
        task.visible_stride = visible.stride(0) if visible.shape[0] > 1 else 0
    return None if _kernel()(ctypes.byref(task)) else out


def _layer(layer: Prepared, q: Tensor, scale: float, out: Tensor) -> _Layer:
    agents, q_heads, queries, dim = q.shape
    return _Layer(
        pieces=ctypes.addressof(layer.pieces), n_pieces=len(layer.pieces),
        q=q.data_ptr(), q_strides=q.stride()[:3], out=out.data_ptr(),
        agents=agents, heads=layer.n_heads, group=q_heads // layer.n_heads, queries=queries,
        dim=dim, dtype=DTYPES[q.dtype], out_dtype=DTYPES[out.dtype],
        threads=torch.get_num_threads(), factor=scale / LN2,
    )  # fmt: skip


@cache
def _kernel() -> Any:
    """The compiled function, or what `status` says where there is none."""
    functions = native.functions()
    if isinstance(functions, str):
        return f"off: {functions}"
    kernel = functions.polykv_layer
    kernel.argtypes, kernel.restype = [ctypes.POINTER(_Layer)], ctypes.c_int
    return kernel


@cache
def _is_right() -> bool:
    """Whether a step over random int8 keys, 3-bit values and own tokens is the plain equation's."""
    random = torch.Generator().manual_seed(0)
    q, own_keys, own_values = (
        torch.randn(3, n, m, 64, generator=random) for n, m in ((4, 1), (2, 5), (2, 5))
    )
    keys = torch.randint(-127, 128, (2, 300, 64), generator=random).to(torch.int8)
    codes = torch.randint(0, 8, (2, 300, 64), generator=random)
    norms, levels = torch.rand(2, 300, generator=random).half(), torch.linspace(-2, 2, 9)[:8]
    words = (codes.unflatten(-1, (16, 4)) << torch.tensor([0, 3, 6, 9])).sum(-1)
    tops = (words >> 8)[..., :8] | (words >> 8)[..., 8:] << 4
    planes = ((words & 255).to(torch.uint8), tops.to(torch.uint8))
    stored_keys = Codes(planes=(keys,), scale=torch.full((1, 1, 1), 1 / 256))
    stored_values = Codes(
        planes=planes, levels=levels, rotation=torch.eye(64), norms=norms, unit=torch.tensor(1.0)
    )
    piece = SimpleNamespace(
        heads=None, n_tokens=300, keys=SimpleNamespace(codes=lambda: stored_keys),
        values=SimpleNamespace(codes=lambda: stored_values),
    )  # fmt: skip
    layer = Prepared([piece], 2, 64, torch.float32)  # type: ignore[list-item]
    found = step(layer, q, own_keys, own_values, 1 / 8, None)
    document = keys / 256, levels[codes] * norms[..., None].float()
    k, v = (
        torch.cat((x.expand(3, -1, -1, -1), own), dim=2)
        for x, own in zip(document, (own_keys, own_values), strict=True)
    )
    want, _ = attend_plain(q.view(3, 2, 2, 64), k, v, 1 / 8, None)
    return found is not None and (found.view(want.shape) - want).abs().max().item() < ERROR
