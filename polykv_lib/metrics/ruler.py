"""RULER's string matches (arXiv:2404.06654): parts of the answer, any letter case."""

from collections.abc import Sequence


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Share of the references that the answer contains."""
    return sum(r.lower() in answer.lower() for r in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 where the answer contains any of the references, else 0."""
    return float(any(r.lower() in answer.lower() for r in references))
