"""The pool itself: immutable, counted from its tensors, read by any number of agents."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polykv_lib.kv import Geometry, Keys, Values
from polykv_lib.pool import file
from polykv_lib.pool.pieces import Piece, PoolError, dense, describe, restore

CacheFactory = Callable[["SharedKVPool", int], Any]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SharedKVPool:
    """One document's keys and values: immutable, so any number of agents and threads may read."""

    layers: tuple[tuple[Piece, ...], ...]
    geometry: Geometry
    n_tokens: int  # of the document, before eviction: the position of an agent's first token
    document_ids: Int[Tensor, " token"]
    owner: Mapping[str, str] = field(default_factory=dict)  # model and tokenizer it belongs to
    cache_factory: CacheFactory | None = None  # set by the room that knows transformers

    def __repr__(self) -> str:
        held = f"{self.nbytes / 1e6:.1f} MB, {self.bits_per_element:.2f} bits an element"
        return f"SharedKVPool({self.n_tokens:,} tokens, {len(self.layers)} layers, {held})"

    def agent_cache(self, n: int) -> Any:
        """A transformers `Cache` for a batch of n agents; it holds their own tokens only."""
        if not isinstance(n, Integral) or n < 1:
            raise PoolError(f"agent_cache({n!r}); pass a number of agents, 1 or more.")
        if self.cache_factory is None:
            raise PoolError(
                "this pool was frozen from bare tensors and belongs to no model; "
                "build it with polykv_lib.build_pool(model, …) to read it with one."
            )
        return self.cache_factory(self, n)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by the name it has on disk."""
        named = {"document_ids": self.document_ids}
        for i, pieces in enumerate(self.layers):
            for j, piece in enumerate(pieces):
                named |= {f"layers.{i}.{j}.{name}": t for name, t in piece.tensors.items()}
        return named

    @property
    def nbytes(self) -> int:
        """Bytes held by tensors (codes, scales, norms, positions, ids), whatever the agents."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def kept_per_head(self) -> tuple[tuple[int, ...], ...]:
        """Tokens held, for each layer and KV head."""
        counts = [[0] * self.geometry.n_kv_heads for _ in self.layers]
        for layer, pieces in zip(counts, self.layers, strict=True):
            for piece in pieces:
                heads = range(self.geometry.n_kv_heads) if piece.heads is None else piece.heads
                for head in heads:
                    layer[head] += piece.n_tokens
        return tuple(map(tuple, counts))

    @property
    def kept(self) -> tuple[int, ...]:
        """Tokens held in each layer (by its longest head, where heads differ)."""
        return tuple(map(max, self.kept_per_head))

    @property
    def bits_per_element(self) -> float:
        """Bits held a stored K or V number, everything counted."""
        numbers = sum(map(sum, self.kept_per_head)) * 2 * self.geometry.head_dim
        return self.nbytes * 8 / numbers

    def full_nbytes(self, bits: int = 16) -> int:
        """Bytes of one dense copy of the whole document at `bits` a number."""
        return self.n_tokens * self.geometry.elements_per_token * bits // 8

    def read(self, layer: int) -> tuple[Keys, Values]:
        """Dequantised keys and values [1, head, token, dim] of a layer with equally long heads."""
        pieces = self.layers[layer]
        if any(piece.heads is not None for piece in pieces):
            raise PoolError(
                f"the heads of layer {layer} hold different tokens, so it has no dense form; "
                "attend to it through pool.agent_cache(n)."
            )
        keys, values = dense(pieces)
        return keys[None], values[None]

    def to(self, devices: Sequence[torch.device]) -> "SharedKVPool":
        """The pool with each layer on its device."""
        moved = zip(self.layers, devices, strict=True)
        layers = tuple(tuple(piece.to(device) for piece in pieces) for pieces, device in moved)
        return replace(self, layers=layers)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file with a JSON header, whole or not at all; returns its path."""
        header = {
            "geometry": asdict(self.geometry),
            "n_tokens": self.n_tokens,
            "kept": self.kept_per_head,
            "owner": dict(self.owner),
            "layers": [[describe(piece) for piece in pieces] for pieces in self.layers],
        }
        file.write(Path(path), self.tensors, header)
        return Path(path)


def load(path: str | os.PathLike[str], cache_factory: CacheFactory | None = None) -> SharedKVPool:
    """The pool that `save` wrote, memory-mapped; whether the model fits is the caller's check."""
    header, tensors = file.read(Path(path))
    of_piece: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            _, i, j, rest = name.split(".", 3)
            of_piece.setdefault((int(i), int(j)), {})[rest] = tensor
    layers = tuple(
        tuple(restore(description, of_piece[i, j]) for j, description in enumerate(descriptions))
        for i, descriptions in enumerate(header["layers"])
    )
    return SharedKVPool(
        layers=layers,
        geometry=Geometry(**header["geometry"]),
        n_tokens=header["n_tokens"],
        document_ids=tensors["document_ids"],
        owner=header["owner"],
        cache_factory=cache_factory,
    )
