"""The record that every task gives, and what makes records of a wanted length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

CountTokens = Callable[[str], int]  # the evaluated model's tokenizer, special tokens left out
Split = Literal["calibration", "test"]
SPLITS: Final = ("calibration", "test")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question about one context, with what scoring its answer needs.

    The prompt is `context + question`, word for word; instructions that stand before the text
    belong to the context, so that a policy which must not see the question is shown `context`
    alone. Fields follow LongBench's records (arXiv:2308.14508).

    Args:
        id: Names the item in a result, the same in every run.
        suite: "ruler", "longbench" or "offline".
        task: Name of the task inside its suite.
        category: Group of tasks that tables report together.
        context: Instruction and text.
        question: Everything of the prompt after the text; never empty.
        answer_prefix: How the answer begins; stands after the assistant's header, is not scored.
        answers: References.
        metric: A name in `metrics.answers.METRICS`.
        max_new_tokens: Where an answer ends at the latest.
        scored_tokens: How many tokens of a reference are teacher-forced, at most.
        split: "calibration" or "test"; no document is in both.
        chat_template: Whether a chat model reads the prompt as a user's turn.
        first_line: Whether only the answer's first line is scored.
        stop_at_newline: Whether a line break ends the answer, once it has a token.
        classes: The labels to choose from, where the metric needs them.
        n_words: LongBench's `length`, by which LongBench-E forms buckets.
        source: Where the text comes from.
    """

    id: str
    suite: str
    task: str
    category: str
    context: str
    question: str
    answer_prefix: str = ""
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    scored_tokens: int = 16
    split: Split = "test"
    chat_template: bool = True
    first_line: bool = False
    stop_at_newline: bool = False
    classes: tuple[str, ...] = ()
    n_words: int | None = None
    source: str

    @property
    def prompt(self) -> str:
        """Context and question as one string."""
        return self.context + self.question

    def n_tokens(self, count_tokens: CountTokens) -> int:
        """Tokens of prompt, answer prefix and the longest answer; a chat template comes on top."""
        return count_tokens(self.prompt + self.answer_prefix) + self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a generator draws for one size; an `Item` adds what all items of its task share."""

    context: str
    question: str
    answer_prefix: str = ""
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()


Maker = Callable[[int], Parts]  # size -> parts; a larger size is a longer context


def longest(
    make: Callable[[int], Item], *, sizes: Sequence[int], length: int, count_tokens: CountTokens
) -> Item:
    """The item of the largest of the ascending `sizes` that holds at most `length` tokens.

    Raises:
        ValueError: The smallest is too long already.
    """
    item = make(sizes[0])
    if (needed := item.n_tokens(count_tokens)) > length:
        raise ValueError(
            f"length={length} tokens, but the smallest {item.task} item has {needed}, of which "
            f"{item.max_new_tokens} are the answer's; ask for a larger length."
        )
    low, high = 0, len(sizes)  # sizes[low] fits, sizes[high] does not or is past the end
    while high - low > 1:
        middle = (low + high) // 2
        candidate = make(sizes[middle])
        if candidate.n_tokens(count_tokens) <= length:
            low, item = middle, candidate
        else:
            high = middle
    return item


def generator(suite: str, task: str, split: Split, seed: int, index: int) -> Random:
    """Random numbers of one item: they depend on nothing but its name and the seed."""
    return Random(f"{suite}/{task}/{split}/{seed}/{index}")


def check_request(task: str, tasks: Sequence[str], n: int, split: str) -> None:
    """Refuse an unknown task or split, or a number of items below one.

    Raises:
        ValueError: as said.
    """
    if task not in tasks:
        raise ValueError(f"no task {task!r}; choose one of: {', '.join(tasks)}.")
    if n < 1:
        raise ValueError(f"n={n}; ask for at least one item.")
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; choose calibration or test.")
