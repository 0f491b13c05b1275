"""What the eviction experiments read: items of a named suite as token ids, and policies by name.

Plans are made from calibration items and scored on test items; no text is in both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from polykv_lib import hf
from polykv_lib.calibration import EncodedItem
from polykv_lib.evict import (
    CAKE,
    CAM,
    D2O,
    H2O,
    TOVA,
    EvictionPolicy,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    Plan,
    Random,
    RankMerge,
    Scissorhands,
    SnapKV,
    StreamingLLM,
    pyramidkv,
)
from polykv_lib.evict.controls import Guarded
from polykv_lib.tasks import longbench, offline_suite, ruler
from polykv_lib.tasks.base import Item, Split

SEPARATORS: Final = {"vt": " "}  # between the references of one answer, where it is not a comma
# Families whose answer stands somewhere in the context, word for word.
RETRIEVAL: Final = frozenset(
    {"stated_fact", "stated_fact_among_articles", "paragraph_of_sentence", "vt"}
    | set(ruler.NEEDLE_TASKS)
)
PlanFor: TypeAlias = Callable[[int], Plan]  # a number of tokens -> a plan for it
Kept: TypeAlias = float | Callable[[int], int]  # a share of the tokens, or how many of so many

_BARE: Final[dict[str, EvictionPolicy]] = {
    "StreamingLLM": StreamingLLM(),
    "H2O": H2O(recent=0.0),
    "TOVA": TOVA(),
    "SnapKV": SnapKV(window=16),
    "CAKE": CAKE(window=16),
    "CAM": CAM(),
    "D2O": D2O(recent=0.0),
    "Scissorhands": Scissorhands(),
    "ExpectedAttention": ExpectedAttention(),
    "KeyDiff": KeyDiff(),
    "KeyNorm": KeyNorm(),
    "H2O+KeyDiff": RankMerge(first=H2O(recent=0.0), second=KeyDiff()),
    "Random": Random(),
}
# Each with 4 sinks and 16 recent tokens, inside its budget.
POLICIES: Final[dict[str, EvictionPolicy]] = {
    name: Guarded(policy=policy) for name, policy in _BARE.items()
}
PYRAMID: Final = "PyramidKV"  # SnapKV's scores under budgets of its own: no uniform policy
METHODS: Final = (*POLICIES, PYRAMID)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One item beside its tokens: the context is evicted, question and answer are fed after it."""

    item: Item
    encoded: EncodedItem


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which items a point reads; LongBench is calibrated on the offline suite, having no split."""

    suite: Literal["offline", "ruler", "longbench"]
    tasks: Sequence[str]
    n_calibration: int  # a task
    n_items: int  # a task
    context_tokens: int  # of context, question and answer together
    question: Literal["hidden", "visible"]  # to the policy
    seed: int
    longbench_dir: str = ""

    def both(self, tokenizer: Any) -> tuple[list[Asked], list[Asked]]:
        """Calibration and test items, task by task.

        Raises:
            RuntimeError: a text is in both.
        """
        known = (
            tuple(offline_suite.TASKS) if self.suite == "longbench" else self.tasks
        )  # what plans are calibrated on
        calibration = self._asked(tokenizer, "calibration", known, self.n_calibration)
        test = self._asked(tokenizer, "test", self.tasks, self.n_items)
        check_disjoint(calibration, test)
        return calibration, test

    def kept(self, keep: float) -> Kept:
        """What a share of the tokens stands for: on LongBench as many tokens in every context.

        They are the share of `context_tokens`, at most half of a shorter context; the budgets of
        arXiv:2606.15157 are numbers of tokens, too.
        """
        if self.suite != "longbench":
            return keep
        budget = round(keep * self.context_tokens)
        return lambda n_tokens: min(budget, n_tokens // 2)

    def _asked(self, tokenizer: Any, split: Split, tasks: Sequence[str], n: int) -> list[Asked]:
        items = [item for task in tasks for item in self._items(tokenizer, task, split, n)]
        return [Asked(item=item, encoded=self._encoded(tokenizer, item)) for item in items]

    def _encoded(self, tokenizer: Any, item: Item) -> EncodedItem:
        hidden = encoded(tokenizer, item)
        return hidden.question_visible() if self.question == "visible" else hidden

    def _items(self, tokenizer: Any, task: str, split: Split, n: int) -> list[Item]:
        def count(text: str) -> int:
            return len(_ids(tokenizer, text))

        length = self.context_tokens
        if self.suite == "ruler":
            return ruler.items(
                task, n=n, length=length, count_tokens=count, split=split, seed=self.seed
            )
        if self.suite == "offline" or split == "calibration":
            return offline_suite.items(
                task, n=n, length=length, count_tokens=count, split=split, seed=self.seed
            )
        folder = Path(self.longbench_dir) if self.longbench_dir else None
        return [
            longbench.truncated(item, length, encode=tokenizer.encode, decode=_decoder(tokenizer))
            for item in longbench.items(task, n=n, folder=folder)
        ]


def encoded(tokenizer: Any, item: Item) -> EncodedItem:
    """The item's token ids: context and question as one user's turn, then the answer.

    The answer prefix follows the assistant's header and is not scored. Tasks that a chat model
    reads without a template begin with the tokenizer's own first tokens. White space between
    context and question is that of `hf.question_ids`.
    """
    prefix, answer = continuation(item)
    if item.chat_template:
        context = hf.document_ids(tokenizer, item.context)[0].tolist()
        question = hf.question_ids(tokenizer, item.question.lstrip("\n"))
    else:
        context = list(tokenizer("")["input_ids"]) + _ids(tokenizer, item.context)
        question = _ids(tokenizer, item.question)
    return EncodedItem(
        id=item.id,
        family=item.task,
        context_ids=tuple(context),
        question_ids=(*question, *_ids(tokenizer, prefix)),
        answer_ids=tuple(_ids(tokenizer, answer)[: item.scored_tokens]),
    )


def continuation(item: Item) -> tuple[str, str]:
    """The answer prefix, and the reference as it goes on from there.

    All references of a task that asks for all, else the first. A word that ends the prefix and
    begins the reference ("[Paragraph" and "Paragraph 5") is written once.
    """
    several = item.metric == "string_match_all"
    separator = SEPARATORS.get(item.task, ", ")
    answer = separator.join(item.answers) if several else item.answers[0]
    prefix = item.answer_prefix.rstrip()
    if not prefix:
        return "", answer
    last = prefix.split()[-1].lstrip("[")
    return prefix, f" {answer.removeprefix(f'{last} ')}"


def check_disjoint(calibration: Sequence[Asked], test: Sequence[Asked]) -> None:
    """Refuse to score a plan on a text that it was made from.

    Raises:
        RuntimeError: an id or a context is in both splits.
    """
    for what in ("id", "context"):
        shared = {getattr(a.item, what) for a in calibration} & {
            getattr(a.item, what) for a in test
        }
        if shared:
            raise RuntimeError(
                f"{len(shared)} items share their {what} with calibration, such as "
                f"{min(shared)[:80]!r}; plans would be scored on what they were made from."
            )


def n_kept(keep: Kept, n_tokens: int) -> int:
    """Tokens that a head keeps on average of so many."""
    return keep(n_tokens) if callable(keep) else round(keep * n_tokens)


def single(name: str, keep: Kept, n_layers: int) -> PlanFor:
    """One policy in every layer: at a uniform budget, or PyramidKV at its own."""

    def plan(n_tokens: int) -> Plan:
        budget = n_kept(keep, n_tokens)
        if name != PYRAMID:
            return Plan.uniform(POLICIES[name], budget, n_layers)
        layers = pyramidkv(budget, n_layers, window=20).layers  # as many tokens as Guarded protects
        return Plan.of(POLICIES["SnapKV"], [layer.budget for layer in layers])

    return plan


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
