"""RULER (arXiv:2404.06654): its 13 tasks, generated here for any length and tokenizer.

Same templates, needles, counts and metrics as the published generators. What differs: random
numbers are our own, each item is fitted to the length by itself, sentences are found by a rule
instead of a trained model, prose comes from local encyclopaedia articles unless essays are asked
for (each item begins with another article), and the solved example of `vt` takes at most a quarter
of the length (published: up to 500 tokens), because items here may be as short as 512 tokens.
"""

from functools import cache
from random import Random
from typing import Final, Literal

from polykv_lib.tasks import ruler_parts, ruler_qa
from polykv_lib.tasks.base import (
    CountTokens,
    Item,
    Maker,
    Split,
    check_request,
    generator,
    longest,
)
from polykv_lib.tasks.passages import local_articles, prose, sentences
from polykv_lib.tasks.ruler_parts import Needles

ESSAYS: Final = "baber/paul_graham_essays"
EXAMPLE_TOKENS: Final = 500  # of vt
MAX_PIECES: Final = 200_000
CHARS_PER_TOKEN: Final = 8  # more than any tokenizer needs for a token of English

NEEDLE_TASKS: Final = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(),
    "niah_single_3": Needles(values="uuids"),
    "niah_multikey_1": Needles(n_keys=4),
    "niah_multikey_2": Needles(haystack="needles"),
    "niah_multikey_3": Needles(haystack="needles", keys="uuids", values="uuids"),
    "niah_multivalue": Needles(n_values=4),
    "niah_multiquery": Needles(n_queries=4),
}
_CATEGORIES: Final = {
    **dict.fromkeys(NEEDLE_TASKS, "needle"),
    "vt": "variable tracking",
    "cwe": "word extraction",
    "fwe": "word extraction",
    "qa_1": "question answering",
    "qa_2": "question answering",
}
TASKS: Final = tuple(_CATEGORIES)
MAX_NEW_TOKENS: Final = {
    **dict.fromkeys(NEEDLE_TASKS, 128),
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
}


def items(
    task: str,
    *,
    n: int,
    length: int,
    count_tokens: CountTokens,
    split: Split = "test",
    seed: int = 42,
    haystack: Literal["articles", "essays"] = "articles",
    max_new_tokens: int | None = None,
) -> list[Item]:
    """`n` items of at most `length` tokens, as long as their pieces allow.

    Args:
        task: One of `TASKS`.
        n: How many; the first items do not depend on it.
        length: Tokens of context, question, answer prefix and answer together; a chat template's
            tokens come on top.
        count_tokens: Tokens of a text by the evaluated model's tokenizer, no special tokens.
        split: Calibration and test share no article, no question and no random numbers
            (documents that do not help in qa_1 and qa_2 may be in both).
        seed: Another seed, other items.
        haystack: Prose of the needle tasks: local articles, or the published essays (online; both
            splits then read the same prose).
        max_new_tokens: Tokens of the answer, if not the published number.

    Raises:
        ValueError: An unknown task or split, or a length that holds no item.
        ConnectionError: qa_1, qa_2 or essays without a network.
    """
    check_request(task, TASKS, n, split)
    answer_tokens = MAX_NEW_TOKENS[task] if max_new_tokens is None else max_new_tokens

    def item(index: int) -> Item:
        make, least, most, source = _maker(task, index, length, count_tokens, split, seed, haystack)

        def of(size: int) -> Item:
            parts = make(size)
            return Item(
                id=f"ruler/{task}/{length}/{split}/{seed}/{index:03d}",
                suite="ruler",
                task=task,
                category=_CATEGORIES[task],
                context=parts.context,
                question=parts.question,
                answer_prefix=parts.answer_prefix,
                answers=parts.answers,
                metric="string_match_part" if task.startswith("qa") else "string_match_all",
                max_new_tokens=answer_tokens,
                split=split,
                source=source,
            )

        most = min(most, least + length)  # every piece has a token at least
        return longest(of, sizes=range(least, most + 1), length=length, count_tokens=count_tokens)

    return [item(index) for index in range(n)]


def _maker(
    task: str,
    index: int,
    length: int,
    count_tokens: CountTokens,
    split: Split,
    seed: int,
    haystack: str,
) -> tuple[Maker, int, int, str]:
    """Maker, least and greatest size, and source of one item."""
    random = generator("ruler", task, split, seed, index)
    if task in NEEDLE_TASKS:
        shape = NEEDLE_TASKS[task]
        straw, source = (
            _straw(index, length, split, haystack) if shape.haystack == "prose" else ((), "")
        )
        make = ruler_parts.needles(shape, random, straw)
        return make, 1, len(straw) or MAX_PIECES, source or f"generated ({shape.haystack})"
    if task == "vt":
        size = _example_size(min(EXAMPLE_TOKENS, length // 4), count_tokens)
        return ruler_parts.variable_chain(random, size), 5, MAX_PIECES, "generated (noise)"
    if task == "cwe":
        return ruler_parts.common_words(random, length), 11, 8_000, "generated (wonderwords)"
    if task == "fwe":
        # From 60 words on, ranks 2 to 5 all differ in how often they stand: 9, 4, 2 and 1 times.
        return ruler_parts.frequent_words(random, length), 60, MAX_PIECES, "generated (coded words)"
    found, documents = ruler_qa.questions(task, split)
    question = found[(seed + index) % len(found)]
    make, least = ruler_qa.question_among_documents(question, documents, random)
    return make, least, len(documents), ruler_qa.DATA_SETS[task][0]


def _straw(index: int, length: int, split: Split, haystack: str) -> tuple[list[str], str]:
    """Sentences for more than `length` tokens, beginning with an own article, and their source."""
    if haystack == "essays":
        return _essays(), ESSAYS
    known = local_articles(split)
    start = index % len(known)
    straw: list[str] = []
    n_chars = 0
    for sentence in (s for a in known[start:] + known[:start] for s in prose(a)):
        straw.append(sentence)
        n_chars += len(sentence)
        if n_chars > CHARS_PER_TOKEN * length:
            break
    return straw, known[start].source


@cache
def _essays() -> list[str]:
    from datasets import load_dataset

    try:
        return sentences(" ".join(load_dataset(ESSAYS, split="train")["text"]))
    except Exception as error:  # the hub client has no common base class for "no network"
        raise ConnectionError(
            f"haystack='essays' needs {ESSAYS} through `datasets`, which is neither cached nor "
            f"reachable ({type(error).__name__}); haystack='articles' needs no network."
        ) from error


def _example_size(limit: int, count_tokens: CountTokens) -> int:
    """Noise pieces of vt's solved example, so that it has at most `limit` tokens (one at least)."""
    piece = count_tokens(f"{ruler_parts.NOISE}\n")
    parts = ruler_parts.variable_chain(Random(0), 1)(0)
    bare = count_tokens(parts.context.split("\n\nMemorize")[0])  # the example, with one piece
    return max(1, 1 + (limit - bare) // piece)
