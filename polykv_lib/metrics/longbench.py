"""LongBench's metrics (arXiv:2308.14508), between 0 and 1, after its published `metrics.py`.

Scores equal the published code's, except ROUGE (see `rouge_l`).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Protocol

_PUNCTUATION: Final = frozenset(string.punctuation)
_PUNCTUATION_ZH: Final = _PUNCTUATION | frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")


class Tokenizer(Protocol):
    """What rouge-score asks of a tokenizer."""

    def tokenize(self, text: str) -> list[str]: ...


def qa_f1(answer: str, reference: str) -> float:
    """F1 over bags of words, after dropping case, punctuation and English articles."""
    return _f1(_words(answer), _words(reference))


def qa_f1_zh(answer: str, reference: str) -> float:
    """F1 over bags of jieba's words, after dropping punctuation."""
    return _f1(_words_zh(answer), _words_zh(reference))


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L F1 over words as written, by unions of sentence-wise subsequences (rougeLsum).

    LongBench uses the package `rouge` 1.0.1, which cuts sentences at "." as done here, but counts
    each distinct word once. On 72 pairs of encyclopaedia paragraphs rouge-score's value lies 0.04
    above that package's on average (mean distance 0.05); its plain rougeL lies 0.04 below (0.06).
    An empty side scores 0, as in the published code, which catches the package's error.
    """
    if not answer.strip() or not reference.strip():
        return 0.0
    scores = _rouge_scorer().score(_lines(reference), _lines(answer))
    return float(scores["rougeLsum"].fmeasure)


def rouge_l_zh(answer: str, reference: str) -> float:
    """`rouge_l` over jieba's words."""
    return rouge_l(" ".join(_cut(answer)), " ".join(_cut(reference)))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the answer) where the reference is one of them, else 0.

    Names that are parts of the reference do not count against it. The published code shortens the
    list while it walks over it, so that the name after a dropped one escapes the check; as here.
    Its fallback to the most similar class is never reached, and is absent here.
    """
    named = [name for name in classes if name in answer]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def retrieval(answer: str, reference: str) -> float:
    """Share of the answer's integers that are the number in "Paragraph 7" or "段落7"."""
    wanted = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    if wanted is None:
        raise ValueError(f"reference {reference!r} names no paragraph; expected 'Paragraph 7'.")
    return count(answer, wanted[1])


def count(answer: str, reference: str) -> float:
    """Share of the answer's integers that equal the reference; an answer without any scores 0."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(answer: str, reference: str) -> float:
    """Similarity of the first line that holds no backtick, "#" or "//", in whole per cent / 100.

    1 - insertions and deletions / both lengths, as fuzzywuzzy's `ratio` gives it with Levenshtein.
    """
    from rapidfuzz import fuzz

    marks = ("`", "#", "//")
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in marks)), "")
    return round(fuzz.ratio(line, reference)) / 100


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    n_same = sum((Counter(answer) & Counter(reference)).values())
    return 2 * n_same / (len(answer) + len(reference)) if n_same else 0.0


def _words(text: str) -> list[str]:
    letters = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return _ARTICLES.sub(" ", letters).split()


def _words_zh(text: str) -> list[str]:
    bare = ("".join(c for c in w.lower() if c not in _PUNCTUATION_ZH) for w in _cut(text))
    return [word for word in ("".join(word.split()) for word in bare) if word]


def _cut(text: str) -> list[str]:
    import jieba

    jieba.setLogLevel("ERROR")  # it reports its dictionary on stderr
    return list(jieba.cut(text, cut_all=False))


def _lines(text: str) -> str:
    """One sentence a line, which is how rouge-score takes sentences."""
    return "\n".join(sentence for sentence in text.split(".") if sentence.strip())


class _AsWritten:
    def tokenize(self, text: str) -> list[str]:
        return text.split()


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    tokenizer: Tokenizer = _AsWritten()
    return RougeScorer(["rougeLsum"], tokenizer=tokenizer)
