"""Keys after RoPE: the harmonics of their means are found, stored and taken away."""

import pytest
import torch

from polykv_lib.metrics.distortion import nmse
from polykv_lib.quantize import HarmonicTurboQuant, TurboQuant
from polykv_lib.quantize.base import from_byte, to_byte

THETA = 10_000.0


def roped(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """RoPE as transformers applies it: pairs (j, j + d / 2), frequencies THETA^(-2j / d)."""
    n_tokens, dim = x.shape[-2:]
    frequency = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = (first + torch.arange(n_tokens))[:, None] * frequency
    cos, sin = (torch.cat((a, a), -1).float() for a in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def keys(spread: float, first: int = 0, n_tokens: int = 700) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(3, 1, 64, generator=generator)
    return roped(mean + spread * torch.randn(3, n_tokens, 64, generator=generator), first)


@pytest.mark.parametrize("first", [0, 4, 1_000])
def test_the_frequencies_are_those_of_rope_wherever_the_tokens_begin(first: int) -> None:
    stored = HarmonicTurboQuant(3).quantize(keys(0.5, first)).zero
    assert stored is not None
    wanted = THETA ** (-torch.arange(0, 64, 2) / 64)
    assert (stored[0, 2] - wanted).abs().max() < 0.2 / 700, "a fifth of a turn over all tokens"


def test_a_mean_before_rope_costs_no_codes() -> None:
    """The error is TurboQuant's on what is left: with a spread of 0.5, a fifth of the energy."""
    x = keys(0.5)
    left = keys(0.5) - keys(0.0)
    assert nmse(x, torch.zeros_like(x)) == 1
    error = (HarmonicTurboQuant(3).dequantize(HarmonicTurboQuant(3).quantize(x)) - x).square()
    alone = (TurboQuant(3).dequantize(TurboQuant(3).quantize(left)) - left).square()
    plain = (TurboQuant(3).dequantize(TurboQuant(3).quantize(x)) - x).square()
    assert error.sum() < 1.05 * alone.sum() < 0.25 * plain.sum()


def test_tokens_that_are_not_consecutive_lose_some_of_the_gain_and_no_more() -> None:
    kept = torch.randperm(2_000, generator=torch.Generator().manual_seed(0))[:700].sort()[0]
    x = keys(0.5, n_tokens=2_000)[:, kept]
    harmonic, plain = HarmonicTurboQuant(3), TurboQuant(3)
    error = nmse(x, harmonic.dequantize(harmonic.quantize(x)))
    whole = nmse(keys(0.5), harmonic.dequantize(harmonic.quantize(keys(0.5))))
    assert 1.2 * whole < error < nmse(x, plain.dequantize(plain.quantize(x)))


def test_odd_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="got vectors of 63 channels; RoPE turns pairs"):
        HarmonicTurboQuant(3).quantize(torch.randn(2, 5, 63))


def test_norms_in_bytes_are_as_near_as_they_say() -> None:
    x = (1 + torch.rand(3, 500, generator=torch.Generator().manual_seed(0))) * 2.0 ** torch.arange(
        500
    ).div(25)
    x[1, 7] = 0
    code, unit = to_byte(x)
    back = from_byte(code, unit)
    assert code.dtype == torch.uint8
    assert back[1, 7] == 0
    assert (back / x - 1)[x > 0].abs().max() < 0.035
    assert torch.equal(from_byte(*to_byte(torch.full((4,), 3.0))), torch.full((4,), 3.0))


def test_norms_in_bytes_cost_little_quality_and_half_the_norms_bytes() -> None:
    x = keys(0.5)
    half, byte = (HarmonicTurboQuant(4, norms=n) for n in ("half", "byte"))
    assert half.quantize(x).nbytes - byte.quantize(x).nbytes == 3 * 700 - 4
    errors = [nmse(x, codec.dequantize(codec.quantize(x))) for codec in (half, byte)]
    assert errors[1] < 1.02 * errors[0]
