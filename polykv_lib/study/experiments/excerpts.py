"""Which tokens are cached and which are scored: the two perplexity protocols.

"paper-70-30" (arXiv:2604.24971): the first 70 % of a text are cached, the rest is scored, so a
longer prefix also means another continuation. "fixed-window": the same tokens are scored after
prefixes of several lengths that all end where the window begins, so only the prefix changes. That
place is the same in every run, so that runs with different prefixes score the same tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from polykv_lib.metrics.perplexity import PREFIX_SHARE, paper_split
from polykv_lib.study.experiments.common import Document, documents, tokenised
from polykv_lib.tasks.texts import wikitext2

Protocol = Literal["paper-70-30", "fixed-window"]
WINDOW_START = (
    5_376  # past every prefix of the study, and past the text that a 70/30 split of 4,096 needs
)


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """A prefix to compress, and the window after it: the first token is fed, the rest scored."""

    protocol: Protocol
    title: str
    corpus: str
    prefix: Int[Tensor, "1 prefix"]
    window: Int[Tensor, "1 window"]

    @property
    def n_prefix(self) -> int:
        """Tokens in the pool."""
        return self.prefix.shape[1]


def excerpts(
    protocol: Protocol,
    tokenizer: Any,
    *,
    prefixes: Sequence[int],
    n_docs: int,
    n_scored: int,
    opening: Sequence[int],
) -> Iterator[Excerpt]:
    """Every document with every prefix length, document by document; one set of long articles.

    Args:
        protocol: "fixed-window" scores `n_scored` tokens; "paper-70-30" 3/7 of the prefix, and adds
            WikiText-2 at the paper's own length where a hub (or its cache) has it.
        tokenizer: Of the model that will read them.
        prefixes: Tokens in the pool, special tokens included.
        n_docs: How many articles.
        n_scored: Tokens scored by "fixed-window".
        opening: Special tokens that the model expects before a text.
    """
    start = max(WINDOW_START, *prefixes)
    needed = max(start + n_scored + 1, paper_length(max(prefixes)))
    for text in documents(tokenizer, n_docs=n_docs, min_tokens=needed):
        for n_prefix in prefixes:
            if protocol == "fixed-window":
                yield fixed_window(text, n_prefix, start, n_scored, opening)
            else:
                yield paper_excerpt(text, paper_length(n_prefix), opening)
    if protocol == "fixed-window":
        return
    try:
        text = tokenised(tokenizer, wikitext2(), "WikiText-2")
    except ConnectionError:
        return
    yield paper_excerpt(text, len(opening) + len(text.ids), opening)


def passages(
    tokenizer: Any, *, n_passages: int, n_tokens: int
) -> Iterator[tuple[Document, Int[Tensor, " token"]]]:
    """Disjoint passages of `n_tokens` tokens: the first of every article, then the second ones.

    Raises:
        ValueError: The collection does not hold so many.
    """
    long = documents(tokenizer, n_docs=None, min_tokens=n_tokens)
    most = max((len(text.ids) // n_tokens for text in long), default=0)
    found = [
        (text, text.ids[i * n_tokens : (i + 1) * n_tokens])
        for i in range(most)
        for text in long
        if len(text.ids) >= (i + 1) * n_tokens
    ]
    if len(found) < n_passages:
        raise ValueError(
            f"{n_passages} passages of {n_tokens:,} tokens are needed, but there are {len(found)}; "
            "use fewer passages or fewer tokens."
        )
    return iter(found[:n_passages])


def paper_length(n_prefix: int) -> int:
    """The longest text, in tokens, of which paper A's split caches exactly `n_prefix`."""
    n_tokens = math.ceil((n_prefix + 1) / PREFIX_SHARE)
    while paper_split(n_tokens).n_prefix > n_prefix:
        n_tokens -= 1
    return n_tokens


def paper_excerpt(text: Document, n_tokens: int, opening: Sequence[int] = ()) -> Excerpt:
    """The first `n_tokens` of a text, special tokens included, split 70/30."""
    ids = torch.cat((_tensor(opening), text.ids))[:n_tokens]
    n_prefix = paper_split(n_tokens).n_prefix
    return Excerpt(
        protocol="paper-70-30",
        title=text.title,
        corpus=text.corpus,
        prefix=ids[None, :n_prefix],
        window=ids[None, n_prefix:],
    )


def fixed_window(
    text: Document, n_prefix: int, start: int, n_scored: int, opening: Sequence[int] = ()
) -> Excerpt:
    """Tokens start .. start + n_scored of a text, after the `n_prefix` tokens before them.

    n_scored + 1 tokens make the window, since its first token is fed and not scored. Special tokens
    take the first places of the prefix.
    """
    before = text.ids[start - n_prefix + len(opening) : start]
    return Excerpt(
        protocol="fixed-window",
        title=text.title,
        corpus=text.corpus,
        prefix=torch.cat((_tensor(opening), before))[None],
        window=text.ids[None, start : start + n_scored + 1],
    )


def _tensor(ids: Sequence[int]) -> Int[Tensor, " token"]:
    return torch.tensor(ids, dtype=torch.int64)
