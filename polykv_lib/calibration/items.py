"""What a plan is calibrated on: a context that is evicted, an answer that is scored after it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class EncodedItem:
    """One text as token ids. The context is evicted; question and answer are fed afterwards.

    Every answer token is thus predicted from the evicted cache. `id` names the text, so that
    calibration and test can be shown to be disjoint; `family` groups items of one kind.
    """

    id: str
    family: str
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse an item that leaves nothing to evict, to feed, or to score."""
        for name in ("context_ids", "question_ids", "answer_ids"):
            if not getattr(self, name):
                raise ValueError(
                    f"item {self.id!r} has no {name}; a context, at least one token that is fed "
                    "after it, and an answer are needed."
                )

    @property
    def tail_ids(self) -> tuple[int, ...]:
        """What is fed after the context: the question, and the answer without its last token."""
        return self.question_ids + self.answer_ids[:-1]

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """What of the tail is fed at a time while generating: the question, then token by token."""
        n_question, n_tail = len(self.question_ids), len(self.tail_ids)
        return ((0, n_question), *((i, i + 1) for i in range(n_question, n_tail)))

    def question_visible(self) -> "EncodedItem":
        """The same item with its question read before the eviction, all but its last token."""
        return replace(
            self,
            context_ids=self.context_ids + self.question_ids[:-1],
            question_ids=self.question_ids[-1:],
        )
