"""The agents' side of a pool: a transformers cache that holds only what each agent said itself.

Length means tokens seen, document included, so positions are right however few of them are stored;
mask sizes count the agents' own tokens, so transformers builds exactly the mask of the suffix.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from polykv_lib.attend import RowMask, SharedLayer, row_mask
from polykv_lib.hf import compat
from polykv_lib.pool import Piece, PoolError, SharedKVPool

New = Float[Tensor, "agent head new dim"]
Own = Float[Tensor, "agent head own dim"]
ROOM = 20  # the suffix buffer grows by a twentieth: at most 5 % is spare, copies cost O(1) a token


class Masks:
    """The mask of a forward in the form that kernels take, made in its first layer."""

    def __init__(self) -> None:
        """Nothing made yet."""
        self.clear()

    def clear(self) -> None:
        """A new forward begins."""
        self.source: Tensor | None = None
        self.made: RowMask | None = None

    def rows(self, mask: Tensor | None, groups: int, dtype: torch.dtype) -> RowMask | None:
        """What `attend` takes for a transformers mask; `groups` query heads read one KV head."""
        if mask is not self.source:
            self.source = mask
            if mask is None:
                self.made = None
            else:
                visible = mask == 0 if mask.is_floating_point() else mask  # additive: 0 is visible
                self.made = row_mask(visible, groups, dtype)
        return self.made


class AgentLayer(DynamicLayer):
    """One layer of N agents: their own keys and values, and a handle on the shared pieces."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        n_heads: int,
        seen: int,
        window: int | None,
        masks: "Masks",
        by_torch: bool = False,
    ):
        """`seen` tokens of document precede the agents' own; `window` bounds both together."""
        super().__init__()
        self.shared = SharedLayer(pieces, n_heads, by_torch)
        self.seen = seen
        self.window = window
        self.masks = masks
        self.buffer: Float[Tensor, "two agent head room dim"] | None = None
        self.own = 0
        self.unread = False

    def update(
        self, key_states: New, value_states: New, *args: Any, **kwargs: Any
    ) -> tuple[Own, Own]:
        """Append and return the agents' own keys and values; both carry the handle."""
        start, end = self.own, self.own + key_states.shape[2]
        if self.window is not None and self.seen + end > self.window:
            raise PoolError(
                f"document and agent together hold {self.seen + end} tokens, but this model has "
                f"layers with a window of {self.window}, and a pool is exact only within it."
            )
        buffer = self._room(key_states, end)
        buffer[0, :, :, start:end] = key_states
        buffer[1, :, :, start:end] = value_states
        self.own = end
        self.is_initialized = True
        keys, values = buffer[:, :, :, :end]
        keys.polykv_layer = values.polykv_layer = self
        self.unread = True
        return keys, values

    def _room(self, like: New, end: int) -> Float[Tensor, "two agent head room dim"]:
        if self.buffer is None or end > self.buffer.shape[3]:
            agents, heads, _, dim = like.shape
            grown = like.new_empty(2, agents, heads, end + end // ROOM, dim)
            if self.buffer is not None:
                grown[:, :, :, : self.own] = self.buffer[:, :, :, : self.own]
            self.buffer = grown
        return self.buffer

    def get_seq_length(self, *args: Any) -> int:
        """Tokens seen: the document's and the agents' own."""
        return self.seen + self.own

    def get_mask_sizes(self, cache_position: int | Tensor, *args: Any) -> tuple[int, int]:
        """(own tokens after the next update, offset of the first of them).

        Raises:
            PoolError: no token is new, so `generate()` was not given the document's tokens.
        """
        new = compat.query_length(cache_position)
        if new == 0:
            raise PoolError(
                f"no token is new: the cache has seen {self.get_seq_length()} already. generate() "
                "takes the document's tokens too, before each agent's own; or use polykv_lib.ask."
            )
        return self.own + new, self.seen

    def get_max_cache_shape(self) -> int:
        """Unbounded (name up to 5.12)."""
        return -1

    get_max_length = get_max_cache_shape  # the name since 5.14

    def crop(self, max_length: int) -> None:
        """Drop the newest of the agents' own tokens; the document can not be cropped."""
        drop = compat.tokens_to_crop(max_length, self.get_seq_length())
        if drop > self.own:
            raise PoolError(
                f"crop would remove {drop} tokens, but the agents hold {self.own} of their own; "
                "the shared document is immutable."
            )
        self.own -= drop

    def reset(self) -> None:
        """Forget the agents' own tokens."""
        self.buffer, self.own, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of a beam search."""
        self._select(lambda b: b.index_select(1, beam_idx.to(b.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._select(lambda b: b.repeat_interleave(repeats, dim=1))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        self._select(lambda b: b[:, indices])

    def _select(self, rows: Any) -> None:
        if self.buffer is not None:
            self.buffer = rows(self.buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of the agents' own keys and values (written, without the buffer's spare room)."""
        if self.buffer is None:
            return 0
        used = self.buffer[:, :, :, : self.own]
        return used.numel() * used.element_size()


class AgentCache(Cache):
    """Cache of N agents that read one pool. Any number of them may read it at once."""

    def __init__(
        self, pool: SharedKVPool, n: int, window: int | None = None, by_torch: bool = False
    ):
        """`n` agents; a batch may also hold a multiple of n rows (beams).

        `by_torch` leaves the native kernel out.
        """
        self.n_agents = n
        self.document_ids = pool.document_ids
        self.kept_per_head = pool.kept_per_head  # tokens of the document, by layer and KV head
        self.last: AgentLayer | None = None  # updated last: its attention must have read it
        self.masks = Masks()
        layers = [
            AgentLayer(
                pieces, pool.geometry.n_kv_heads, pool.n_tokens, window, self.masks, by_torch
            )
            for pieces in pool.layers
        ]
        super().__init__(layers=layers)

    def update(
        self, key_states: New, value_states: New, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Own, Own]:
        """Append one layer's new keys and values.

        Raises:
            PoolError: the attention in use did not read the pool, or the batch is not the agents'.
        """
        if self.last is not None and self.last.unread:
            raise PoolError(
                "the model's attention did not read the pool, so the document would be lost. "
                "Call polykv_lib.prepare(model) first, and do not change the attention afterwards."
            )
        if key_states.shape[0] % self.n_agents:
            raise PoolError(
                f"a batch of {key_states.shape[0]} rows met a cache of {self.n_agents} agents; "
                "open one with pool.agent_cache(rows)."
            )
        if layer_idx == 0:
            self.masks.clear()
        self.last = self.layers[layer_idx]
        return self.last.update(key_states, value_states, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of all agents' own keys and values; the pool is counted once, by the pool."""
        return sum(layer.nbytes for layer in self.layers)


def dense_bytes(cache: Cache) -> int:
    """Bytes of keys and values that an ordinary cache holds."""
    sides = [side for layer in cache.layers for side in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in sides if isinstance(t, torch.Tensor))
