"""What a batch of agents can read: the full cache, a pool, another document, or nothing."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polykv_lib import hf
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.study.experiments.common import compressed


@dataclass(frozen=True, kw_only=True)
class Reader:
    """`open(n)` gives a cache for n agents, in which `n_seen` tokens lie; one prompt an agent.

    A batch of n is the first n agents.
    """

    control: str
    codec: str
    open: Callable[[int], Any]
    n_seen: int
    prompts: list[list[int]]

    def answer(
        self, model: Any, n: int, max_new_tokens: int, stop_ids: Set[int]
    ) -> list[list[int]]:
        """The greedy answers of n agents in one batch."""
        return hf.greedy(
            model,
            self.open(n),
            self.prompts[:n],
            n_seen=self.n_seen,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )

    def nll(self, model: Any, agent: int, answer: list[int]) -> float | None:
        """Mean NLL in nats of an answer's tokens after the agent's question; None for no tokens."""
        if not answer:
            return None
        prompt = self.prompts[agent]
        fed = torch.tensor([prompt + answer[:-1]])
        logits = hf.logits(model, self.open(1), fed, self.n_seen)[0, len(prompt) - 1 :]
        return token_nll(logits, torch.tensor(answer, device=logits.device)).mean().item()


def readers(
    model: Any,
    tokenizer: Any,
    document: Int[Tensor, "1 token"],
    stranger: Int[Tensor, "1 token"],
    asked: Sequence[str],
    codecs: Sequence[str],
) -> Iterator[Reader]:
    """The full cache first, then a pool for each codec, then the two controls.

    The controls are "unrelated-document" (the `stranger`, in full precision) and "no-document".
    """
    prompts = [hf.question_ids(tokenizer, question) for question in asked]
    layers, n_seen = hf.read_document(model, document), document.shape[1]
    yield _in_full("full", layers, n_seen, prompts)
    for codec in codecs:
        pool = compressed(model, layers, document, codec)
        yield Reader(
            control="pool", codec=codec, open=pool.agent_cache, n_seen=n_seen, prompts=prompts
        )
    yield _in_full(
        "unrelated-document", hf.read_document(model, stranger), stranger.shape[1], prompts
    )
    alone = [hf.question_ids(tokenizer, question, turn_is_open=False) for question in asked]
    yield _in_full("no-document", [], 0, alone)


def _in_full(
    control: str, layers: Sequence[LayerKV], n_seen: int, prompts: list[list[int]]
) -> Reader:
    return Reader(
        control=control,
        codec="full",
        open=lambda n: hf.full_cache(layers, n),
        n_seen=n_seen,
        prompts=prompts,
    )
