"""What N agents on one document weigh and how long their step takes, on a real model.

Methods: "shared-pool" (one batch that reads the pool), "expanded-batch" (one batch over an ordinary
cache with a dense copy an agent), "pooled-agent" (the published way: every agent alive with its own
decompressed cache, one after another) and "no-document" (the same batch without any).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from polykv_lib import hf
from polykv_lib.metrics.intervals import Interval, median_interval
from polykv_lib.metrics.memory import peak_memory
from polykv_lib.pool import SharedKVPool

ANSWER_TOKENS: Final = 64  # `ask`'s default; an agent is weighed after an answer of this length
PEAK_TOKENS: Final = 4  # new tokens while the peak is taken: it is reached at the first ones
DENSE: Final = "expanded-batch"  # the only method with a document that needs no pool
METHODS: Final = ("shared-pool", DENSE, "pooled-agent", "no-document")


@dataclass(frozen=True, kw_only=True)
class Agents:
    """N agents that ask the same question about one document."""

    model: Any
    pool: SharedKVPool
    question: list[int]
    n: int

    def open(self, method: str) -> list[tuple[Any, int]]:
        """Fresh caches, each with the number of agents that share it."""
        match method:
            case "shared-pool":
                return [(self.pool.agent_cache(self.n), self.n)]
            case "expanded-batch":
                return [(hf.expanded_cache(self.pool, self.n), self.n)]
            case "pooled-agent":
                return [(hf.expanded_cache(self.pool), 1) for _ in range(self.n)]
            case "no-document":
                return [(hf.full_cache([]), self.n)]
        raise ValueError(f"no method {method!r}; choose one of: {', '.join(METHODS)}.")

    def n_seen(self, method: str) -> int:
        """Tokens that lie before the agents' own."""
        return 0 if method == "no-document" else self.pool.n_tokens

    def feed(self, caches: Sequence[tuple[Any, int]], ids: Sequence[int], n_seen: int) -> None:
        """Every agent reads the same tokens after the `n_seen` before them."""
        for cache, rows in caches:
            hf.logits(self.model, cache, torch.tensor([ids]).expand(rows, -1), n_seen)

    def suffix(self) -> tuple[float, float]:
        """Bytes an agent on the shared pool wrote, and bytes its cache holds, after an answer.

        Held bytes are those of the tensors' whole storages: room reserved ahead counts.
        """
        caches = self.open("shared-pool")
        [(cache, _)] = caches
        self.feed(caches, self.question, self.pool.n_tokens)
        self.feed(caches, self.question[:1] * (ANSWER_TOKENS - 1), cache.get_seq_length())
        return cache.nbytes / self.n, held_bytes(cache) / self.n

    def peak(self, method: str) -> tuple[int, str]:
        """Highest memory of the method above the model, its pool included, and how it was read."""
        with peak_memory(self.model.device) as peak:
            caches = self.open(method)
            for cache, rows in caches:
                hf.greedy(
                    self.model,
                    cache,
                    [self.question] * rows,
                    n_seen=self.n_seen(method),
                    max_new_tokens=PEAK_TOKENS,
                )
        return peak.added_bytes + (0 if method == DENSE else self.pool.nbytes), peak.source

    def step_ms(self, rounds: int) -> Iterator[tuple[str, Interval | None]]:
        """Time of one new token for all agents: each method's turn comes once a round.

        A method whose caches do not fit the GPU beside the others has no time.
        """
        opened: dict[str, list[tuple[Any, int]]] = {}
        for method in METHODS:
            try:
                opened[method] = self.open(method)
                self.feed(opened[method], self.question, self.n_seen(method))
            except torch.OutOfMemoryError:
                opened.pop(method, None)
        times_ms: dict[str, list[float]] = {method: [] for method in opened}
        for i in range(1 + rounds):  # the first round warms up
            for method, caches in opened.items():
                n_seen = self.n_seen(method) + len(self.question) + i
                self._synchronize()
                start_s = time.perf_counter()
                self.feed(caches, self.question[:1], n_seen)
                self._synchronize()
                times_ms[method].append(1000 * (time.perf_counter() - start_s))
        for method in METHODS:
            yield method, median_interval(times_ms[method][1:]) if method in opened else None

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def held_bytes(cache: Any) -> int:
    """Bytes of every storage that a cache's layers hold themselves; a shared pool is not theirs."""
    tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
