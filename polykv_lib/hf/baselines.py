"""What the pool is measured against: ordinary caches that hold a dense copy for each agent."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from polykv_lib.hf.caches import AgentCache
from polykv_lib.hf.generate import greedy
from polykv_lib.kv import Geometry, LayerKV
from polykv_lib.pool import SharedKVPool


def full_cache(layers: Sequence[LayerKV], n: int = 1) -> DynamicCache:
    """An ordinary cache holding n dense copies of the document (the expanded batch)."""
    cache = DynamicCache()
    for i, layer in enumerate(layers):
        keys = layer.keys.repeat_interleave(n, dim=0)
        cache.update(keys, layer.values.repeat_interleave(n, dim=0), i)
    return cache


def expanded_cache(pool: SharedKVPool, n: int = 1) -> DynamicCache:
    """The same from a pool: n copies of its dequantised keys and values."""
    layers = (LayerKV(keys=k, values=v) for k, v in map(pool.read, range(len(pool.layers))))
    return full_cache(list(layers), n)


def folded_cache(
    layers: Sequence[LayerKV], geometry: Geometry, n: int = 1, *, by_torch: bool = False
) -> AgentCache:
    """Dense copies of the document, n of them, read as agents' own tokens are; no layers: none.

    The same bytes and the same answer as `full_cache`, but the query heads of a KV head meet it as
    rows, which the kernels of a CPU serve several times faster than grouped heads. `by_torch`
    leaves the native kernel out, which is faster still.
    """
    nothing = SharedKVPool(
        layers=((),) * geometry.n_layers,
        geometry=geometry,
        n_tokens=0,
        document_ids=torch.empty(0, dtype=torch.int64),
    )
    cache = AgentCache(nothing, n, by_torch=by_torch)
    for held, layer in zip(cache.layers, layers, strict=False):
        keys = layer.keys.repeat_interleave(n, dim=0)
        held.update(keys, layer.values.repeat_interleave(n, dim=0))
        held.unread = False
    return cache


@dataclass(frozen=True)
class PooledAgent:
    """One agent as the authors run it (arXiv:2604.24971, agents.py), on today's transformers.

    Every call decompresses the whole pool into a dense cache of the agent's own; agents run one
    after another. Departure: positions and masks are passed explicitly instead of through
    `generate`.
    """

    model: PreTrainedModel
    pool: SharedKVPool

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 200,
        stop_ids: Set[int] = frozenset(),
    ) -> list[int]:
        """Greedy continuation of the document and this prompt."""
        [answer] = greedy(
            self.model,
            expanded_cache(self.pool),
            [prompt_ids],
            n_seen=self.pool.n_tokens,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        return answer
