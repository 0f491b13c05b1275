"""Answers of every timed method beside those of a plain path: a wrong method gets no time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib import hf
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.study.experiments.common import row
from polykv_lib.study.experiments.speed.decoding import Agents
from polykv_lib.study.experiments.speed.steps import FULL, Lane
from polykv_lib.study.record import Row

REFERENCE = "expanded-batch"  # an ordinary cache that holds what the pool decodes to
MAX_KL_NATS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def rows(
    lanes: Mapping[Lane, Agents],
    prompts: Sequence[list[int]],
    n_tokens: int,
    at: Mapping[str, Any],
) -> Iterator[Row]:
    """How each method's answers agree with the reference's, and the cost of its codec.

    `tokens_equal` is the share of the greedy answers' tokens before the first that differs;
    `kl_nats` compares the predictions along the reference's answers; `kl_full_nats` those of the
    reference with the full cache's, so it is what compression costs.

    Raises:
        RuntimeError: a method's predictions differ by more than its dtype's rounding.
    """
    full = replace(lanes[REFERENCE, FULL], method=REFERENCE)
    for codec in dict.fromkeys(codec for _, codec in lanes if codec):
        of_codec = {method: agents for (method, c), agents in lanes.items() if c == codec}
        reference = replace(next(iter(of_codec.values())), method=REFERENCE)
        expected = reference.answers(prompts, n_tokens)
        wanted = predictions(reference, prompts, expected)
        cost = kl_nats(predictions(full, prompts, expected), wanted).mean().item()
        for method, agents in of_codec.items():
            if method == REFERENCE:
                continue
            kl = kl_nats(wanted, predictions(agents, prompts, expected)).mean().item()
            check(method, codec, kl, agents.model.dtype)
            dims = {**at, "method": method, "codec": codec}
            equal = fmean(map(same_share, expected, agents.answers(prompts, n_tokens)))
            yield row("checks", "tokens_equal", equal, "share", dims, n=len(prompts))
            yield row("checks", "kl_nats", kl, "nats", dims, n=wanted.shape[0])
            yield row("checks", "kl_full_nats", cost, "nats", dims, n=wanted.shape[0])


def predictions(
    agents: Agents, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> Float[Tensor, "token vocab"]:
    """Logits of every token of given answers, each agent with a cache of its own."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        [(cache, _)] = replace(agents, n=1).open()
        fed = torch.tensor([prompt + answer[:-1]])
        logits = hf.logits(agents.model, cache, fed, cache.get_seq_length(), keep=len(answer))
        found.append(logits[0])
    return torch.cat(found)


def check(method: str, codec: str, kl: float, dtype: torch.dtype) -> None:
    """Refuses a method whose predictions are not the reference's."""
    if not kl <= MAX_KL_NATS[dtype]:
        raise RuntimeError(
            f"{method} ({codec}) differs from the plain path by a KL of {kl:.2g} nats, more than "
            f"{MAX_KL_NATS[dtype]:g} of rounding in {dtype}: it answers wrongly, so it has no time."
        )


def same_share(expected: Sequence[int], answer: Sequence[int]) -> float:
    """Tokens before the first difference, as a share."""
    pairs = list(zip(expected, answer, strict=True))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs)
