"""Attention of a layer that evicts at every decoding step, again without a pass of the model.

What enters a layer does not change when it alone evicts, so its queries, keys and values are those
of one run over the full cache, and only what it holds has to be followed step by step.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.attend import attend
from polykv_lib.evict import EvictionPolicy, tallies_of
from polykv_lib.evict.step import Group, append, step
from polykv_lib.kv import LayerKV


def decoded_output(
    layers: LayerKV, policy: EvictionPolicy, budget: int, steps: Sequence[tuple[int, int]]
) -> Float[Tensor, "layer head tail channel"]:
    """Output of each layer in fp32, query heads of a KV head side by side as channels.

    Args:
        layers: a layer a row of the batch: keys and values of the context, which is whole before
            the first step, and of the tail; the tail's queries; running numbers, 0 for the tail.
        policy: evicts after each step.
        budget: tokens that each head then holds at most, context and tail together.
        steps: which of the tail's tokens are fed together, from and up to.
    """
    if layers.queries is None:
        raise ValueError("the observation holds no queries; pass LayerKV(queries=…).")
    n_heads, n_tokens = layers.keys.shape[1:3]
    n_context = n_tokens - layers.queries.shape[2]
    counting = tallies_of(policy)
    held = _part(layers, 0, n_context)
    group = Group(heads=tuple(range(n_heads)), budget=budget)
    found = []
    for start, stop in steps:
        queries = layers.queries[:, :, start:stop]
        new = _part(layers, n_context + start, n_context + stop, queries)
        held = append(held, new)
        out, _ = attend(queries, held.keys, held.values, held.softmax_scale)
        found.append(out.unflatten(1, (n_heads, -1)).transpose(2, 3).flatten(3))
        [held] = step(policy, held, [group], counting)
    return torch.cat(found, 2)


def _part(layers: LayerKV, start: int, stop: int, queries: Tensor | None = None) -> LayerKV:
    keys = layers.keys[:, :, start:stop]
    positions = torch.arange(start, stop, device=keys.device)
    return LayerKV(
        keys=keys,
        values=layers.values[:, :, start:stop],
        queries=queries,
        scale=layers.scale,
        positions=positions.expand(keys.shape[:3]),
        tallies={tally: x[:, :, start:stop] for tally, x in layers.tallies.items()},
    )
