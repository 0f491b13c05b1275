"""Encoding in C is torch's, number by number; where it can not be, torch encodes."""

import math

import pytest
import torch
from torch.testing import assert_close

from polykv_lib.quantize import Int8, TurboQuant, native
from polykv_lib.quantize.codebooks import nearest_code
from polykv_lib.quantize.shaping import second_moments, shaped_codes, weighted

pytestmark = pytest.mark.skipif(not native._works(), reason="no compiler, or no AVX-512")


def vectors(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sizes = torch.logspace(-6, 6, shape[-2])[:, None]
    return (x * sizes).to(dtype)


def both(monkeypatch: pytest.MonkeyPatch, codec, x):
    """What is stored with C, which must have been used, and without."""
    called = []
    with monkeypatch.context() as patch:
        for name in ("turbo", "largest", "rounded"):
            own = getattr(native, name)
            patch.setattr(
                native, name, lambda *a, own=own: called.append(own(*a) is not None) or own(*a)
            )
        patch.setenv("POLYKV_NATIVE", "1")
        one = codec.quantize(x)
        assert called
        assert all(called)
        called.clear()
        patch.setenv("POLYKV_NATIVE", "0")
        other = codec.quantize(x)
        assert not any(called)
    return one, other


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"match_norm": True}, {"rotation": "none"}])
def test_turboquant(monkeypatch, bits, dim, options):
    x = vectors(2, 3, 400, dim)
    x[0, 1, 7] = 0
    codec = TurboQuant(bits, **options)
    one, other = both(monkeypatch, codec, x)
    bytes_ = (
        torch.cat([p.flatten() for p in one.planes]),
        torch.cat([p.flatten() for p in other.planes]),
    )
    assert (bytes_[0] != bytes_[1]).float().mean() < 1e-4, "but for numbers on an edge"
    assert_close(one.scale.float(), other.scale.float(), rtol=2e-3, atol=1e-3)
    assert one.scale.dtype == other.scale.dtype
    assert [p.shape for p in one.planes] == [p.shape for p in other.planes]
    wrong = TurboQuant(bits, seed=1, **options).quantize(x)
    if "rotation" not in options:
        assert any(
            (p != q).float().mean() > 0.1 for p, q in zip(wrong.planes, other.planes, strict=True)
        )


@pytest.mark.parametrize("scale", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 200, 64), (1, 5, 80), (7, 16)])
def test_int8(monkeypatch, scale, dtype, shape):
    x = vectors(*shape, dtype=dtype)
    x[..., 5] = 0
    one, other = both(monkeypatch, Int8(scale), x)
    assert torch.equal(one.planes[0], other.planes[0])
    assert torch.equal(one.scale, other.scale)


def test_strided_tensors_are_read_as_they_are(monkeypatch):
    x = vectors(2, 64, 100, 3).permute(0, 3, 2, 1)
    for codec in (TurboQuant(3), Int8()):
        one, _ = both(monkeypatch, codec, x)
        again, _ = both(monkeypatch, codec, x.contiguous())
        assert all(map(torch.equal, one.planes, again.planes))


@pytest.mark.parametrize("size", [1e-38, 1e37])
def test_vectors_out_of_range_are_left_to_torch(size):
    x = vectors(2, 10, 64) * 0 + torch.randn(64, generator=torch.Generator().manual_seed(0)) * size
    read = TurboQuant(4).dequantize(TurboQuant(4).quantize(x))
    x, read = x.double(), read.double()
    assert ((read - x).norm() / x.norm()).item() < 0.15


@pytest.mark.parametrize("codec", [TurboQuant(3), Int8(), Int8("tensor")])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused_as_ever(codec, wrong):
    x = vectors(2, 10, 64)
    x[1, 3, 7] = wrong
    with pytest.raises(ValueError, match="infinite or NaN"):
        codec.quantize(x)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (16, 64), (333, 64), (50, 128), (40, 256)])
def test_shaped_codes(monkeypatch, bits, tokens, dim):
    source = torch.Generator().manual_seed(0)
    x, queries = (torch.randn(2, n, dim, generator=source) for n in (tokens, 3 * dim))
    basis = torch.linalg.qr(queries[:, :dim])[0]
    seen = (queries * 0.97 ** torch.arange(dim) @ basis)[None]
    m = weighted(second_moments(seen, 2), torch.eye(dim))[0]
    called = []
    with monkeypatch.context() as patch:
        own = native.shaped
        patch.setattr(native, "shaped", lambda *a: called.append(own(*a) is not None) or own(*a))
        patch.setenv("POLYKV_NATIVE", "1")
        codes, fit = shaped_codes(x, m, bits)
        patch.setenv("POLYKV_NATIVE", "0")
        wanted, best = shaped_codes(x, m, bits)
    assert called == [True, False]
    same = (codes == wanted).all(-1)
    assert same.float().mean() > 0.99, "but for numbers on an edge, and what they are fed to"
    assert_close(fit[same], best[same])
    assert (nearest_code(x, bits) != codes).float().mean() > 0.01, "the moments do nothing"


def test_functions_that_err_are_not_used(monkeypatch):
    right = native._turbo
    native._is_right.cache_clear()
    try:
        monkeypatch.setattr(native, "_turbo", lambda *a: (right(*a)[0], right(*a)[1] * 1.01))
        assert native.turbo(vectors(10, 64), torch.eye(64), 3, False) is None
    finally:
        native._is_right.cache_clear()
