"""Attention in chunks, through the CPU's kernel: exact, within range, and refused where it fails."""

import math
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

from polykv_lib.attend import attend_pieces, chunked
from polykv_lib.kv import LayerKV
from polykv_lib.pool import freeze
from polykv_lib.quantize import Affine, FullPrecision, HarmonicTurboQuant, Int8, TurboQuant

CODECS = {
    "lossless": (FullPrecision(), FullPrecision()),
    "default": (Int8(), TurboQuant(3)),
    "token": (Int8("token"), Int8("token")),
    "turbo": (TurboQuant(4), TurboQuant(2)),
    "lean": (HarmonicTurboQuant(4), TurboQuant(3, norms="byte")),
    "affine": (Affine(4, 64, "token"), Affine(3, 32, "channel")),
}
CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def piece_of(codecs, n_tokens: int, size: float = 1.0):
    keys, values = (draw(1, 2, n_tokens, 64, seed=s) * size for s in (1, 2))
    layer = LayerKV(keys=keys, values=values)
    [[piece]] = freeze([layer], keys=codecs[0], values=codecs[1], n_sink=0).layers
    return piece


def exact(rows, piece):
    """The equation in double precision, over what the piece decodes to; lse in base 2."""
    keys, values = piece.keys.dense().double(), piece.values.dense().double()
    scores = rows.double() @ keys.mT * math.log(2)
    return scores.softmax(-1) @ values, scores.logsumexp(-1) / math.log(2)


# One chunk; two; eight and five tokens more; two spans of the scratch.
@pytest.mark.parametrize("n_tokens", [300, 512, 2053, 2600])
@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
def test_chunks_are_the_equation_in_double_precision(monkeypatch, codecs, n_tokens):
    monkeypatch.setattr(chunked, "SPAN", 2_400)
    piece, rows = piece_of(codecs, n_tokens), draw(2, 45, 64) / 8
    want, want_lse = exact(rows, piece)
    out, lse = chunked.attend_piece(rows, piece, torch.float32)
    assert_close(out.double(), want, atol=1e-5, rtol=0)
    assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
    out, lse = chunked.attend_piece(rows, piece, torch.float16)
    assert (out.double() - want).norm() < 2e-3 * want.norm()
    assert_close(lse.double(), want_lse, atol=2e-3, rtol=0)


@pytest.mark.parametrize("size", [2.0**-60, 1e-4, 1e4, 1e7, 2.0**60])
def test_numbers_beyond_half_precision_lose_nothing(size):
    """Keys and values `size` times as large, queries as much smaller: the same scores."""
    piece, rows = piece_of(CODECS["default"], 600, size), draw(2, 9, 64) / 8
    want, want_lse = exact(rows / size, piece)
    out, lse = chunked.attend_piece(rows / size, piece, torch.float16)
    assert (out.double() - want).norm() < 2e-3 * want.norm()
    assert_close(lse.double(), want_lse, atol=2e-3, rtol=0)


def test_a_row_far_larger_than_the_others_leaves_them_exact():
    piece, rows = piece_of(CODECS["default"], 600), draw(2, 9, 64) / 8
    rows[:, 4] *= 1e4
    want, _ = exact(rows, piece)
    out, _ = chunked.attend_piece(rows, piece, torch.float16)
    others = torch.arange(9) != 4
    error = (out.double() - want)[:, others].norm() / want[:, others].norm()
    assert error < 2e-3
    assert out.isfinite().all()


def test_chunks_are_views_side_by_side(monkeypatch):
    """Nothing is copied: keys of all chunks share one scratch, queries one row."""
    seen = []
    kernel = chunked._kernel

    def watch(rows, keys, values):
        seen.append((rows.stride(0), keys.shape[:3], keys.untyped_storage().data_ptr()))
        return kernel(rows, keys, values)

    monkeypatch.setattr(chunked, "_kernel", watch)
    chunked.attend_dense(draw(2, 9, 64), draw(2, 2053, 64), draw(2, 2053, 64), torch.float32)
    assert [shape for _, shape, _ in seen] == [(8, 2, 256), (1, 2, 5)]
    assert seen[0][0] == 0
    assert seen[0][2] == seen[1][2]


def test_a_kernel_that_errs_is_not_used(monkeypatch):
    works = chunked.works_on.__wrapped__
    kernel = chunked._kernel
    assert works(CPU, 64, torch.float16)
    assert works(CPU, 64, torch.float32)

    def shifts_values(rows, keys, values):
        return kernel(rows, keys, values.roll(1, dims=2))

    def fails(rows, keys, values):
        raise RuntimeError("no kernel image is available")

    def breaks(rows, keys, values):
        out, lse = kernel(rows, keys, values)
        return out * math.nan, lse

    for broken, reason in (
        (shifts_values, "differs by"), (fails, "can not run: no kernel image"), (breaks, "nan"),
    ):  # fmt: skip
        monkeypatch.setattr(chunked, "_kernel", broken)
        with pytest.warns(UserWarning, match=f"{reason}.*read by the plain path"):
            assert not works(CPU, 64, torch.float16)


def test_a_layer_read_in_chunks_is_the_layer_read_in_blocks(monkeypatch):
    """Sinks and the rest, heads of different lengths, and tokens of the agents' own."""
    monkeypatch.setenv("POLYKV_NATIVE", "0")  # which would read the codes itself
    layer = LayerKV(keys=draw(1, 3, 900, 64), values=draw(1, 3, 900, 64, seed=1))
    long, short = torch.arange(900), torch.arange(0, 900, 2)
    own = draw(3, 6, 1, 64, seed=3), draw(3, 6, 1, seed=4) + 5
    for kept in (None, [[long, short, long]]):
        pieces = freeze([layer], keys=Int8(), values=TurboQuant(3), kept=kept).layers[0]
        in_blocks = attend_pieces(draw(3, 6, 1, 64, seed=2), pieces, 3, 1 / 8, own)
        spy = Mock(wraps=chunked.attend_piece)
        with monkeypatch.context() as patch:
            patch.setattr(chunked, "runs_on", lambda *_: True)
            patch.setattr(chunked, "attend_piece", spy)
            in_chunks = attend_pieces(draw(3, 6, 1, 64, seed=2), pieces, 3, 1 / 8, own)
        assert spy.called
        for a, b in zip(in_chunks, in_blocks, strict=True):
            assert_close(a, b, atol=1e-5, rtol=0)


def test_a_cpu_goes_its_own_way():
    piece, rows = piece_of(CODECS["default"], 600), draw(2, 9, 64)
    assert not chunked.runs_on(CPU, 64, torch.bfloat16)
    assert chunked.attend(rows, piece, torch.bfloat16) is None
