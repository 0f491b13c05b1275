import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_lib.metrics.intervals import mean_interval, median_interval
from polykv_lib.metrics.perplexity import delta_pct
from polykv_lib.metrics.scorers import exact_match, n_empty, token_overlap


@pytest.mark.parametrize(
    ("candidate", "reference", "overlap", "exact"),
    [
        ("the Moon landing", "the moon landing", 1.0, 0.0),
        ("landing moon the the", "the moon landing", 1.0, 0.0),
        ("the moon", "the moon landing was filmed", 0.4, 0.0),
        ("the moon landing was filmed", "the moon", 1.0, 0.0),
        (" same ", "same", 1.0, 1.0),
        ("", "the moon", 0.0, 0.0),
        ("the moon", "", 0.0, 0.0),
        ("", " \n", 0.0, 0.0),
    ],
)
def test_overlap_is_the_recall_of_a_set(
    candidate: str, reference: str, overlap: float, exact: float
) -> None:
    assert token_overlap(candidate, reference) == pytest.approx(overlap)
    assert exact_match(candidate, reference) == exact


def test_pairs_with_an_empty_side_are_counted() -> None:
    assert n_empty(["a", "", "a", " "], ["b", "b", "\n", ""]) == 3


@given(st.text(max_size=60))
def test_a_text_agrees_with_itself_unless_it_is_empty(text: str) -> None:
    agreed = float(bool(text.split()))
    assert token_overlap(text, text) == exact_match(text, text) == agreed


def test_interval_is_seeded_and_of_the_right_width() -> None:
    rng = np.random.default_rng(7)
    values = rng.normal(2, 1, size=400).tolist()
    interval = mean_interval(values)
    assert interval == mean_interval(values)
    assert interval != mean_interval(values, seed=1)
    assert interval.n == 400
    assert interval.lo is not None
    assert interval.hi is not None
    assert interval.lo < interval.value < interval.hi
    assert interval.hi - interval.lo == pytest.approx(2 * 1.96 / 20, rel=0.1)


def test_interval_is_carried_into_another_unit() -> None:
    plain = mean_interval([0.01, 0.02, -0.01, 0.0])
    percent = plain.mapped(delta_pct)
    assert percent.value == pytest.approx(delta_pct(plain.value))
    assert percent.hi == pytest.approx(delta_pct(plain.hi or 0))
    assert mean_interval([0.5]).mapped(delta_pct).lo is None


def test_interval_of_a_skewed_sample_stays_within_it() -> None:
    interval = mean_interval([0.0, 0.0, 0.0, 0.0, 10.0])
    assert (interval.lo, interval.hi) == (0, 6)


def test_median_is_untouched_by_one_slow_round() -> None:
    interval = median_interval([1.0, 1.1, 1.2, 1.3, 90.0])
    assert (interval.value, interval.lo, interval.n) == (1.2, 1.0, 5)


def test_equal_values_have_an_interval_of_width_zero() -> None:
    interval = mean_interval([3.0, 3.0, 3.0])
    assert (interval.lo, interval.value, interval.hi) == (3, 3, 3)


def test_one_document_has_no_interval_and_none_is_refused() -> None:
    interval = mean_interval([0.5])
    assert (interval.value, interval.lo, interval.hi, interval.n) == (0.5, None, None, 1)
    with pytest.raises(ValueError, match="at least one value, got none"):
        mean_interval([])
