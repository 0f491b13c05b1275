"""Noise shaping: the same codes' format, errors where queries do not look."""

import pytest
import torch
from torch.testing import assert_close

from polykv_lib.kv import LayerKV
from polykv_lib.pool import freeze
from polykv_lib.quantize import FullPrecision, HarmonicTurboQuant, TurboQuant
from polykv_lib.quantize.codebooks import nearest_code, stored_levels
from polykv_lib.quantize.rotations import rotation
from polykv_lib.quantize.shaping import second_moments, shaped_codes, weighted

SHAPED = TurboQuant(3, norms="byte", shaped=True)
PLAIN = TurboQuant(3, norms="byte", match_norm=True)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def queries_of(heads: int = 2, dim: int = 64, seed: int = 5) -> torch.Tensor:
    """[1, 3 * heads, 400, dim]: most of their energy in a few directions, other ones a head."""
    spectrum = 0.9 ** torch.arange(dim)
    basis = torch.linalg.qr(draw(heads, dim, dim, seed=seed))[0]
    rows = draw(heads, 3 * 400, dim, seed=seed + 1) * spectrum @ basis
    return rows.view(heads * 3, 400, dim)[None]


def scores_error(codec, x: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Mean (q . e)^2 a KV head, over fresh queries of the same kind."""
    heads = x.shape[0]
    args = (second_moments(queries, heads)[0],) if codec.shaped else ()
    e = codec.dequantize(codec.quantize(x, *args)) - x
    seen = queries[0].view(heads, -1, x.shape[-1]) @ e.mT
    return seen.square().mean((1, 2))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_channel_by_channel_it_is_the_recursion(bits):
    """Every token alone, in fp64, from the decomposition's equation."""
    x, m = draw(2, 7, 64), weighted(second_moments(queries_of(), 2)[0], torch.eye(64))
    codes, fit = shaped_codes(x, m, bits)
    table = stored_levels(bits).double()
    for head in range(2):
        chol = torch.linalg.cholesky(m[head])
        lower = chol / chol.diagonal()
        for token in range(7):
            e = torch.zeros(64, dtype=torch.float64)
            levels = torch.zeros_like(e)
            for i in reversed(range(64)):
                aim = x[head, token, i].double() + lower[i + 1 :, i] @ e[i + 1 :]
                levels[i] = table[nearest_code(aim.float()[None], bits).long()]
                e[i] = x[head, token, i] - levels[i]
            assert_close(table[codes[head, token].long()], levels)
            seen = m[head] @ levels
            best = (seen @ x[head, token].double()) / (seen @ levels)
            assert_close(fit[head, token].double(), best.clamp_min(0), atol=1e-5, rtol=1e-5)


def test_queries_that_look_everywhere_change_no_code():
    x, everywhere = draw(2, 50, 64), torch.eye(64).expand(2, 64, 64)
    shaped, plain = SHAPED.quantize(x, 7 * everywhere), PLAIN.quantize(x)
    assert all(map(torch.equal, shaped.planes, plain.planes))
    assert not torch.equal(shaped.scale, plain.scale), "norms are fitted, not matched"


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("codec", [TurboQuant, HarmonicTurboQuant])
def test_scores_err_less_in_the_same_bytes(codec, bits):
    x, queries = draw(2, 300, 64), queries_of()
    shaped, plain = codec(bits, norms="byte", shaped=True), codec(bits, norms="byte")
    less = scores_error(shaped, x, queries) / scores_error(plain, x, queries)
    assert less.max() < 0.55
    others = queries.flip(1)  # each head's belong to the other head
    moments = second_moments(others, 2)[0]
    e = shaped.dequantize(shaped.quantize(x, moments)) - x
    wrong = (queries[0].view(2, -1, 64) @ e.mT).square().mean((1, 2))
    assert (wrong / scores_error(plain, x, queries)).min() > 0.9, "the control must not gain"
    assert shaped.quantize(x, moments).nbytes == plain.quantize(x).nbytes


def test_blocks_of_tokens_and_heads_are_coded_alone():
    x, moments = draw(3, 5_000, 64), second_moments(queries_of(3), 3)[0]
    whole = SHAPED.quantize(x, moments)
    part = SHAPED.quantize(x[1:2, 4_000:], moments[1:2])
    same = whole.planes[0][1:2, 4_000:] == part.planes[0]
    assert same.float().mean() > 0.999, "but for sums in another order"


def test_moments_are_means_over_the_queries_of_a_head():
    q = draw(1, 6, 11, 64)
    found = second_moments(q, 2)
    assert found.shape == (1, 2, 64, 64)
    rows = q[0, 3:].reshape(-1, 64)
    assert_close(found[0, 1], torch.stack([torch.outer(r, r) for r in rows]).mean(0))
    assert not second_moments(q[:, :, :0], 2).any()


@pytest.mark.parametrize("length", [0, 1, 17])
def test_odd_inputs_are_coded(length):
    moments = second_moments(queries_of(), 2)[0]
    for x in (draw(2, length, 64), torch.zeros(2, length, 64), 1e-30 * draw(2, length, 64)):
        back = SHAPED.dequantize(SHAPED.quantize(x, moments))
        assert back.isfinite().all()
        assert_close(back, x, atol=0.8 * x.abs().max().item() if length else 0, rtol=0)
    none = SHAPED.quantize(draw(2, 9, 64), torch.zeros(2, 64, 64))
    assert all(map(torch.equal, none.planes, PLAIN.quantize(draw(2, 9, 64)).planes))
    assert SHAPED.quantize(draw(2, 9, 80), torch.eye(80).expand(2, 80, 80)).shape == (2, 9, 80)


def test_what_does_not_fit_is_refused():
    x, moments = draw(2, 9, 64), torch.eye(64).expand(2, 64, 64)
    with pytest.raises(ValueError, match="got no second moments of queries; codecs of keys with"):
        SHAPED.quantize(x)
    with pytest.raises(ValueError, match="others do not take them"):
        PLAIN.quantize(x, moments)
    with pytest.raises(ValueError, match=r"shape \[1, 64, 64\] for keys of shape \[2, 9, 64\]"):
        SHAPED.quantize(x, moments[:1])
    layer = LayerKV(keys=x[None], values=x[None])
    with pytest.raises(ValueError, match="have them"):
        freeze([layer], keys=SHAPED, values=FullPrecision())
    both = LayerKV(keys=x[None], values=x[None], moments=moments[None])
    with pytest.raises(ValueError, match="codecs of keys"):
        freeze([both], keys=SHAPED, values=SHAPED)


def test_evicted_heads_take_their_own_moments():
    """A head's piece is what its kept keys alone are, with that head's moments."""
    x, moments = draw(2, 30, 64), second_moments(queries_of(), 2)[0]
    layer = LayerKV(keys=x[None], values=x[None], moments=moments[None])
    kept = [torch.arange(0, 30, 2), torch.arange(1, 30, 3)]
    pool = freeze([layer], keys=SHAPED, values=PLAIN, n_sink=0, kept=[kept])
    for piece in pool.layers[0]:
        [head] = piece.heads
        alone = SHAPED.quantize(x[head : head + 1, kept[head]], moments[head : head + 1])
        assert_close(piece.keys.dense(), SHAPED.dequantize(alone))
    basis = rotation(64, "signed", 0, torch.device("cpu"))
    assert weighted(moments, basis).diagonal(dim1=-2, dim2=-1).mean() == pytest.approx(1.1)
