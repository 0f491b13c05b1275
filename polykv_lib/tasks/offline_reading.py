"""Reading tasks over local articles: facts stated in one text or among several, leads, prose."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Final

from polykv_lib.tasks.base import Maker, Parts
from polykv_lib.tasks.passages import paragraphs, prose, sentences
from polykv_lib.tasks.texts import Article

N_ARTICLES: Final = 4  # passages to search in
MAX_LEAD_WORDS: Final = 100
CONTINUED_WORDS: Final = 80  # at least, which are more than the 64 tokens that are scored
_FACT: Final = re.compile(r"(?<=[a-z,] )(?:1\d{3}|20\d{2}|[A-Z][a-z]+(?: [A-Z][a-z]+)*)\b")
_WORD: Final = re.compile(r"\w+")
_WORDS_BEFORE: Final = range(7, 31)
_WORDS_NAMED: Final = 5


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A sentence of an article that states a year or a name after some words."""

    place: int  # index of the sentence in `prose(article)`
    before: str
    stated: str

    @property
    def opening(self) -> str:
        """The sentence's first words, quoted, by which a question names it."""
        return f'"{" ".join(self.before.split()[:_WORDS_NAMED])}"'


@cache
def facts(article: Article) -> tuple[Fact, ...]:
    """Facts whose year or name the article's sentences state once, in order."""
    own = prose(article)
    times = Counter(word for sentence in own for word in _WORD.findall(sentence))
    found = []
    for place, sentence in enumerate(own):
        for match in _FACT.finditer(sentence):
            before = sentence[: match.start()].rstrip()
            is_stated_once = any(times[word] == 1 for word in _WORD.findall(match[0]))
            if is_stated_once and len(before.split()) in _WORDS_BEFORE:
                found.append(Fact(place=place, before=before, stated=match[0]))
                break
    return tuple(found)


def fact_in_article(article: Article, random: Random) -> Maker:
    """`size` sentences of an article, one of which states what is asked."""
    fact = random.choice(facts(article))
    depth = random.random()
    return lambda size: Parts(
        context="Read the following text and quote a sentence of it.\n\n"
        f"{article.title}\n\n{_window(article, fact.place, size, depth)}",
        question=f"\n\nQuote the sentence of the text that begins with {fact.opening}.",
        answer_prefix=fact.before,
        answers=(fact.stated,),
    )


def fact_among_articles(articles: Sequence[Article], random: Random) -> Maker:
    """`size` sentences of each article; a sentence of one of them states what is asked."""
    chosen = random.randrange(len(articles))
    places = [random.randrange(len(prose(a))) for a in articles]
    depths = [random.random() for _ in articles]
    fact = random.choice(facts(articles[chosen]))
    places[chosen] = fact.place

    def make(size: int) -> Parts:
        passages = [
            f"Passage {i}: {article.title}\n{_window(article, place, size, depth)}"
            for i, (article, place, depth) in enumerate(
                zip(articles, places, depths, strict=True), 1
            )
        ]
        return Parts(
            context="Read the following passages and quote a sentence of one of them.\n\n"
            + "\n\n".join(passages),
            question=f"\n\nQuote the sentence of the passage on {articles[chosen].title} that "
            f"begins with {fact.opening}.",
            answer_prefix=fact.before,
            answers=(fact.stated,),
        )

    return make


def lead(article: Article) -> str:
    """The sentences before the first heading, at most about a hundred words of them."""
    opening = article.text.split("\n\n")[:3]
    kept: list[str] = []
    for sentence in (s for p in paragraphs("\n\n".join(opening)) for s in sentences(p)):
        if kept and len(" ".join([*kept, sentence]).split()) > MAX_LEAD_WORDS:
            break
        kept.append(sentence)
    return " ".join(kept)


def body_of(article: Article, reference: str) -> Maker:
    """The first `size` sentences after those of the lead, to be summarised as the lead does."""
    own = [sentence for sentence in prose(article) if sentence not in reference]
    return lambda size: Parts(
        context="Read the following part of an encyclopaedia article.\n\n"
        f"{article.title}\n\n{' '.join(own[:size])}",
        question="\n\nWrite the opening paragraph of the article, which says what "
        f"{article.title} is and sums up the most important points.\n\nOpening paragraph:",
        answers=(reference,),
    )


def next_sentences(article: Article, random: Random) -> Maker:
    """`size` sentences of an article, and those after them as the reference: nothing is asked.

    The first word of what follows stands in the question's place, because something must be read
    after the context.
    """
    own = prose(article)
    words, last = 0, len(own)
    while words < CONTINUED_WORDS:
        last -= 1
        words += len(own[last].split())
    place = random.randint(last * 2 // 3, last)  # so that what stands before it can be long
    end, words = place, 0
    while words < CONTINUED_WORDS:
        words += len(own[end].split())
        end += 1
    first, rest = " ".join(own[place:end]).split(" ", 1)
    return lambda size: Parts(
        context=f"{article.title}\n\n{' '.join(own[max(0, place - size) : place])}",
        question=f" {first}",
        answers=(f" {rest}",),
    )


def _window(article: Article, place: int, size: int, depth: float) -> str:
    """`size` consecutive sentences; the one at `place` stands at about `depth` of them."""
    own = prose(article)
    start = min(max(0, place - int(depth * size)), max(0, len(own) - size))
    return " ".join(own[start : start + size])
