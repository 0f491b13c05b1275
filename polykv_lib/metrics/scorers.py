"""Agreement of two answers as strings. An empty answer agrees with nothing, and is counted.

Paper A's log counts an empty baseline answer as a win for the compressed run; here a pair with an
empty side scores 0 and `n_empty` tells how many such pairs a mean contains.
"""

from collections.abc import Sequence


def token_overlap(candidate: str, reference: str) -> float:
    """|words(candidate) & words(reference)| / |words(reference)|, as paper A defines it.

    Words are lower-cased, split at white space, and form a set: order and repeats do not count, so
    two looping answers reach 1 cheaply. 0 where a side has no words.
    """
    wanted = set(reference.lower().split())
    return len(set(candidate.lower().split()) & wanted) / len(wanted) if wanted else 0.0


def exact_match(candidate: str, reference: str) -> float:
    """1 where both strings are equal up to outer white space and not empty, else 0."""
    return float(bool(reference.strip()) and candidate.strip() == reference.strip())


def n_empty(candidates: Sequence[str], references: Sequence[str]) -> int:
    """Pairs in which the candidate, the reference or both hold nothing but white space."""
    pairs = zip(candidates, references, strict=True)
    return sum(not candidate.strip() or not reference.strip() for candidate, reference in pairs)
