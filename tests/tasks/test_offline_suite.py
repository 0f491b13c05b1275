import re
from functools import cache

import pytest

from polykv_lib.metrics.answers import score
from polykv_lib.tasks.base import Item, check_request
from polykv_lib.tasks.offline_code import modules
from polykv_lib.tasks.offline_suite import TASKS, items
from polykv_lib.tasks.passages import local_articles, paragraphs, prose, sentences

N = 4
LENGTH = 900


def count_tokens(text: str) -> int:
    return -(-len(text) // 4)


@cache
def made(task: str, split: str = "test", length: int = LENGTH) -> list[Item]:
    return items(task, n=N, length=length, count_tokens=count_tokens, split=split)


@pytest.mark.parametrize("task", TASKS)
def test_items_fit_are_scored_full_by_their_own_reference_and_repeat(task: str) -> None:
    for item in made(task):
        assert 0.6 * LENGTH <= item.n_tokens(count_tokens) <= LENGTH
        assert item.split == "test"
        assert "longbench" not in f"{item.id} {item.suite} {item.source}".lower()
        reference = item.answers[0]
        kept = {"classes": item.classes, "first_line": item.first_line}
        assert score(item.metric, reference, item.answers, **kept) == 1
        assert reference not in item.answer_prefix
    assert [i.id for i in made(task)] == [
        f"offline/{task}/{LENGTH}/test/0/{n:03d}" for n in range(N)
    ]
    assert items(task, n=1, length=LENGTH, count_tokens=count_tokens) == made(task)[:1]
    longer = made(task, length=2 * LENGTH)
    if task not in ("unique_paragraphs", "paragraph_of_sentence"):  # numbers grow with the list
        assert [i.answers for i in longer] == [i.answers for i in made(task)]
        assert [i.answer_prefix for i in longer] == [i.answer_prefix for i in made(task)]


@pytest.mark.parametrize("task", TASKS)
def test_calibration_and_test_share_no_sentence(task: str) -> None:
    def words(split: str) -> set[str]:
        text = "\n".join(i.context.partition("\n")[2] for i in made(task, split))
        return {line for line in text.split("\n") if len(line.split()) > 8}

    assert words("test")
    assert not words("test") & words("calibration")


def test_the_splits_share_no_article_and_no_module() -> None:
    titles = [{a.title for a in local_articles(s)} for s in ("calibration", "test")]
    names = [{name for name, _ in modules(s)} for s in ("calibration", "test")]
    for calibration, test in (titles, names):
        assert not calibration & test
        assert len(test) > len(calibration) > 20


@pytest.mark.parametrize("task", ["stated_fact", "stated_fact_among_articles"])
def test_a_fact_is_stated_once_in_the_words_that_the_answer_begins_with(task: str) -> None:
    for item in made(task):
        assert item.context.count(f"{item.answer_prefix} {item.answers[0]}") == 1
        assert item.context.count(item.answers[0]) == 1
        assert item.answers[0] not in item.question
        opening = re.search(r'begins with "(.+)"\.$', item.question)
        assert opening is not None
        assert item.answer_prefix.startswith(opening[1])


def test_several_articles_stand_in_a_multi_document_item() -> None:
    for item in made("stated_fact_among_articles"):
        titles = re.findall(r"Passage \d: (.+)\n", item.context)
        assert len(set(titles)) == 4
        assert sum(f"passage on {t} that" in item.question for t in titles) == 1


def test_the_lead_is_the_reference_and_not_in_the_context() -> None:
    for item in made("lead_section"):
        reference = item.answers[0]
        assert 30 <= len(reference.split()) <= 130
        assert not any(s in item.context for s in sentences(reference))


def test_each_example_has_its_own_article_as_label() -> None:
    known = {a.title: " ".join(a.text.split()) for a in local_articles("test")}
    for item in made("article_of_sentence"):
        examples = re.findall(r"Text: (.+)\nArticle: (.+)", item.context)
        assert {title for _, title in examples} == set(item.classes)
        assert all(sentence in known[title] for sentence, title in examples)
        asked = item.question.removeprefix("\n\nText: ").removesuffix("\nArticle:")
        assert asked in known[item.answers[0]]
        assert asked not in item.context


def test_the_numbered_paragraph_is_the_one_with_the_sentence() -> None:
    for item in made("paragraph_of_sentence"):
        sentence = item.answer_prefix.removesuffix(" [Paragraph")
        assert f"{sentence} [{item.answers[0]}]" in item.context
        assert item.context.count(sentence) == 1


def test_the_count_is_of_different_paragraphs() -> None:
    for item in made("unique_paragraphs"):
        listed = [re.sub(r" \[Paragraph \d+\]$", "", p) for p in item.context.split("\n\n")[1:]]
        assert str(len(set(listed))) == item.answers[0]
        assert len(set(listed)) < len(listed)


def test_the_next_line_follows_the_question_in_the_module() -> None:
    texts = {f"{name}.py": "\n".join(lines) for name, lines in modules("test")}
    for item in made("next_line"):
        name = item.source.rpartition(" ")[2]
        code = item.prompt.partition("\n")[2] + item.answers[0]
        assert code in texts[name]
        assert item.question.count("\n") == 4
        assert not item.chat_template


def test_a_length_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="length=60 tokens, but the smallest lead_section item"):
        items("lead_section", n=1, length=60, count_tokens=count_tokens)
    with pytest.raises(ValueError, match="no split 'train'; choose calibration or test"):
        check_request("stated_fact", tuple(TASKS), 1, "train")


def test_sentences_end_at_stops_but_not_at_initials_and_keep_their_quotes() -> None:
    text = 'It was "late." Dr. A. B. Smith left the U.S. Army in 1900. He (they say) ran!  Then no.'
    assert sentences(text) == [
        'It was "late."', "Dr. A. B. Smith left the U.S. Army in 1900.", "He (they say) ran!", "Then no.",
    ]  # fmt: skip
    assert paragraphs("Heading\n" + "word " * 30 + "end.\n* " + "item " * 40 + ".") == [
        "word " * 30 + "end."
    ]


def test_a_continuation_asks_nothing_and_goes_on_in_the_article() -> None:
    known = {a.title: " ".join(prose(a)) for a in local_articles("test")}
    for item in made("continuation"):
        title = item.context.partition("\n")[0]
        text = item.prompt.partition("\n\n")[2] + item.answers[0]
        assert text in known[title]
        assert len(item.question.split()) == 1
        assert len(item.answers[0].split()) >= item.scored_tokens == 64
        assert not item.chat_template
