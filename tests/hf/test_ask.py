"""Questions to a pool, with the embedded model: the conversation is well formed and errors are plain."""

import inspect

import pytest
import torch

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.hf import prompts
from polykv_lib.pool import PoolError

TEXT = (
    "The lighthouse of Harrow Point was built in 1871 by the engineer Ada Whitcombe. It is 43 metres tall, "
    "painted white with two red bands, and its lamp was first lit on the second of May. "
)
QUESTIONS = ["In which year was the lighthouse built?", "Who built it?"]
CODEC = {"keys": pk.Int8("tensor"), "values": pk.TurboQuant(3, "plain"), "n_sink": 0}


@pytest.fixture(scope="module")
def loaded():
    return pk.load_model("smollm2-135m")


@pytest.fixture(scope="module")
def pool(loaded):
    model, tokenizer = loaded
    return pk.build_pool(model, pk.document_ids(tokenizer, TEXT), **CODEC, tokenizer=tokenizer)


def test_document_and_question_together_are_the_chat_template(loaded):
    _, tokenizer = loaded
    ids = pk.document_ids(tokenizer, TEXT)[0].tolist() + hf.question_ids(tokenizer, QUESTIONS[0])
    content = f"{TEXT}\n\n{QUESTIONS[0]}"
    want = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(ids) == want


def test_the_embedded_model_reads_the_document(loaded, pool):
    answers = pk.ask(*loaded, pool, QUESTIONS)
    assert "1871" in answers[0]
    assert "Whitcombe" in answers[1]


def test_a_batch_answers_as_each_agent_alone(loaded, pool):
    together = pk.ask(*loaded, pool, QUESTIONS, max_new_tokens=12)
    alone = [pk.ask(*loaded, pool, [q], max_new_tokens=12)[0] for q in QUESTIONS]
    assert together == alone


def test_a_document_of_bare_tokens_gets_a_turn_of_its_own(loaded, pool):
    model, tokenizer = loaded
    bare = torch.tensor([tokenizer(TEXT)["input_ids"]])
    assert prompts.turn_is_open(tokenizer, pool.document_ids)
    assert not prompts.turn_is_open(tokenizer, bare[0])
    ids = hf.question_ids(tokenizer, "Who built it?", turn_is_open=False)
    assert tokenizer.decode(ids).count("<|im_start|>user\n") == 1
    [answer] = pk.ask(model, tokenizer, pk.build_pool(model, bare, **CODEC), ["Who built it?"])
    assert answer


def test_questions_may_come_from_a_generator(loaded, pool):
    given = (question for question in QUESTIONS)
    options = {"max_new_tokens": 2}
    assert pk.ask(*loaded, pool, given, **options) == pk.ask(*loaded, pool, QUESTIONS, **options)


def test_a_document_is_a_text(loaded):
    with pytest.raises(ValueError, match="the document is a bytes; pass its text as a string"):
        inspect.unwrap(pk.document_ids)(loaded[1], b"text")


def test_a_tokenizer_without_a_chat_template(loaded, monkeypatch):
    _, tokenizer = loaded
    monkeypatch.setattr(tokenizer, "chat_template", None)
    ids = hf.question_ids(tokenizer, "Who built it?")
    assert tokenizer.decode(ids) == "\n\nWho built it?\n"


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], r"questions=\[\]; pass a list of strings"),
        ("Who?", r"questions='Who\?'; pass a list"),
        (None, "questions=None; pass a list"),
        (["Who?", " "], "a question is empty"),
        (["Who?", None], "question 1 is None; pass a string"),
        (["Who?", "why " * 9000], r"question 1 and its answer has \d+ tokens, but the model has 8192"),
    ],
)  # fmt: skip
def test_bad_questions(loaded, pool, questions, message):
    unchecked = inspect.unwrap(pk.ask)  # types are checked in tests only
    with pytest.raises(ValueError, match=message):
        unchecked(*loaded, pool, questions)


def test_another_models_pool_and_an_answer_of_no_tokens(loaded, pool):
    model, tokenizer = loaded
    for n in (0, 1.5):
        with pytest.raises(ValueError, match=f"max_new_tokens={n}; an answer has at least one"):
            inspect.unwrap(pk.ask)(model, tokenizer, pool, QUESTIONS, max_new_tokens=n)
    half, _ = pk.load_model("smollm2-135m", dtype="bfloat16")
    with pytest.raises(PoolError, match="the pool belongs to smollm2-135m with model_fingerprint"):
        pk.ask(half, tokenizer, pool, QUESTIONS)


def test_an_empty_document(loaded):
    with pytest.raises(ValueError, match="the document is empty"):
        pk.document_ids(loaded[1], " \n")


def test_another_tokenizers_pool(loaded, pool, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(
        PoolError, match="the pool belongs to smollm2-135m with tokenizer_fingerprint"
    ):
        pk.ask(model, tokenizer, pool, QUESTIONS)
