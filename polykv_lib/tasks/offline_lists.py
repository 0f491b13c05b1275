"""Tasks over lists: labelled examples, and numbered paragraphs to find or to count."""

from collections.abc import Sequence
from random import Random
from typing import Final

from polykv_lib.tasks.base import Maker, Parts
from polykv_lib.tasks.passages import prose
from polykv_lib.tasks.texts import Article

N_CLASSES: Final = 4
PARAGRAPH_SENTENCES: Final = 2
UNIQUE_SHARE: Final = 0.6  # of the paragraphs to be counted


def labelled_examples(articles: Sequence[Article], random: Random) -> Maker:
    """`size` sentences, each with the title of its article; the next title is asked.

    The label is true by construction: it is where the sentence stands. No asked sentence holds a
    title.
    """
    titles = tuple(a.title for a in articles)
    drawn = [_drawn(a, random) for a in articles]
    asked = random.randrange(len(articles))
    query = next(s for s in drawn[asked] if not any(t.lower() in s.lower() for t in titles))
    examples = [
        (sentence, title)
        for round_ in zip(*drawn, strict=False)
        for sentence, title in random.sample(list(zip(round_, titles, strict=True)), len(articles))
        if sentence != query
    ]
    return lambda size: Parts(
        context="Name the article that each text is taken from. Here are some examples.\n\n"
        + "\n\n".join(f"Text: {s}\nArticle: {title}" for s, title in examples[:size]),
        question=f"\n\nText: {query}\nArticle:",
        answers=(titles[asked],),
        classes=titles,
    )


def paragraph_of_sentence(articles: Sequence[Article], random: Random) -> Maker:
    """`size` numbered paragraphs of as many articles; the last sentence of one is to be found."""
    own = [_paragraph(article, random) for article in articles]
    depth = random.random()

    def make(size: int) -> Parts:
        place = int(depth * size)
        return Parts(
            context=f"Here are {size} paragraphs from an encyclopaedia, each with its number at "
            f"its end.\n\n{_numbered(own[:size])}",
            question=f"\n\nWhich paragraph ends with this sentence?\n\n{own[place][-1]}\n\nPlease "
            "repeat the sentence with the number of its paragraph.",
            answer_prefix=f"{own[place][-1]} [Paragraph",
            answers=(f"Paragraph {place + 1}",),
        )

    return make


def repeated_paragraphs(articles: Sequence[Article], random: Random) -> Maker:
    """`size` numbered paragraphs, about 60 % of them different; how many is asked."""
    own = [_paragraph(article, random) for article in articles]
    order = random.getrandbits(64)

    def make(size: int) -> Parts:
        n_unique = max(1, int(UNIQUE_SHARE * size))
        shuffled = Random(order)
        repeats = shuffled.choices(own[:n_unique], k=size - n_unique)
        listed = [*own[:n_unique], *repeats]
        shuffled.shuffle(listed)
        return Parts(
            context="There are some paragraphs below, and some of them may be duplicates. "
            f"Determine how many unique paragraphs there are.\n\n{_numbered(listed)}",
            question="\n\nPlease enter the number of unique paragraphs after removing duplicates. "
            "Give the number only, such as 1, 2, 3, and so on.",
            answer_prefix="The number of unique paragraphs is",
            answers=(str(n_unique),),
        )

    return make


def _drawn(article: Article, random: Random) -> list[str]:
    """The article's sentences of middle length in random order."""
    fitting = [s for s in prose(article) if 8 <= len(s.split()) <= 30]
    return random.sample(fitting, len(fitting))


def _paragraph(article: Article, random: Random) -> list[str]:
    """Consecutive sentences of an article."""
    own = prose(article)
    start = random.randrange(len(own) - PARAGRAPH_SENTENCES + 1)
    return list(own[start : start + PARAGRAPH_SENTENCES])


def _numbered(paragraphs: Sequence[Sequence[str]]) -> str:
    return "\n\n".join(f"{' '.join(p)} [Paragraph {i}]" for i, p in enumerate(paragraphs, 1))
