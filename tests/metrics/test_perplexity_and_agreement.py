import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from polykv_lib.metrics.agreement import kl_nats, top1_agreement
from polykv_lib.metrics.distortion import nmse
from polykv_lib.metrics.perplexity import (
    continuation_nll,
    delta_pct,
    paper_split,
    perplexity,
    token_nll,
)


def logits(n_tokens: int, seed: int, n_words: int = 50) -> torch.Tensor:
    return 3 * torch.randn(n_tokens, n_words, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("n_tokens", "n_prefix", "n_scored"),
    [
        (826, 578, 247),
        (1_851, 1_295, 555),
        (1_953, 1_367, 585),
        (1_837, 1_285, 551),
        (7_194, 5_035, 2_158),
    ],
)
def test_split_is_that_of_the_published_runs(n_tokens: int, n_prefix: int, n_scored: int) -> None:
    split = paper_split(n_tokens)
    assert (split.n_prefix, split.n_scored) == (n_prefix, n_scored)


def test_a_text_too_short_to_split_is_refused() -> None:
    with pytest.raises(ValueError, match="a text of 2 tokens leaves nothing to score"):
        paper_split(2)


@given(n_tokens=st.integers(4, 10_000))
def test_split_loses_one_token_and_no_more(n_tokens: int) -> None:
    split = paper_split(n_tokens)
    assert split.n_prefix + 1 + split.n_scored == n_tokens


def test_nll_is_minus_log_p_whatever_the_chunk() -> None:
    x, targets = logits(300, 0), torch.arange(300) % 50
    by_hand = -x.double().softmax(-1)[torch.arange(300), targets].log()
    assert_close(token_nll(x, targets).double(), by_hand, rtol=1e-5, atol=1e-5)


def test_the_first_token_of_a_continuation_is_never_scored() -> None:
    x, fed = logits(6, 1), torch.tensor([7, 1, 2, 3, 4, 5])
    nll = continuation_nll(x, fed)
    assert nll.shape == (5,)
    assert_close(nll[0], -x[0].log_softmax(-1)[1])
    changed = torch.cat((torch.tensor([9]), fed[1:]))
    assert_close(continuation_nll(x, changed), nll)


def test_perplexity_of_a_uniform_guess_is_the_vocabulary() -> None:
    nll = token_nll(torch.zeros(10, 64), torch.arange(10))
    assert perplexity(nll.mean().item()) == pytest.approx(64)
    assert delta_pct(math.log(9.141 / 8.998)) == pytest.approx(1.59, abs=0.005)


def test_kl_is_that_of_torch_zero_for_equal_and_positive_else() -> None:
    p, q = logits(300, 2), logits(300, 3)
    theirs = torch.nn.functional.kl_div(
        q.double().log_softmax(-1), p.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert_close(kl_nats(p, q).double(), theirs, rtol=1e-4, atol=1e-5)
    assert kl_nats(p, p).max() == 0
    assert kl_nats(p.half(), q.half()).dtype == torch.float32


def test_kl_is_not_symmetric_and_the_full_cache_is_the_reference() -> None:
    certain, unsure = torch.tensor([[20.0, 0.0]]), torch.zeros(1, 2)
    assert kl_nats(certain, unsure).item() == pytest.approx(math.log(2), abs=1e-4)
    assert kl_nats(unsure, certain).item() == pytest.approx(10 - math.log(2), abs=1e-3)


def test_top1_compares_the_likeliest_tokens() -> None:
    p = torch.eye(4)
    assert top1_agreement(p, p[[0, 1, 3, 2]]).tolist() == [True, True, False, False]


def test_nmse_of_a_shrunk_vector_and_of_none() -> None:
    x = logits(20, 4)
    assert nmse(x, 0.9 * x) == pytest.approx(0.01, rel=1e-4)
    assert nmse(torch.zeros(3, 4), torch.ones(3, 4)) == 0
