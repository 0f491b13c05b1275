"""RULER's two question-answering tasks: SQuAD and HotpotQA among documents that do not help.

Both data sets come through `datasets`; without them there is nothing to ask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Final

from polykv_lib.tasks.base import Maker, Parts, Split

DATA_SETS: Final = {
    "qa_1": ("rajpurkar/squad_v2", None),
    "qa_2": ("hotpotqa/hotpot_qa", "distractor"),
}
_INSTRUCTION: Final = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, accepted answers, the documents it needs, and others on the same matter."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[str, ...]
    related: tuple[str, ...] = ()


def question_among_documents(
    question: Question, documents: Sequence[str], random: Random
) -> tuple[Maker, int]:
    """The maker of texts with `size` documents, and the least size: the documents needed.

    Documents on the same matter are added first, then others, as in RULER.
    """
    known = {*question.needed, *question.related}
    related = random.sample(question.related, len(question.related))
    others = random.sample([d for d in documents if d not in known], len(documents) - len(known))
    candidates = [*question.needed, *related, *others]
    order = random.getrandbits(64)

    def make(size: int) -> Parts:
        chosen = candidates[:size]
        Random(order).shuffle(chosen)
        text = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(chosen, 1))
        return Parts(
            context=f"{_INSTRUCTION}The following are given documents.\n\n{text}",
            question=f"\n\n{_INSTRUCTION}Question: {question.text}",
            answer_prefix=" Answer:",
            answers=question.answers,
        )

    return make, len(question.needed)


@cache
def questions(task: str, split: Split) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    """A split's answerable questions of a task's data set, and all its documents.

    The splits share no first document that a question needs: each third one calibrates.

    Raises:
        ConnectionError: The data set is neither cached nor reachable.
    """
    from datasets import load_dataset

    name, configuration = DATA_SETS[task]
    try:
        rows = load_dataset(name, configuration, split="validation")
    except Exception as error:  # the hub client has no common base class for "no network"
        raise ConnectionError(
            f"{task} needs {name} through `datasets`, which is neither cached nor reachable "
            f"({type(error).__name__}); the other eleven RULER tasks need no network."
        ) from error
    found, documents = _squad(rows) if task == "qa_1" else _hotpot(rows)
    wanted = documents[2::3] if split == "calibration" else documents[::3] + documents[1::3]
    own = frozenset(wanted)
    return tuple(q for q in found if q.needed[0] in own), documents


def _squad(rows: Any) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    by_title: dict[str, dict[str, None]] = {}
    for row in rows:
        by_title.setdefault(row["title"], {})[row["context"]] = None
    found = tuple(
        Question(
            text=row["question"],
            answers=tuple(row["answers"]["text"]),
            needed=(row["context"],),
            related=tuple(d for d in by_title[row["title"]] if d != row["context"]),
        )
        for row in rows
        if row["answers"]["text"]
    )
    return found, tuple(sorted({d for own in by_title.values() for d in own}))


def _hotpot(rows: Any) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    found = []
    for row in rows:
        pages = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
        needed = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in pages)
        found.append(Question(text=row["question"], answers=(row["answer"],), needed=needed))
    return tuple(found), tuple(sorted({d for q in found for d in q.needed}))
