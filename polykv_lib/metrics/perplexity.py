"""Perplexity of a continuation that the model reads after a document it has already cached.

A continuation of c tokens is fed once (teacher forcing). Logits i predict token i + 1, so c - 1
tokens are scored and the first token never is: no logits of the document are kept. Both protocols
follow this shift; to score exactly n tokens, n + 1 tokens of continuation are needed.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

PREFIX_SHARE = 0.7  # paper A (arXiv:2604.24971) caches this share of a text
CHUNK = 128  # tokens whose full-vocabulary log-softmax is held at once


@dataclass(frozen=True, kw_only=True)
class Split:
    """How many tokens of a text are cached and how many are scored; one in between is only fed."""

    n_prefix: int
    n_scored: int


def paper_split(n_tokens: int) -> Split:
    """Paper A's 70/30 split: int(0.7 T) tokens cached, the first of the rest fed but not scored.

    Raises:
        ValueError: The text is too short to leave one cached and one scored token.
    """
    n_prefix = int(PREFIX_SHARE * n_tokens)
    n_scored = n_tokens - n_prefix - 1
    if n_prefix < 1 or n_scored < 1:
        raise ValueError(
            f"a text of {n_tokens} tokens leaves nothing to score after a 70/30 split; "
            "at least 4 tokens are needed."
        )
    return Split(n_prefix=n_prefix, n_scored=n_scored)


def token_nll(
    logits: Float[Tensor, "token vocab"], targets: Int[Tensor, " token"]
) -> Float[Tensor, " token"]:
    """-log p(target) of each token in nats, fp32, computed in chunks of tokens."""
    losses = [
        torch.nn.functional.cross_entropy(chunk.float(), wanted, reduction="none")
        for chunk, wanted in zip(
            torch.split(logits, CHUNK), torch.split(targets, CHUNK), strict=True
        )
    ]
    return torch.cat(losses)


def continuation_nll(
    logits: Float[Tensor, "fed vocab"], continuation: Int[Tensor, " fed"]
) -> Float[Tensor, " scored"]:
    """NLL in nats of tokens 1.. of a continuation fed whole; the last logits are unused."""
    return token_nll(logits[:-1], continuation[1:])


def perplexity(mean_nll: float) -> float:
    """Perplexity, exp(mean NLL), from a mean negative log-likelihood in nats."""
    return math.exp(mean_nll)


def delta_pct(mean_nll_delta: float) -> float:
    """Change of perplexity in per cent, from the mean difference of NLL (compressed - full).

    Over documents of equal weight this is the ratio of geometric-mean perplexities, minus one.
    """
    return 100 * math.expm1(mean_nll_delta)
