"""An answer -> its score, by the metric that an item names."""

from collections.abc import Callable, Sequence
from typing import Final

from polykv_lib.metrics import longbench, ruler

Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def _best_of(metric: Callable[[str, str], float]) -> Metric:
    """The metric's maximum over the references."""
    return lambda answer, references, classes: max(metric(answer, r) for r in references)


METRICS: Final[dict[str, Metric]] = {
    "qa_f1": _best_of(longbench.qa_f1),
    "qa_f1_zh": _best_of(longbench.qa_f1_zh),
    "rouge": _best_of(longbench.rouge_l),
    "rouge_zh": _best_of(longbench.rouge_l_zh),
    "classification": lambda answer, references, classes: max(
        longbench.classification(answer, r, classes) for r in references
    ),
    "retrieval": _best_of(longbench.retrieval),
    "count": _best_of(longbench.count),
    "code_similarity": _best_of(longbench.code_similarity),
    "string_match_all": lambda answer, references, classes: ruler.string_match_all(
        answer, references
    ),
    "string_match_part": lambda answer, references, classes: ruler.string_match_part(
        answer, references
    ),
}


def score(
    metric: str,
    answer: str,
    references: Sequence[str],
    *,
    classes: Sequence[str] = (),
    first_line: bool = False,
) -> float:
    """The answer's score between 0 and 1 against its references.

    Args:
        metric: A name in `METRICS`.
        answer: What the model wrote, without the answer prefix.
        references: At least one; LongBench takes the best, RULER all or any.
        classes: The labels, for "classification".
        first_line: Score the first line alone, after leading line breaks (but not spaces).

    Raises:
        ValueError: No such metric, or no reference.
    """
    if metric not in METRICS:
        raise ValueError(f"no metric {metric!r}; choose one of: {', '.join(METRICS)}.")
    if not references:
        raise ValueError("an answer needs at least one reference to be scored, got none.")
    if first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return METRICS[metric](answer, references, classes)
