"""RULER's texts: needles, variable chains, common and frequent words, each of a given size.

Templates, needles, haystack sentence and counts are RULER's (arXiv:2404.06654; published code,
Apache-2.0). Each maker draws what an item is about first, so that its size changes nothing else.
"""

import math
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random
from typing import Final

from wonderwords import RandomWord

from polykv_lib.tasks.base import Maker, Parts

NOISE: Final = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
NEEDLE: Final = "One of the special magic {kind} for {key} is: {value}."
DEPTHS: Final = tuple(round(100 * i / 39) for i in range(40))  # per cent of the text
SHORT: Final = 4_096  # below this length, cwe repeats its words less often


@dataclass(frozen=True, kw_only=True)
class Needles:
    """A needle task: what keys, values and haystack are, and how many there are of each."""

    haystack: str = "prose"  # or "noise", "needles"
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1  # of each key
    n_queries: int = 1


def needles(task: Needles, random: Random, prose: Sequence[str]) -> Maker:
    """Needles in a haystack of `size` pieces: sentences of prose, noise, or other needles."""
    keys = [_token(task.keys, random) for _ in range(max(task.n_keys, task.n_queries))]
    values = [[_token(task.values, random) for _ in range(task.n_values)] for _ in keys]
    hidden = [
        NEEDLE.format(kind=task.values, key=key, value=value)
        for key, own in zip(keys, values, strict=True)
        for value in own
    ]
    random.shuffle(hidden)
    depths = sorted(random.sample(DEPTHS, len(hidden)))
    asked = random.sample(range(len(keys)), task.n_queries)
    *first, last = (keys[i] for i in asked)
    query = f"{', '.join(first)}, and {last}" if first else last
    is_one = task.n_queries * task.n_values == 1
    kind = task.values.removesuffix("s") if is_one else task.values
    some, are, all_are = ("A", "is", "is") if is_one else ("Some", "are", "are all")
    others = Random(random.getrandbits(64))
    distractors: list[str] = []  # grown on demand, so that a longer haystack begins like a shorter

    def make(size: int) -> Parts:
        while task.haystack == "needles" and len(distractors) < size:
            key, value = _token(task.keys, others), _token(task.values, others)
            distractors.append(NEEDLE.format(kind=task.values, key=key, value=value))
        straw = {"noise": [NOISE] * size, "needles": distractors, "prose": prose}[task.haystack]
        pieces = list(straw[:size])
        for depth, needle in reversed(list(zip(depths, hidden, strict=True))):
            pieces.insert(size * depth // 100, needle)
        text = (" " if task.haystack == "prose" else "\n").join(pieces)
        return Parts(
            context=f"{some} special magic {kind} {are} hidden within the following text. Make sure"
            f" to memorize it. I will quiz you about the {kind} afterwards.\n{text}",
            question=f"\nWhat {all_are} the special magic {kind} for {query} mentioned in the "
            "provided text?",
            answer_prefix=f" The special magic {kind} for {query} mentioned in the provided text "
            f"{are}",
            answers=tuple(value for i in asked for value in values[i]),
        )

    return make


def variable_chain(random: Random, example_size: int, n_hops: int = 4) -> Maker:
    """A chain of assignments in `size` noise pieces, after one worked example in its own noise."""
    example = _chain(random, n_hops, n_letters=3)(example_size)
    task = _chain(random, n_hops, n_letters=5)
    solved = example.context + example.question + example.answer_prefix
    solved += f" {' '.join(example.answers)}\n\n"

    def make(size: int) -> Parts:
        parts = task(size)
        return Parts(
            context=solved + parts.context,
            question=parts.question,
            answer_prefix=parts.answer_prefix,
            answers=parts.answers,
        )

    return make


def _chain(random: Random, n_hops: int, n_letters: int) -> Maker:
    names: list[str] = []
    while len(names) <= n_hops:
        name = "".join(random.choices(string.ascii_uppercase, k=n_letters))
        if name not in names:
            names.append(name)
    value = random.randrange(10_000, 100_000)
    links = [f"VAR {names[0]} = {value}"]
    links += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    depths = sorted(random.random() for _ in links)

    def make(size: int) -> Parts:
        pieces = [NOISE] * size
        for depth, link in reversed(list(zip(depths, links, strict=True))):
            pieces.insert(int(depth * size), link)
        text = "\n".join(pieces).replace(". \n", ".\n")
        return Parts(
            context="Memorize and track the chain(s) of variable assignment hidden in the "
            f"following text.\n\n{text}",
            question=f"\nQuestion: Find all variables that are assigned the value {value} in the "
            "text above.",
            answer_prefix=" Answer: According to the chain(s) of variable assignment in the text "
            f"above, {len(names)} variables are assigned the value {value}, they are: ",
            answers=tuple(names),
        )

    return make


def common_words(random: Random, length: int) -> Maker:
    """A list of `size` words of which ten are common, after one short solved list.

    Common and other words stand 30 and 3 times each (example: 40 words, 10 and 3 times), in items
    shorter than 4,096 tokens 6 and 1 times (20 words, 3 times and once).
    """
    (n_example, *example_repeats), repeats = (
        ((20, 3, 1), (6, 1)) if length < SHORT else ((40, 10, 3), (30, 3))
    )
    example_words = random.sample(_all_words(), n_example)
    words = random.sample(_all_words(), len(_all_words()))
    orders = random.getrandbits(64), random.getrandbits(64)

    def listed(chosen: Sequence[str], repeats: Sequence[int], order: int) -> tuple[str, str]:
        counted = [*list(chosen[:10]) * repeats[0], *list(chosen[10:]) * repeats[1]]
        Random(order).shuffle(counted)
        return _numbered(counted), _numbered(chosen[:10])

    instruction = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    question = "\nQuestion: What are the 10 most common words in the above list?"
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    example, example_answer = listed(example_words, example_repeats, orders[0])
    solved = f"{instruction}{example}{question}{prefix} {example_answer}\n"

    def make(size: int) -> Parts:
        text, _ = listed(words[:size], repeats, orders[1])
        return Parts(
            context=solved + instruction + text,
            question=question,
            answer_prefix=prefix,
            answers=tuple(words[:10]),
        )

    return make


def frequent_words(random: Random, length: int, alpha: float = 2.0) -> Maker:
    """About `size` coded words with frequencies k^-alpha / zeta(alpha); rank 1 is the dots.

    Raises:
        ValueError: alpha is not 2, whose zeta is pi^2 / 6.
    """
    if alpha != 2:
        raise ValueError(f"alpha={alpha}; RULER's task has alpha=2.0.")
    coded: dict[str, None] = {}
    while len(coded) < max(8, length // 50):
        coded["".join(random.choices(string.ascii_lowercase, k=6))] = None
    ranked = ["...", *coded]
    order = random.getrandbits(64)

    def make(size: int) -> Parts:
        share = size * 6 / math.pi**2
        text = [w for k, word in enumerate(ranked, 1) for w in [word] * int(share / k**2)]
        Random(order).shuffle(text)
        return Parts(
            context="Read the following coded text and track the frequency of each coded word. "
            f"Find the three most frequently appeared coded words. {' '.join(text)}",
            question="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            answer_prefix=" Answer: According to the coded text above, the three most frequently "
            "appeared words are:",
            answers=tuple(ranked[1:4]),
        )

    return make


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _token(kind: str, random: Random) -> str:
    if kind == "numbers":
        return str(random.randrange(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(int=random.getrandbits(128), version=4))
    adjectives, nouns, _ = _words()
    return f"{random.choice(adjectives)}-{random.choice(nouns)}"


@cache
def _words() -> tuple[list[str], list[str], list[str]]:
    known = RandomWord()
    adjectives, nouns, verbs = (
        sorted(set(known.filter(include_categories=[c]))) for c in ("adjective", "noun", "verb")
    )
    return adjectives, nouns, verbs


@cache
def _all_words() -> list[str]:
    return sorted({word for words in _words() for word in words})
