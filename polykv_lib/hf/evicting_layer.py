"""One layer of a cache that evicts: what it holds, its attention, and the eviction after it.

Tokens are held by groups of KV heads with equal budgets, in the order of time. Of transformers'
mask only the newest columns are used, to tell padding: a query sees all tokens held and the new
ones up to itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from polykv_lib.attend import attend
from polykv_lib.evict import FullKV, LayerPlan, tallies_of
from polykv_lib.evict.step import Group, append, chosen, each, positions_of, select, stack, step
from polykv_lib.hf import compat
from polykv_lib.kv import KeptTokens, LayerKV
from polykv_lib.pool import PoolError

New = Float[Tensor, "row head new dim"]


class EvictingLayer(DynamicLayer):
    """Tokens of each row of the batch, as many a KV head as the phase's plan allows."""

    def __init__(
        self, prefill: LayerPlan, decode: LayerPlan | None, n_heads: int, window: int | None
    ):
        """Without a decode plan the layer grows while generating. `window` bounds all tokens."""
        super().__init__()
        self.prefill, self.decode = prefill, decode
        self.window = window
        budgets = zip(*(p.budgets(n_heads) for p in (prefill, decode or prefill)), strict=True)
        groups: dict[tuple[int, int], list[int]] = {}
        for head, of_head in enumerate(budgets):
            groups.setdefault(of_head, []).append(head)
        self.heads = [tuple(heads) for heads in groups.values()]
        self.n_heads = n_heads
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next forward is a prefill."""
        self.held: list[LayerKV] | None = None
        self.seen = 0
        self.counts: Int[Tensor, " row"] | None = None  # tokens seen that are not padding
        self.is_prefill = True  # of the newest tokens
        self.prefill_goes_on = True  # with the next tokens
        self.unread = False
        self.is_initialized = False

    def hold(self, rows: Sequence[tuple[LayerKV, Sequence[KeptTokens]]]) -> None:
        """Go on after a prefill that happened elsewhere.

        Args:
            rows: of each row keys, values and running numbers of all tokens of a document, and
                what each head keeps of it. All documents are equally long.
        """
        shape = rows[0][0].keys.shape[:3]
        positions = torch.arange(shape[2], device=rows[0][0].keys.device)
        self.reset()
        self.seen, self.counts = shape[2], positions.new_full((len(rows),), shape[2])
        self.prefill_goes_on, self.is_initialized = False, True
        placed = [(replace(row, positions=positions.expand(shape)), kept) for row, kept in rows]
        self.held = [
            stack(
                [
                    chosen(select(row, heads), torch.stack([kept[head] for head in heads])[None])
                    for row, kept in placed
                ]
            )
            for heads in self.heads
        ]

    def update(
        self, key_states: New, value_states: New, *args: Any, **kwargs: Any
    ) -> tuple[New, New]:
        """The new keys and values as they are; the keys carry the handle."""
        self.seen += key_states.shape[2]
        self.is_prefill, self.prefill_goes_on = self.prefill_goes_on, False
        if self.window is not None and self.seen > self.window:
            raise PoolError(
                f"the cache has seen {self.seen} tokens, but this model has layers with a window "
                f"of {self.window}, and eviction is exact only within it."
            )
        handle: Any = key_states
        handle.polykv_layer = self
        self.unread = self.is_initialized = True
        return key_states, value_states

    def attend(
        self,
        module: Any,
        query: Float[Tensor, "row q_head new dim"],
        key: New,
        value: New,
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scaling: float | None,
        **kwargs: Any,
    ) -> Float[Tensor, "row new q_head dim"]:
        """Attention over the tokens held and the new ones, then eviction."""
        rows, _, n_new, dim = query.shape
        scale = dim**-0.5 if scaling is None else scaling
        real = _real(mask, n_new)
        positions = self._count(rows, n_new, real, key.device)
        new = LayerKV(
            keys=key,
            values=value,
            queries=query,
            scale=scale,
            positions=positions[:, None].expand(-1, self.n_heads, -1),
        )
        if self.held is None:
            out, _ = sdpa_attention_forward(
                module, query, key, value, mask, scaling=scaling, **kwargs
            )
            self.held = self._evict(new, dict(enumerate(self.heads)))
        else:
            out = torch.empty_like(query)
            grouped = out.unflatten(1, (self.n_heads, -1))
            for i, heads in enumerate(self.heads):
                layer = append(self.held[i], select(new, heads))
                own = query.unflatten(1, (self.n_heads, -1))[:, list(heads)].flatten(1, 2)
                part, _ = attend(own, layer.keys, layer.values, scale, _visible(layer, n_new))
                grouped[:, list(heads)] = part.to(out.dtype).unflatten(1, (len(heads), -1))
                if self.decode is None and not self.is_prefill and real is None:
                    self.held[i] = replace(layer, queries=None)
                else:
                    [self.held[i]] = self._evict(layer, {i: tuple(range(len(heads)))})
            out = out.transpose(1, 2).contiguous()
        self.unread = False
        return out

    def _count(self, rows: int, n_new: int, real: Tensor | None, device: Any) -> Tensor:
        """Positions of new tokens among their row's own; -1 for padding."""
        if real is None:
            real = torch.ones(rows, n_new, dtype=torch.bool, device=device)
        before = 0 if self.counts is None else self.counts[:, None]
        places = before + real.expand(rows, n_new).cumsum(1)
        self.counts = places[:, -1]
        return torch.where(real, places - 1, -1)

    def _evict(self, layer: LayerKV, groups: dict[int, tuple[int, ...]]) -> list[LayerKV]:
        """What groups of heads keep; `groups` says where in `layer` the heads of each are."""
        plan = self.prefill if self.is_prefill else self.decode
        plans = [p for p in (plan, self.decode) if p is not None]
        return step(
            FullKV() if plan is None else plan.policy,
            layer,
            [Group(heads=at, budget=self.budgets[self.heads[i][0]]) for i, at in groups.items()],
            {tally for p in plans for tally in tallies_of(p.policy)},
        )

    @property
    def budgets(self) -> tuple[int | None, ...]:
        """Of each head, in the phase of the newest tokens; None: it keeps everything."""
        plan = self.prefill if self.is_prefill else self.decode
        if plan is None or isinstance(plan.policy, FullKV):
            return (None,) * self.n_heads
        return plan.budgets(self.n_heads)

    def positions(self, row: int) -> list[Int[Tensor, " _"]]:
        """Which tokens each head holds for a row, in the order of time."""
        slots = [positions_of(held)[row] for held in self._of_head()]
        places = {head: i for heads in self.heads for i, head in enumerate(heads)}
        return [x[places[head]][x[places[head]] >= 0] for head, x in enumerate(slots)]

    def _of_head(self) -> list[LayerKV]:
        """What holds the tokens of each head."""
        groups = {head: i for i, heads in enumerate(self.heads) for head in heads}
        return [] if self.held is None else [self.held[groups[h]] for h in range(self.n_heads)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held."""
        sides = [side for held in self.held or () for side in (held.keys, held.values)]
        return sum(side.numel() * side.element_size() for side in sides)

    @property
    def stored(self) -> int:
        """Tokens that the longest row holds in the fullest head."""
        return 0 if self.held is None else max(h.keys.shape[2] for h in self.held)

    @property
    def kept_per_head(self) -> tuple[int, ...]:
        """Tokens that the longest row holds in each head."""
        return tuple(held.keys.shape[2] for held in self._of_head())

    def get_seq_length(self, *args: Any) -> int:
        """Tokens seen."""
        return self.seen

    def get_mask_sizes(self, cache_position: int | Tensor, *args: Any) -> tuple[int, int]:
        """(tokens held after the next update, tokens seen and not held)."""
        return self.stored + compat.query_length(cache_position), self.seen - self.stored

    def get_max_cache_shape(self) -> int:
        """Unbounded (name up to 5.12)."""
        return -1

    get_max_length = get_max_cache_shape  # the name since 5.14

    def crop(self, max_length: int) -> None:
        """Refused: what was evicted for a token's sake does not come back with its removal."""
        if compat.tokens_to_crop(max_length, self.seen):
            raise PoolError("a cache that evicts can not be cropped; prefill a new one.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of a beam search."""
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        self._rows(lambda x: x[indices])

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.held is not None and self.counts is not None:
            self.held = [each(held, change) for held in self.held]
            self.counts = change(self.counts)


def _real(mask: Tensor | None, n_new: int) -> Bool[Tensor, "#row new"] | None:
    """Which new tokens are not padding; None: all of them. The newest query sees every one."""
    if mask is None:
        return None
    if mask.is_floating_point():  # additive form: 0 where visible
        mask = mask == 0
    real = mask[:, 0, -1, -n_new:]
    return None if real.all() else real


def _visible(layer: LayerKV, n_new: int) -> Bool[Tensor, "row 1 new token"] | None:
    """What the new queries see: no empty slot, no padding, no newer token; None: only the last."""
    real = positions_of(layer)[:, :1] >= 0
    if real.all():
        return None
    n_tokens = layer.keys.shape[2]
    causal = torch.ones(n_new, n_tokens, dtype=torch.bool, device=real.device)
    return real[:, :, None] & causal.tril(n_tokens - n_new)
