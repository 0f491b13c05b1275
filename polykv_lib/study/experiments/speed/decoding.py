"""What N agents on one document weigh and how long their step takes, on a real model.

Methods: "shared-pool" (one batch that reads the pool), "expanded-batch" (one batch over an ordinary
cache with a dense copy an agent), "pooled-agent" (the published way: every agent alive with its own
decompressed cache, one after another) and "no-document" (the same batch without any). Two of them
also come "-folded": torch's kernel gets the query heads of a KV head as rows, where the stock
attention of transformers is several times slower on a CPU; and "-native": this library's kernel
reads the same dense cache.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib import hf
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.memory import peak_memory
from polykv_lib.pool import SharedKVPool
from polykv_lib.study.experiments.speed.timing import interleaved_ms

ANSWER_TOKENS: Final = 64  # `ask`'s default; an agent is weighed after an answer of this length
PEAK_TOKENS: Final = 4  # new tokens while the peak is taken: it is reached at the first ones
DENSE: Final = ("expanded-batch", "expanded-folded", "expanded-native")  # that need no pool
POOLED: Final = ("shared-pool", "pooled-agent")  # that keep a pool beside their caches
METHODS: Final = ("shared-pool", "expanded-batch", "pooled-agent", "no-document")
OURS: Final = tuple(
    f"{m}-{how}" for m in ("expanded", "no-document") for how in ("folded", "native")
)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Agents:
    """N agents that ask the same question about one document, by one method."""

    model: Any
    pool: SharedKVPool
    question: list[int]
    n: int
    method: str = "shared-pool"

    def open(self) -> list[tuple[Any, int]]:
        """Fresh caches, each with the number of agents that share it."""
        match self.method:
            case "shared-pool":
                return [(self.pool.agent_cache(self.n), self.n)]
            case "expanded-batch":
                return [(hf.expanded_cache(self.pool, self.n), self.n)]
            case "expanded-folded" | "expanded-native":
                dense = [LayerKV(keys=k, values=v) for k, v in map(self.pool.read, self._layers)]
                return [(self._folded(dense), self.n)]
            case "pooled-agent":
                return [(hf.expanded_cache(self.pool), 1) for _ in range(self.n)]
            case "no-document":
                return [(hf.full_cache([]), self.n)]
            case "no-document-folded" | "no-document-native":
                return [(self._folded([]), self.n)]
        known = ", ".join((*METHODS, *OURS))
        raise ValueError(f"no method {self.method!r}; choose one of: {known}.")

    def _folded(self, layers: Sequence[LayerKV]) -> hf.AgentCache:
        by_torch = self.method.endswith("-folded")
        return hf.folded_cache(layers, self.pool.geometry, self.n, by_torch=by_torch)

    def asked(self) -> list[tuple[Any, int]]:
        """Fresh caches in which every agent has read the question."""
        caches = self.open()
        self.feed(caches, self.question)
        return caches

    def feed(
        self, caches: Sequence[tuple[Any, int]], ids: Sequence[int]
    ) -> list[Float[Tensor, "agent one vocab"]]:
        """Every agent reads the same tokens; the logits of the last one, cache by cache."""
        return [
            hf.logits(
                self.model,
                cache,
                torch.tensor([ids]).expand(rows, -1),
                cache.get_seq_length(),
                keep=1,
            )
            for cache, rows in caches
        ]

    def answers(self, prompts: Sequence[list[int]], n_tokens: int) -> list[list[int]]:
        """Greedy answers of so many tokens to different prompts, one an agent."""
        answers: list[list[int]] = []
        n_seen = 0 if self.method.startswith("no-document") else self.pool.n_tokens
        for cache, rows in replace(self, n=len(prompts)).open():
            asked = prompts[len(answers) : len(answers) + rows]
            answers += hf.greedy(self.model, cache, asked, n_seen=n_seen, max_new_tokens=n_tokens)
        return answers

    def suffix(self) -> tuple[float, float]:
        """Bytes an agent on the shared pool wrote, and bytes its cache holds, after an answer.

        Held bytes are those of the tensors' whole storages: room reserved ahead counts.
        """
        caches = self.asked()
        [(cache, _)] = caches
        self.feed(caches, self.question[:1] * (ANSWER_TOKENS - 1))
        return cache.nbytes / self.n, held_bytes(cache) / self.n

    def peak(self) -> tuple[int, str]:
        """Highest memory of the method above the model, and how it was read.

        A pool that the method reads was there before and is included.
        """
        with peak_memory(self.model.device) as peak:
            self.answers([self.question] * self.n, PEAK_TOKENS)
        return peak.added_bytes + self._pool_bytes, peak.source

    def held(self) -> int:
        """Bytes that pool and caches hold once every agent has read the question."""
        return self._pool_bytes + sum(held_bytes(cache) for cache, _ in self.asked())

    @property
    def n_copies(self) -> int:
        """Dense copies of the document alive at once."""
        return self.n if self.method in (*DENSE, "pooled-agent") else 0

    @property
    def _pool_bytes(self) -> int:
        return self.pool.nbytes if self.method in POOLED else 0

    @property
    def _layers(self) -> range:
        return range(len(self.pool.layers))


def step_ms(agents: Mapping[K, Agents], rounds: int) -> dict[K, list[float]]:
    """Milliseconds of one new token for all agents of each entry, interleaved, after the question.

    An entry whose caches do not fit the memory beside the others is left out.
    """
    steps: dict[K, Callable[[], Any]] = {}
    for name, some in agents.items():
        with suppress(torch.OutOfMemoryError):
            steps[name] = _step(some, some.asked())
    [device] = {some.model.device for some in agents.values()}
    return interleaved_ms(steps, rounds, device)


def _step(agents: Agents, caches: Sequence[tuple[Any, int]]) -> Callable[[], Any]:
    return lambda: agents.feed(caches, agents.question[:1])


def held_bytes(cache: Any) -> int:
    """Bytes of every storage that a cache's layers hold themselves; a shared pool is not theirs."""
    tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
