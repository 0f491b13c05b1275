"""What is paid once: prefill with and without eviction, encoding, and an agent's first token."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor

from polykv_lib import hf, presets
from polykv_lib.evict import H2O, EvictionPolicy, Plan, SnapKV
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.intervals import median_interval
from polykv_lib.pool import SharedKVPool, freeze
from polykv_lib.study.experiments.common import compressed, row
from polykv_lib.study.experiments.speed.decoding import Agents
from polykv_lib.study.experiments.speed.timing import interleaved_ms, ratio
from polykv_lib.study.record import Row

KEEP = 0.25  # share of the document that the evicting prefills keep
POLICIES: Final[dict[str, EvictionPolicy]] = {"SnapKV": SnapKV(), "H2O": H2O()}
Task = tuple[str, str, str | None]  # table, method and codec
PLAIN: Task = ("prefill", "plain", None)
AGAIN: Task = ("first_token", "prefill-again", None)


@dataclass(frozen=True, kw_only=True)
class Once:
    """One document that a model has read, and a pool of it for each codec."""

    model: Any
    ids: Int[Tensor, "1 token"]
    question: list[int]
    layers: Sequence[LayerKV]
    pools: Mapping[str, SharedKVPool]

    @classmethod
    def read(
        cls, model: Any, ids: Int[Tensor, "1 token"], question: list[int], codecs: Iterable[str]
    ) -> "Once":
        """Prefill and encode."""
        layers = hf.read_document(model, ids)
        pools = {codec: compressed(model, layers, ids, codec) for codec in codecs}
        return cls(model=model, ids=ids, question=question, layers=layers, pools=pools)

    def rows(self, rounds: int, at: Mapping[str, Any]) -> tuple[list[Row], list[dict[str, Any]]]:
        """Times, and every round's.

        Prefill and encoding also as multiples of the plain prefill in the same round; a first token
        also by how many times it comes sooner than after reading document and question again.
        """
        self.check_evicted()
        times_ms = interleaved_ms(self._tasks(), rounds, self.model.device)
        plain, again = times_ms[PLAIN], times_ms[AGAIN]
        rows, samples = list[Row](), list[dict[str, Any]]()
        for (table, method, codec), ms in times_ms.items():
            dims = {**at, "method": method, "codec": codec}
            rows.append(row(table, "ms", median_interval(ms), "ms", dims))
            if table == "first_token":
                rows.append(row(table, "times_sooner", ratio(again, ms), "x", dims))
            else:
                rows.append(row(table, "over_prefill", ratio(ms, plain), "x", dims))
            samples.append({**dims, "table": table, "ms": [round(t, 3) for t in ms]})
        return rows, samples

    def _tasks(self) -> dict[Task, Callable[[], Any]]:
        tasks: dict[Task, Callable[[], Any]] = {
            PLAIN: partial(hf.read_document, self.model, self.ids)
        }
        for name in POLICIES:
            tasks["prefill", name, None] = partial(self.evicted, name)
        for codec, pool in self.pools.items():
            tasks["encode", "encode", codec] = partial(self._encode, codec)
            tasks["first_token", "shared-pool", codec] = self._agent(pool, "shared-pool").asked
        tasks["first_token", "expanded-batch", "full"] = self._agent(
            self.pools["full"], "expanded-batch"
        ).asked
        tasks["first_token", "pooled-agent", "paper"] = self._agent(
            self.pools["paper"], "pooled-agent"
        ).asked
        tasks[AGAIN] = self._read_again
        return tasks

    def evicted(self, policy: str) -> Any:
        """One prefill, and what a policy keeps of it."""
        budget = max(1, round(KEEP * self.ids.shape[1]))
        plan = Plan.uniform(POLICIES[policy], budget, len(self.layers))
        return hf.evict_document(self.model, self.ids, [plan])

    def check_evicted(self) -> None:
        """Refuses an evicting prefill that changes what it keeps, or keeps another number.

        Raises:
            RuntimeError: one of the two.
        """
        budget = max(1, round(KEEP * self.ids.shape[1]))
        for name in POLICIES:
            layers, [kept] = self.evicted(name)
            same = all(map(_same, layers, self.layers))
            counts = {len(head) for heads in kept for head in heads}
            if not same or counts != {budget}:
                raise RuntimeError(
                    f"the prefill with {name} keeps {sorted(counts)} tokens of {budget}, and its "
                    f"keys and values are {'those' if same else 'not those'} of a plain prefill."
                )

    def _encode(self, codec: str) -> SharedKVPool:
        chosen = presets.codec(codec)
        return freeze(self.layers, keys=chosen.keys, values=chosen.values, n_sink=chosen.n_sink)

    def _agent(self, pool: SharedKVPool, method: str) -> Agents:
        return Agents(model=self.model, pool=pool, question=self.question, n=1, method=method)

    def _read_again(self) -> Tensor:
        whole = torch.cat([self.ids, torch.tensor([self.question])], dim=1)
        return hf.logits(self.model, hf.full_cache([]), whole, 0, keep=1)


def _same(one: LayerKV, other: LayerKV) -> bool:
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in pairs)
