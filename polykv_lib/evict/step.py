"""One step of a cache that evicts: tokens held and new ones in, what stays of them out.

Position -1 marks an empty slot: rows of a batch that hold fewer tokens than the longest one have
them in front, so that a row's tokens are always its last slots, in the order of time. Padding takes
an empty slot when it arrives and none afterwards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from polykv_lib.evict.base import EvictionPolicy, kept_of, merger_of
from polykv_lib.evict.merging import at
from polykv_lib.evict.tallies import Tally
from polykv_lib.kv import LayerKV


@dataclass(frozen=True, kw_only=True)
class Group:
    """KV heads with one budget; None keeps everything."""

    heads: tuple[int, ...]
    budget: int | None


def step(
    policy: EvictionPolicy, layer: LayerKV, groups: Sequence[Group], counting: Iterable[Tally]
) -> list[LayerKV]:
    """What each group of heads keeps.

    Args:
        policy: of the current phase.
        layer: tokens held and new ones, with positions and the new tokens' queries; heads hold
            equally many tokens.
        groups: places of the heads in `layer`.
        counting: the tallies to keep up to date.
    """
    n_tokens = layer.keys.shape[2]
    if n_tokens == 0 or not (positions_of(layer) < 0).any():
        return _reduce(policy, layer, groups, counting)
    rows = (_row(layer, b) for b in range(layer.keys.shape[0]))
    reduced = [_reduce(policy, row, groups, counting) for row in rows]
    return [stack(of_group) for of_group in zip(*reduced, strict=True)]


def positions_of(layer: LayerKV) -> Int[Tensor, "batch head token"]:
    """The tokens' positions, which a step needs."""
    if layer.positions is None:
        raise ValueError("a step needs the tokens' positions; pass LayerKV(positions=…).")
    return layer.positions


def each(layer: LayerKV, change: Callable[[Tensor], Tensor]) -> LayerKV:
    """Everything but the queries changed."""
    return LayerKV(
        keys=change(layer.keys),
        values=change(layer.values),
        scale=layer.scale,
        positions=change(positions_of(layer)),
        tallies={t: change(x) for t, x in layer.tallies.items()},
        threshold=None if layer.threshold is None else change(layer.threshold),
    )


def select(layer: LayerKV, heads: Sequence[int]) -> LayerKV:
    """Some KV heads, with the query heads that read them."""
    n_heads = layer.keys.shape[1]
    if list(heads) == list(range(n_heads)):
        return layer
    chosen = list(heads)
    part = each(layer, lambda x: x[:, chosen])
    if layer.queries is None:
        return part
    queries = layer.queries.unflatten(1, (n_heads, -1))[:, chosen].flatten(1, 2)
    return replace(part, queries=queries)


def chosen(layer: LayerKV, kept: Int[Tensor, "batch head kept"]) -> LayerKV:
    """Some tokens of each head, without the queries."""
    return LayerKV(
        keys=at(layer.keys, kept),
        values=at(layer.values, kept),
        scale=layer.scale,
        positions=positions_of(layer).gather(2, kept),
        tallies={t: x.gather(2, kept) for t, x in layer.tallies.items()},
        threshold=layer.threshold,
    )


def append(held: LayerKV, new: LayerKV) -> LayerKV:
    """Held tokens and new ones; running numbers of new tokens start at 0."""
    n_new = new.keys.shape[2]
    return replace(
        new,
        keys=torch.cat([held.keys, new.keys], 2),
        values=torch.cat([held.values, new.values], 2),
        positions=torch.cat([positions_of(held), positions_of(new)], 2),
        tallies={t: functional.pad(x, (0, n_new)) for t, x in held.tallies.items()},
        threshold=held.threshold,
    )


def _reduce(
    policy: EvictionPolicy, layer: LayerKV, groups: Sequence[Group], counting: Iterable[Tally]
) -> list[LayerKV]:
    n_tokens = layer.keys.shape[2]
    full = all(group.budget is None or n_tokens <= group.budget for group in groups)
    if layer.queries is None or layer.queries.shape[2] == 0:  # a row of padding alone
        return [replace(select(layer, group.heads), queries=None) for group in groups]
    counted = {t: t.after(layer, layer.tallies.get(t)) for t in counting}
    layer = replace(layer, tallies=counted)
    if full:
        return [replace(select(layer, group.heads), queries=None) for group in groups]
    positions = positions_of(layer)
    together = bool((positions == positions[:, :1]).all())
    seen = layer if together else _fold(layer)
    scores = policy.score(seen).reshape(positions.shape)
    results = []
    for group in groups:
        part = select(layer, group.heads)
        if group.budget is None or n_tokens <= group.budget:
            results.append(replace(part, queries=None))
        else:
            of_group = scores[:, list(group.heads)]
            results.append(_evict(policy, part, of_group, group.budget))
    return results


def _evict(policy: EvictionPolicy, layer: LayerKV, scores: Tensor, budget: int) -> LayerKV:
    kept = kept_of(scores, budget, policy.protect(budget))
    left, merger = chosen(layer, kept), merger_of(policy)
    if merger is None:
        return left
    changed = merger.merge(layer, kept)
    threshold = left.threshold if changed.threshold is None else changed.threshold
    return replace(left, keys=changed.keys, values=changed.values, threshold=threshold)


def _fold(layer: LayerKV) -> LayerKV:
    """Each head as a row of its own: heads that hold different tokens are scored one by one."""
    n_heads = layer.keys.shape[1]
    queries = layer.queries
    if queries is not None:
        queries = queries.unflatten(1, (n_heads, -1)).flatten(0, 1)
    return replace(each(layer, lambda x: x.flatten(0, 1)[:, None]), queries=queries)


def _row(layer: LayerKV, b: int) -> LayerKV:
    """One row of the batch, without its empty slots."""
    real = positions_of(layer)[b, 0] >= 0
    row = each(layer, lambda x: x[b : b + 1] if x.dim() == 2 else x[b : b + 1, :, real])
    if layer.queries is None:
        return row
    return replace(row, queries=layer.queries[b : b + 1, :, real[-layer.queries.shape[2] :]])


def stack(rows: Sequence[LayerKV]) -> LayerKV:
    """Rows of a batch, the shorter ones with empty slots in front."""
    longest = max(row.keys.shape[2] for row in rows)

    def cat(sides: Sequence[Tensor], empty: int = 0) -> Tensor:
        padded = []
        for x in sides:
            width = (0, 0) if x.dim() == 4 else ()
            padded.append(functional.pad(x, (*width, longest - x.shape[2], 0), value=empty))
        return torch.cat(padded)

    # A row that was all padding has counted nothing yet, a short one has merged nothing (nan).
    tallies = {t for row in rows for t in row.tallies}
    none = [row.keys.new_full(row.keys.shape[:2], torch.nan) for row in rows]
    thresholds = [
        n if r.threshold is None else r.threshold for r, n in zip(rows, none, strict=True)
    ]
    return LayerKV(
        keys=cat([row.keys for row in rows]),
        values=cat([row.values for row in rows]),
        scale=rows[0].scale,
        positions=cat([positions_of(row) for row in rows], empty=-1),
        tallies={
            t: cat([row.tallies.get(t, row.keys.new_zeros(row.keys.shape[:3])) for row in rows])
            for t in tallies
        },
        threshold=torch.cat(thresholds),
    )
