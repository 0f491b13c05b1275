import re
from collections import Counter
from typing import Any

import datasets
import pytest

from polykv_lib.tasks import ruler, ruler_qa
from polykv_lib.tasks.passages import local_articles, sentences
from polykv_lib.tasks.ruler import TASKS, items

OFFLINE = [task for task in TASKS if not task.startswith("qa")]
# Three letters a token, so that a test needs no tokenizer.


def count_tokens(text: str) -> int:
    return -(-len(text) // 3)


def test_there_are_thirteen_tasks_and_eleven_need_no_network() -> None:
    assert len(TASKS) == 13
    assert len(OFFLINE) == 11


@pytest.mark.parametrize("task", OFFLINE)
@pytest.mark.parametrize("length", [1_200, 2_048])
def test_items_fill_the_length_and_never_exceed_it(task: str, length: int) -> None:
    made = items(task, n=2, length=length, count_tokens=count_tokens)
    for item in made:
        assert 0.8 * length <= item.n_tokens(count_tokens) <= length
        assert item.max_new_tokens == ruler.MAX_NEW_TOKENS[task]
    assert made[0].context != made[1].context
    assert made[:1] == items(task, n=1, length=length, count_tokens=count_tokens)


@pytest.mark.parametrize("task", [t for t in OFFLINE if t.startswith("niah")])
def test_every_asked_value_stands_once_in_the_context_beside_its_key(task: str) -> None:
    item = items(task, n=1, length=1_200, count_tokens=count_tokens)[0]
    assert len(item.answers) == {"niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    for value in item.answers:
        assert item.context.count(value) == 1
        key = re.search(rf"for (\S+) is: {value}\.", item.context)
        assert key is not None
        assert key[1] in item.question
        assert key[1] in item.answer_prefix
    assert item.question.startswith("\nWhat ")
    assert not set(item.answers) & set(re.findall(r"[\w-]+", item.question + item.answer_prefix))


def test_the_question_of_one_value_is_in_the_singular() -> None:
    one = items("niah_single_1", n=1, length=512, count_tokens=count_tokens)[0]
    assert one.context.startswith("A special magic number is hidden within the following text.")
    assert one.question.startswith("\nWhat is the special magic number for ")
    assert one.answer_prefix.endswith(" mentioned in the provided text is")
    many = items("niah_multivalue", n=1, length=600, count_tokens=count_tokens)[0]
    assert many.context.startswith("Some special magic numbers are hidden within")
    assert many.question.startswith("\nWhat are all the special magic numbers for ")


def test_haystacks_are_noise_needles_and_articles_of_the_split() -> None:
    def context(task: str, **more: Any) -> str:
        return items(task, n=1, length=1_200, count_tokens=count_tokens, **more)[0].context

    assert context("niah_single_1").count("The grass is green.") > 10
    assert context("niah_multikey_2").count("One of the special magic numbers for") > 20
    texts = {split: context("niah_single_2", split=split) for split in ("test", "calibration")}
    for split, other in (("test", "calibration"), ("calibration", "test")):
        own = " ".join(local_articles(split)[0].text.split())
        found = [s for s in sentences(texts[split]) if s in own]
        assert len(found) >= 10
        assert not any(s in texts[other] for s in found)


def test_the_chain_of_variables_leads_from_the_value_to_each_answer() -> None:
    item = items("vt", n=1, length=2_048, count_tokens=count_tokens)[0]
    task = item.context.rpartition("Memorize and track")[2]
    value = re.search(r"value (\d{5})", item.question)
    assert value is not None
    names = [re.findall(rf"VAR (\w+) = {value[1]}", task)[0]]
    while following := re.findall(rf"VAR (\w+) = VAR {names[-1]} ", task):
        names += following
    assert tuple(names) == item.answers
    assert len(names) == 5
    assert f"value {value[1]}, they are: " in item.answer_prefix
    assert not any(name in item.context.partition("\n\nMemorize")[0] for name in names)


def test_the_common_words_are_the_ten_most_frequent() -> None:
    for length, times in ((2_048, (6, 1)), (6_000, (30, 3))):
        item = items("cwe", n=1, length=length, count_tokens=count_tokens)[0]
        task = item.context.rpartition("appear most often.\n")[2]
        counts = Counter(re.findall(r"\d+\. (\S+)", task)).most_common()
        assert {word for word, _ in counts[:10]} == set(item.answers)
        assert (counts[9][1], counts[10][1]) == times


def test_the_frequent_words_follow_the_dots() -> None:
    item = items("fwe", n=1, length=1_200, count_tokens=count_tokens)[0]
    text = item.context.rpartition("coded words. ")[2]
    ranked = Counter(text.split()).most_common(5)
    assert [word for word, _ in ranked[:4]] == ["...", *item.answers]
    assert ranked[3][1] > ranked[4][1]
    assert 0 <= ranked[1][1] - 4 * ranked[3][1] < 4  # (4 / 2)^2 times as often, rounded down


def test_seeds_and_splits_give_other_items_and_ids_name_them() -> None:
    def one(**more: Any) -> Any:
        return items("niah_single_1", n=1, length=512, count_tokens=count_tokens, **more)[0]

    made = [one(), one(seed=1), one(split="calibration")]
    assert len({item.answers for item in made}) == 3
    assert [item.id for item in made] == [
        "ruler/niah_single_1/512/test/42/000",
        "ruler/niah_single_1/512/test/1/000",
        "ruler/niah_single_1/512/calibration/42/000",
    ]


def test_requests_that_can_not_be_met_are_refused() -> None:
    with pytest.raises(ValueError, match="length=200 tokens, but the smallest cwe item has"):
        items("cwe", n=1, length=200, count_tokens=count_tokens)
    with pytest.raises(ValueError, match="no task 'niah'; choose one of: niah_single_1"):
        items("niah", n=1, length=512, count_tokens=count_tokens)
    with pytest.raises(ValueError, match="n=0"):
        items("vt", n=0, length=512, count_tokens=count_tokens)


def offline(*args: object, **kwargs: object) -> object:
    raise OSError("no network")


def test_what_needs_a_network_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", offline)
    for task, name in (("qa_1", "squad_v2"), ("qa_2", "hotpot_qa")):
        with pytest.raises(ConnectionError, match=f"{task} needs .*{name}.* neither cached nor"):
            items(task, n=1, length=512, count_tokens=count_tokens)
    with pytest.raises(ConnectionError, match="haystack='articles' needs no network"):
        items("niah_single_2", n=1, length=512, count_tokens=count_tokens, haystack="essays")


SQUAD = [
    {"title": t, "context": f"{t} page {p} tells {p}{t}.", "question": f"What of {t}{p}?",
     "answers": {"text": [] if p == 4 else [f"{p}{t}", f"{p}"]}}
    for t in ("Ants", "Bees", "Cats")
    for p in range(5)
]  # fmt: skip
HOTPOT = [
    {"question": f"Who was {n}?", "answer": f"person {n}",
     "context": {"title": [f"T{n}", f"U{n}"], "sentences": [[f"It was person {n}.", " Yes."], ["No."]]}}
    for n in range(9)
]  # fmt: skip


@pytest.mark.parametrize(("task", "rows"), [("qa_1", SQUAD), ("qa_2", HOTPOT)])
def test_questions_stand_among_documents_that_do_not_help(
    task: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: rows)
    ruler_qa.questions.cache_clear()
    test, calibration = (
        items(task, n=4, length=260, count_tokens=count_tokens, split=split)
        for split in ("test", "calibration")
    )
    ruler_qa.questions.cache_clear()
    for item in (*test, *calibration):
        assert item.answers[0] in item.context
        assert item.metric == "string_match_part"
        assert item.n_tokens(count_tokens) <= 260
        numbers = re.findall(r"Document (\d+):\n", item.context)
        assert numbers == [str(i + 1) for i in range(len(numbers))]
        assert len(numbers) > 2
    assert not {i.question for i in test} & {i.question for i in calibration}
