"""Local articles cut into sentences, paragraphs and haystacks, in two splits that share none."""

import re
from functools import cache
from typing import Final

from polykv_lib.tasks.base import Split
from polykv_lib.tasks.texts import Article, articles

MIN_CHARS: Final = 6_000
CALIBRATION_EVERY: Final = 3  # each third article calibrates, the others test

_SENTENCE_END: Final = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"')\u201d\u2019]))\s+(?=[\"'(\u201c\u2018]?[A-Z])"
)
_ABBREVIATION: Final = re.compile(
    r"(?:^|[\s(])(?:[A-Z]|[A-Za-z]\.[A-Za-z]|Mr|Mrs|Ms|Dr|St|Mt|Jr|Sr|vs|No|c|ca|cf|etc|approx"
    r"|Lt|Col|Gen|Capt|Sgt|Maj|Gov|Sen|Rep|Prof|Rev|Inc|Ltd|Co|Jan|Feb|Aug|Sept|Oct|Nov|Dec)\.$"
)


@cache
def local_articles(split: Split) -> tuple[Article, ...]:
    """Articles of one split, long enough to ask about, in the order of the dump.

    The third, sixth, … article belongs to calibration, every other one to test. Letters of the
    alphabet, lists and disambiguation pages are passed over.
    """
    is_calibration = split == "calibration"
    return tuple(
        article
        for i, article in enumerate(_all_articles(), 1)
        if (i % CALIBRATION_EVERY == 0) is is_calibration and _is_prose(article.title)
    )


@cache
def _all_articles() -> tuple[Article, ...]:
    return tuple(articles(min_chars=MIN_CHARS))  # seconds, so once for both splits


def sentences(text: str) -> list[str]:
    """Sentences by a rule: a stop, white space, a capital; initials and abbreviations go on."""
    found: list[str] = []
    for piece in _SENTENCE_END.split(" ".join(text.split())):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += f" {piece}"
        else:
            found.append(piece)
    return [sentence for sentence in found if sentence]


def paragraphs(text: str, *, min_words: int = 30) -> list[str]:
    """Paragraphs of prose: no headings, lists or scraps shorter than `min_words`."""
    lines = (line.strip() for line in text.split("\n"))
    return [
        line
        for line in lines
        if len(line.split()) >= min_words
        and line[-1] in ".!?\"')\u201d\u2019"
        and line[0] not in "*#:;|{"
    ]


def _is_prose(title: str) -> bool:
    return len(title) > 1 and not title.startswith("List of") and "(disambig" not in title


@cache
def prose(article: Article) -> tuple[str, ...]:
    """All sentences of an article's paragraphs, in order."""
    return tuple(s for paragraph in paragraphs(article.text) for s in sentences(paragraph))
