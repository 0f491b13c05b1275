import pytest

from polykv_lib.metrics import longbench, ruler
from polykv_lib.metrics.answers import METRICS, score


def test_qa_f1_drops_case_punctuation_and_articles_and_counts_repeats() -> None:
    assert longbench.qa_f1("The Eiffel Tower!", "an eiffel tower") == 1
    # answer: paris paris france; reference: paris france is -> 2 shared of 3 and 3
    assert longbench.qa_f1("Paris, Paris, France", "Paris, France is") == pytest.approx(2 / 3)
    assert longbench.qa_f1("", "Paris") == 0
    assert longbench.qa_f1("theatre", "the atre") == 0  # articles go as words, not as letters


def test_qa_f1_zh_counts_words_and_drops_full_width_punctuation() -> None:
    assert longbench.qa_f1_zh("北京大学。", "北京大学") == 1
    # 我 / 来到 / 北京 / 清华大学 against 北京 / 清华大学: 2 shared of 4 and 2
    assert longbench.qa_f1_zh("我来到北京清华大学", "北京清华大学") == pytest.approx(2 / 3)


def test_rouge_unites_the_subsequences_of_each_sentence() -> None:
    # reference: 4 words; answer: 5; longest common subsequence "the cat sat": 2 * 3 / 9
    assert longbench.rouge_l("the cat sat on it", "the cat sat down") == pytest.approx(6 / 9)
    # sentences in another order still match whole, which one subsequence of the text would not
    assert longbench.rouge_l("a b c. d e f.", "d e f. a b c.") == 1
    assert longbench.rouge_l("", "a b") == 0
    assert longbench.rouge_l("...", "a b") == 0


def test_rouge_zh_compares_words_not_sentences() -> None:
    assert longbench.rouge_l_zh("我来到北京清华大学", "北京清华大学") == pytest.approx(2 / 3)


def test_classification_shares_the_point_among_the_classes_named() -> None:
    classes = ["city", "other city", "mountain"]
    assert longbench.classification("mountain", "mountain", classes) == 1
    assert longbench.classification("a city on a mountain", "mountain", classes) == 0.5
    assert longbench.classification("other city", "other city", classes) == 1  # "city" is a part
    assert longbench.classification("river", "city", classes) == 0


def test_classification_keeps_the_published_slip_of_the_walked_list() -> None:
    # "a" is dropped, so "ab" is skipped and stays beside "abc"
    assert longbench.classification("abc", "abc", ["a", "ab", "abc"]) == 0.5


@pytest.mark.parametrize(
    ("answer", "value"),
    [("Paragraph 12", 1.0), ("Paragraph 12 or 3", 0.5), ("Paragraph 1", 0.0), ("none", 0.0)],
)
def test_retrieval_and_count_divide_by_the_integers_of_the_answer(
    answer: str, value: float
) -> None:
    assert longbench.retrieval(answer, "Paragraph 12") == value
    assert longbench.retrieval(answer, "段落12") == value
    assert longbench.count(answer, "12") == value


def test_retrieval_needs_a_numbered_reference() -> None:
    with pytest.raises(ValueError, match="names no paragraph"):
        longbench.retrieval("1", "twelve")


def test_code_similarity_takes_the_first_line_without_marks() -> None:
    assert longbench.code_similarity("\n```python\n# adds\nx = 1\ny = 2", "x = 1") == 1
    # "abcd" / "abxd": 2 edits (one deletion, one insertion) of 8 letters
    assert longbench.code_similarity("abcd", "abxd") == 0.75
    # "abc" / "abd": 1 - 2 / 6 = 0.667, in whole per cent
    assert longbench.code_similarity("abc", "abd") == 0.67
    assert longbench.code_similarity("# only", "x") == 0


def test_string_matches_ask_for_all_or_any_reference() -> None:
    assert ruler.string_match_all("Alpha, beta", ["ALPHA", "beta", "gamma", "delta"]) == 0.5
    assert ruler.string_match_part("Alpha, beta", ["gamma", "alpha"]) == 1
    assert ruler.string_match_part("Alpha, beta", ["gamma"]) == 0


def test_score_takes_the_best_reference_and_the_first_line_where_asked() -> None:
    assert score("qa_f1", "Rome", ["Paris", "Rome"]) == 1
    assert score("qa_f1", "\n\nRome\nQuestion: Paris", ["Rome"], first_line=True) == 1
    assert score("qa_f1", " \nRome", ["Rome"], first_line=True) == 0  # spaces are not stripped
    assert score("classification", "b", ["a", "b"], classes=["a", "b"]) == 1
    assert score("string_match_all", "a", ["a", "b"]) == 0.5


def test_score_refuses_unknown_metrics_and_missing_references() -> None:
    with pytest.raises(ValueError, match="no metric 'bleu'; choose one of: qa_f1"):
        score("bleu", "a", ["a"])
    for metric in METRICS:
        with pytest.raises(ValueError, match="at least one reference"):
            score(metric, "a", [])
