"""Numbers from theory, by quadrature and from the literature; none comes from this library's code."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.linalg import hadamard as scipy_hadamard
from scipy.stats import beta, norm

from polykv_lib.quantize import Int8, TurboQuant
from polykv_lib.quantize.codebooks import lloyd_max_levels, stored_levels
from polykv_lib.quantize.packing import unpack
from polykv_lib.quantize.rotations import hadamard, rotation

# Max (1960), Table I: least mean-squared error of a 2**bits-level quantizer of N(0, 1).
MAX_1960 = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
CPU = torch.device("cpu")


def expected_error(levels, density) -> float:
    """E[(z - Q(z))^2] by quadrature, for z with the given scipy distribution."""
    edges = (levels[1:] + levels[:-1]) / 2
    nearest = lambda z: levels[np.searchsorted(edges, z)]  # noqa: E731
    bound = min(9.0, density.support()[1])
    return quad(
        lambda z: (z - nearest(z)) ** 2 * density.pdf(z), -bound, bound, points=edges, limit=300
    )[0]


def sphere_channel(dim: int):
    """A channel of a random unit vector, times sqrt(dim): a scaled Beta((d-1)/2, (d-1)/2)."""
    return beta((dim - 1) / 2, (dim - 1) / 2, loc=-math.sqrt(dim), scale=2 * math.sqrt(dim))


def distortion(x, codec) -> float:
    error = (x - codec.dequantize(codec.quantize(x))).square().sum(-1)
    return (error / x.square().sum(-1)).mean().item()


@pytest.mark.parametrize(("bits", "published"), MAX_1960.items())
def test_lloyd_max_reaches_the_published_distortion(bits, published):
    assert expected_error(np.array(lloyd_max_levels(bits)), norm) == pytest.approx(
        published, rel=1e-3
    )


def test_the_three_bit_levels_are_the_published_ones():
    assert lloyd_max_levels(3)[4:] == pytest.approx([0.2451, 0.7560, 1.3439, 2.1520], abs=2e-4)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("rotation", ["plain", "signed", "double"])
def test_turboquant_has_the_distortion_of_the_sphere(bits, dim, rotation):
    x = torch.randn(20_000, dim, generator=torch.Generator().manual_seed(0))
    theory = expected_error(stored_levels(bits).numpy().astype(np.float64), sphere_channel(dim))
    assert distortion(x, TurboQuant(bits, rotation)) == pytest.approx(theory, rel=5e-3)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_turboquant_is_its_definition_in_double_precision(bits, dim):
    """Codes by a search among the levels, and matched norms; tokens enough for several blocks."""
    x = torch.randn(3, 2_500, dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    codec = TurboQuant(bits, match_norm=True)
    q = codec.quantize(x)
    x64, levels = x.double(), stored_levels(bits).double()
    length = x64.norm(dim=-1, keepdim=True)
    z = math.sqrt(dim) * (x64 / length) @ rotation(dim, "signed", 0, CPU).double()
    edges = (levels[1:] + levels[:-1]) / 2
    nearest = torch.bucketize(z, edges)
    away = (z[..., None] - edges).abs().amin(-1) > 1e-5  # of an edge, by more than fp32 rounds
    assert away.double().mean() > 0.999
    assert torch.equal(unpack(q.planes, bits)[away], nearest[away].to(torch.uint8))
    want = length / levels[unpack(q.planes, bits).long()].norm(dim=-1, keepdim=True)
    stored = codec.gains(q, 0, 2_500).double()
    assert (stored / want[..., 0] - 1).abs().max() < 2**-11 * 1.001  # half a step of fp16


def test_without_signs_a_constant_vector_becomes_a_spike():
    ones = torch.ones(4, 128)
    assert distortion(ones, TurboQuant(3, "plain")) == pytest.approx(0.715, abs=1e-3)
    seeds = [distortion(ones, TurboQuant(3, "signed", seed=s)) for s in range(20)]
    assert np.mean(seeds) == pytest.approx(MAX_1960[3], rel=0.5)
    assert np.mean([distortion(ones, TurboQuant(3, "double", seed=s)) for s in range(20)]) < 0.045


def test_matching_norms_restores_the_length_and_not_the_error_budget():
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    plain, matched = TurboQuant(3), TurboQuant(3, match_norm=True)
    lengths = [c.dequantize(c.quantize(x)).norm(dim=-1) / x.norm(dim=-1) for c in (plain, matched)]
    assert lengths[0].mean() == pytest.approx(0.986, abs=2e-3)  # Lloyd-Max levels shrink
    assert lengths[1] == pytest.approx(torch.ones(500), abs=1e-3)


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_hadamard_is_scipys(dim):
    assert hadamard(dim).numpy() == pytest.approx(scipy_hadamard(dim) / math.sqrt(dim))


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", ["plain", "signed", "double", "none"])
def test_rotations_are_orthogonal_and_seeded(dim, name):
    r = rotation(dim, name, 0, CPU)
    assert torch.allclose(r @ r.mT, torch.eye(dim), atol=1e-5)
    assert torch.equal(r, rotation(dim, name, 1, CPU)) == (name in ("plain", "none"))


@pytest.mark.parametrize(("scale", "bound"), [("tensor", 1.0), ("channel", 0.2)])
def test_one_large_channel_spoils_a_tensors_scale_and_not_a_channels(scale, bound):
    x = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5] *= 30
    others = torch.arange(64) != 5
    error = (x - Int8(scale).dequantize(Int8(scale).quantize(x)))[..., others].square().mean()
    fine = (
        x[..., others].abs().amax() / 127
    ) ** 2 / 12  # uniform rounding at the others' own range
    assert (error > 10 * fine) == (scale == "tensor")
    assert error < bound
