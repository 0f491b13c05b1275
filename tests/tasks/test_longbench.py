import json
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pytest

from polykv_lib.metrics.answers import METRICS
from polykv_lib.tasks.base import Item
from polykv_lib.tasks.longbench import bucket, items, tasks, truncated

BARE = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def record(**changed: Any) -> dict[str, Any]:
    return {
        "_id": "abc", "input": "Who?", "context": "A story.", "answers": ["Ann", "Bob"],
        "length": 4_000, "all_classes": None, "language": "en", "dataset": "narrativeqa",
    } | changed  # fmt: skip


def jsonl(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)


def test_the_protocol_has_21_tasks_and_13_extended_ones() -> None:
    known = tasks()
    assert len(known) == 21
    assert sum(t.extended for t in known.values()) == 13
    assert {name for name, t in known.items() if t.bare} == BARE
    assert {n for n, t in known.items() if t.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert [n for n, t in known.items() if t.stop_at_newline] == ["samsum"]
    assert {t.metric for t in known.values()} <= set(METRICS)
    by_length = {n: t.max_new_tokens for n, t in known.items()}
    assert (by_length["qasper"], by_length["musique"], by_length["vcsum"]) == (128, 32, 512)


def test_prompts_hold_context_before_input_and_keep_their_white_space() -> None:
    for name, task in tasks().items():
        assert task.prompt.count("{context}") == 1, name
        assert task.prompt.index("{context}") < task.prompt.find("{input}") or "{input}" not in (
            task.prompt
        )
    assert tasks()["qasper"].prompt.count("\n\n Answer the question based on the above") == 1
    assert tasks()["passage_count"].prompt.endswith("The final answer is: ")
    assert "summary of all news. \n\nNews:" in tasks()["multi_news"].prompt


def test_an_item_is_the_published_prompt_cut_after_the_context(tmp_path: Path) -> None:
    (tmp_path / "hotpotqa.jsonl").write_text(jsonl(record(), record(_id="d", context="{x}")))
    first, second = items("hotpotqa", folder=tmp_path)
    prompt = tasks()["hotpotqa"].prompt
    assert first.prompt == prompt.replace("{context}", "A story.").replace("{input}", "Who?")
    assert first.context.endswith("given passages.\nA story.")
    assert first.question.endswith("Question: Who?\nAnswer:")
    assert "{x}" in second.context
    assert (first.answers, first.max_new_tokens, first.metric) == (("Ann", "Bob"), 32, "qa_f1")
    assert (first.id, first.chat_template) == ("longbench/hotpotqa/abc", True)
    assert len(items("hotpotqa", folder=tmp_path, n=1)) == 1


def test_classes_and_rules_of_a_few_shot_task_reach_the_item(tmp_path: Path) -> None:
    (tmp_path / "trec.jsonl").write_text(jsonl(record(all_classes=["City", "Other"])))
    item = items("trec", folder=tmp_path)[0]
    assert item.classes == ("City", "Other")
    assert (item.chat_template, item.first_line) == (False, True)
    assert item.question == "\nWho?"


def test_records_may_lie_in_a_zip_file_and_hold_line_separators(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        packed.writestr("data/qasper.jsonl", jsonl(record(context="one\u2028two")))
        packed.writestr("data/qasper_e.jsonl", jsonl(record(_id="e")))
    assert "one\u2028two" in items("qasper", folder=tmp_path)[0].context
    extended = items("qasper", folder=tmp_path / "data.zip", extended=True)[0]
    assert extended.id == "longbench/qasper_e/e"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no qasper\.jsonl"):
        items("qasper", folder=tmp_path)
    with pytest.raises(ValueError, match="no LongBench task 'squad'; choose one of: narrativeqa"):
        items("squad")
    with pytest.raises(ValueError, match="LongBench-E has no musique; it has: qasper"):
        items("musique", extended=True)

    def offline(*args: object, **kwargs: object) -> object:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConnectionError, match=r"qasper_e is neither cached.*pass folder="):
        items("qasper", extended=True)


def test_the_mirror_is_read_without_a_loading_script(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def mirror(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        asked.append((args, kwargs))
        return [record(), record()]

    monkeypatch.setattr(datasets, "load_dataset", mirror)
    assert len(items("2wikimqa", n=1)) == 1
    assert asked == [(("Xnhyacinth/LongBench", "2wikimqa"), {"split": "test"})]


def item_of(context: str, question: str, n_words: int | None = 1) -> Item:
    return Item(
        id="x", suite="longbench", task="t", category="c", context=context, question=question,
        answers=("a",), metric="qa_f1", max_new_tokens=8, n_words=n_words, source="s",
    )  # fmt: skip


def encode(text: str) -> list[int]:
    return [0, *map(ord, text)]  # one special token in front


def decode(ids: Any) -> str:
    return "".join(chr(i) for i in ids if i)


def test_truncation_leaves_out_the_middle_and_keeps_the_question() -> None:
    item = item_of("abcdefghij", "?!")
    assert truncated(item, 13, encode=encode, decode=decode) == item
    # 13 tokens with the special one: the first 4 are it and abc, the last 4 are ij?!
    short = truncated(item, 9, encode=encode, decode=decode)
    assert short.prompt == "abcij?!"
    assert (short.context, short.question) == ("abcij", "?!")
    with pytest.raises(ValueError, match="the last 1 tokens do not hold the question"):
        truncated(item, 3, encode=encode, decode=decode)


def test_buckets_are_by_words() -> None:
    lengths = (0, 3_999, 4_000, 7_999, 8_000)
    assert [bucket(item_of("a", "b", n)) for n in lengths] == [
        "0-4k", "0-4k", "4-8k", "4-8k", "8k+",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has no n_words"):
        bucket(item_of("a", "b", None))
