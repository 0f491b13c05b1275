"""Attention over packed keys and values in one call of C, where compiler and CPU allow it.

The kernel (native/source/attend.c) unpacks, multiplies and weighs a block of tokens while it is in
the CPU's cache; layer.c does for a whole layer what else a step takes. Every process checks it once
against the plain equation. Without it torch computes the same; `status` says which and why.
"""

import ctypes
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polykv_lib import native
from polykv_lib.attend.dense import LN2, attend_plain
from polykv_lib.attend.prepared import DTYPES, Prepared
from polykv_lib.attend.stored import Codes

ERROR: Final = 1e-5  # of the check at the start, which uses the finest


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
    return native.enabled() and not isinstance(_kernel(), str) and _is_right()


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
        visible = visible[:, 0, 0].contiguous()
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
    layer = Prepared([piece], 2, 64, torch.float32)
    found = step(layer, q, own_keys, own_values, 1 / 8, None)
    document = keys / 256, levels[codes] * norms[..., None].float()
    k, v = (
        torch.cat((x.expand(3, -1, -1, -1), own), dim=2)
        for x, own in zip(document, (own_keys, own_values), strict=True)
    )
    want, _ = attend_plain(q.view(3, 2, 2, 64), k, v, 1 / 8, None)
    return found is not None and (found.view(want.shape) - want).abs().max().item() < ERROR
