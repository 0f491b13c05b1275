"""Attention of one decode step over a pool in another model's shape, against the device's copying.

Keys, values and queries are random: no time depends on them. What a step must read is the pool, so
its bytes over the step's time stand beside what the device copies in a second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polykv_lib import presets
from polykv_lib.attend import SharedLayer
from polykv_lib.kv import Geometry
from polykv_lib.metrics.intervals import median_interval
from polykv_lib.pool import SharedKVPool, Stored
from polykv_lib.quantize import FullPrecision
from polykv_lib.study.experiments.common import row
from polykv_lib.study.experiments.memory_scaling import build
from polykv_lib.study.experiments.speed.timing import interleaved_ms, per_second
from polykv_lib.study.record import Row

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # far more than any cache holds
COPY = ("copy", "")
Queries = Float[Tensor, "agent q_head one dim"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Whose cache, how long, for how many agents, and where."""

    geometry: str
    n_tokens: int
    n_agents: int
    dtype: torch.dtype
    device: torch.device

    @property
    def heads(self) -> Geometry:
        """The cache's geometry."""
        return presets.geometry(self.geometry)

    def queries(self, seed: int) -> Queries:
        """One random query for each agent and query head."""
        source = torch.Generator().manual_seed(seed + 1)
        size = (self.n_agents, self.heads.n_q_heads, 1, self.heads.head_dim)
        return torch.randn(size, generator=source).to(self.device, self.dtype)

    def pool(self, codec: str, seed: int) -> SharedKVPool:
        """A pool of random keys and values."""
        return build(self.heads, codec, self.n_tokens, seed, dtype=self.dtype, device=self.device)


def rows(
    shape: Shape, codecs: Sequence[str], rounds: int, seed: int, machine: Mapping[str, Any]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Time, bytes a second and error of every codec's step, with one dense copy beside them."""
    q = shape.queries(seed)
    pools = {codec: shape.pool(codec, seed) for codec in codecs}
    one_copy = [pools["full"].read(i) for i in range(shape.heads.n_layers)]
    steps: dict[tuple[str, str], Callable[[], Queries]] = {
        ("shared-pool", codec): partial(over_pool, shared_layers(pool), q)
        for codec, pool in pools.items()
    }
    steps["sdpa", "full"] = partial(over_one_copy, one_copy, q)
    source = torch.ones(COPIED_BYTES[shape.device.type], dtype=torch.uint8, device=shape.device)
    copy = partial(torch.empty_like(source).copy_, source)
    times_ms = interleaved_ms({**steps, COPY: copy}, rounds, shape.device)
    copied = per_second(2e-9 * source.numel(), median_interval(times_ms[COPY]))  # read and written
    at = {
        **machine,
        "geometry": shape.geometry,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "context_tokens": shape.n_tokens,
        "n_agents": shape.n_agents,
    }
    found = [row("bandwidth", "gb_per_s", copied, "GB/s", at | {"method": "copy", "codec": None})]
    samples = []
    for (method, codec), last_layer in steps.items():
        pool, dims = pools[codec], at | {"method": method, "codec": codec}
        time = median_interval(times_ms[method, codec])
        rate = per_second(1e-9 * pool.nbytes, time)
        found += [
            row("bandwidth", "step_ms", time, "ms", dims),
            row("bandwidth", "read_bytes", pool.nbytes, "B", dims),
            row("bandwidth", "gb_per_s", rate, "GB/s", dims),
            row("bandwidth", "share_of_copy", rate.value / copied.value, "share", dims),
            row("bandwidth", "relative_error", error(last_layer(), pool, q), "share", dims),
        ]
        samples.append(dims | {"step_ms": [round(t, 3) for t in times_ms[method, codec]]})
    return found, samples


def over_pool(layers: Sequence[SharedLayer], q: Queries) -> Queries:
    """The attention of one decode step in every layer of a pool; the last layer's output."""
    for layer in layers:
        out, _ = layer.attend(q, q.shape[-1] ** -0.5)
    return out.to(q.dtype)


def shared_layers(pool: SharedKVPool) -> list[SharedLayer]:
    """The layers of a pool as agents attend to them."""
    return [SharedLayer(pieces, pool.geometry.n_kv_heads) for pieces in pool.layers]


def over_one_copy(layers: Sequence[tuple[Tensor, Tensor]], q: Queries) -> Queries:
    """The same by sdpa over one dense copy, which all agents' queries meet as rows of one batch."""
    for keys, values in layers:
        heads = q[:, :, 0].unflatten(1, (keys.shape[1], -1))  # agent, head, group, dim
        rows = heads.transpose(0, 1).flatten(1, 2)[None]
        out = scaled_dot_product_attention(rows, keys, values)[0]
    return out.unflatten(1, (q.shape[0], -1)).transpose(0, 1).flatten(1, 2)[:, :, None]


def error(out: Queries, pool: SharedKVPool, q: Queries) -> float:
    """|out - exact| / |exact| of the last layer; exact: fp64 over what the codes stand for.

    Codes are decoded in fp32, whatever the dtype of the numbers they were made from: rounding to
    that dtype would be an error of the reference.
    """
    keys, values = (side[0, :, None].double() for side in in_fp32(pool).read(-1))
    heads = q.double().unflatten(1, (keys.shape[0], -1))  # agent, head, group, one, dim
    exact = ((heads @ keys.mT * q.shape[-1] ** -0.5).softmax(-1) @ values).flatten(1, 2)
    return ((out.double() - exact).norm() / exact.norm()).item()


def in_fp32(pool: SharedKVPool) -> SharedKVPool:
    """The pool's last layer alone, which reads back in fp32 instead of the dtype it came in."""
    pieces = tuple(
        replace(piece, keys=_fp32(piece.keys), values=_fp32(piece.values))
        for piece in pool.layers[-1]
    )
    return replace(pool, layers=(pieces,))


def _fp32(side: Stored) -> Stored:
    data = replace(side.data, dtype=torch.float32)
    if isinstance(side.codec, FullPrecision):
        data = replace(data, planes=tuple(plane.float() for plane in data.planes))
    return replace(side, data=data)
