"""Laws that hold for every codec, input and head_dim."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polykv_lib.quantize import (
    Affine,
    FullPrecision,
    HarmonicTurboQuant,
    Int8,
    Quantizer,
    TurboQuant,
)
from polykv_lib.quantize.base import check_input
from polykv_lib.quantize.packing import pack, unpack

CODECS = [
    FullPrecision(),
    *[Int8(s) for s in ("tensor", "channel", "token", "block")],
    *[TurboQuant(b) for b in (1, 2, 3, 4)],
    TurboQuant(3, "plain"), TurboQuant(3, "double", seed=3), TurboQuant(3, "none", match_norm=True),
    *[Affine(b, 32, "token") for b in (2, 3, 5, 8)],
    *[Affine(b, 16, "channel") for b in (4, 6, 7)],
    *[HarmonicTurboQuant(b) for b in (1, 2, 3, 4)],
    TurboQuant(3, norms="byte"), TurboQuant(4, match_norm=True, norms="byte"),
]  # fmt: skip
EACH = pytest.mark.parametrize("codec", CODECS, ids=str)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    bits=st.integers(1, 8),
    n_tokens=st.integers(0, 5),
    groups=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_unpack_inverts_pack_and_no_bit_is_wasted(bits, n_tokens, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(
        0, 2**bits, (2, n_tokens, 8 * groups), generator=generator, dtype=torch.uint8
    )
    planes = pack(codes, bits)
    assert torch.equal(unpack(planes, bits), codes)
    assert sum(p.numel() for p in planes) * 8 == codes.numel() * bits


@given(n_words=st.sampled_from([2, 4, 16, 20, 32]), seed=st.integers(0, 99))
def test_three_bits_lie_on_disk_as_words_of_four_codes(n_words, seed):
    """Saved pools must open with any later version: the layout, number by number."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 8, (3, 4 * n_words), generator=generator, dtype=torch.uint8)
    low, nibbles = pack(codes, 3)
    for token, row in enumerate(codes.tolist()):
        words = [
            sum(code << 3 * k for k, code in enumerate(row[4 * j : 4 * j + 4]))
            for j in range(n_words)
        ]
        half = n_words // 2
        assert low[token].tolist() == [word & 255 for word in words]
        assert nibbles[token].tolist() == [
            words[j] >> 8 | words[j + half] >> 8 << 4 for j in range(half)
        ]


@EACH
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_dim_is_stored_by_its_formula_to_the_byte(codec: Quantizer, dim: int):
    if codec == Int8("block") and dim % 32:
        with pytest.raises(ValueError, match=f"multiples of 32, got {dim}. Use scale='token'"):
            codec.quantize(draw(3, 50, dim))
        return
    heads, tokens = 3, 50
    n = heads * tokens * dim
    match codec:
        case FullPrecision():
            want = 4 * n
        case Int8("tensor"):
            want = n + 4
        case Int8("channel"):
            want = n + 4 * heads * dim
        case Int8("token"):
            want = n + 2 * heads * tokens + 4
        case Int8("block"):
            want = n + 2 * n // 32 + 4
        case TurboQuant(bits=bits, norms="byte"):
            want = n * bits // 8 + heads * tokens + 8
        case TurboQuant(bits=bits):
            want = n * bits // 8 + 2 * heads * tokens + 4
        case HarmonicTurboQuant(bits=bits):
            want = n * bits // 8 + 2 * heads * tokens + 4 + 4 * 3 * heads * dim // 2
        case Affine(bits=bits, group=group, axis="token"):
            want = n * bits // 8 + 4 * heads * dim * -(-tokens // group) + 4
        case Affine(bits=bits, group=group):
            want = n * bits // 8 + 4 * heads * tokens * -(-dim // group) + 4
    stored = codec.quantize(draw(heads, tokens, dim))
    assert stored.nbytes == want
    assert stored.nbytes == sum(t.untyped_storage().nbytes() for t in stored.tensors.values())


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trips_keep_shape_dtype_and_most_of_the_energy(codec, dtype):
    x = draw(2, 3, 40, 64).to(dtype)
    back = codec.dequantize(codec.quantize(x))
    assert back.shape == x.shape
    assert back.dtype == dtype
    assert (back - x).float().square().mean() < 0.4
    if codec == FullPrecision():
        assert torch.equal(back, x)


@EACH
def test_levels_gains_and_maps_compose_to_dequantize_on_any_slice(codec):
    x = draw(3, 70, 64)
    q = codec.quantize(x)
    part = codec.levels(q, 30, 53, torch.float32)
    gains = codec.gains(q, 30, 53)
    if gains is not None:
        part = part * gains[..., None]
    torch.testing.assert_close(codec.from_levels(q, part), codec.dequantize(q)[:, 30:53])
    rows = draw(3, 5, 64, seed=1)  # q . (y B) = (q B^T) . y
    scores = codec.to_levels(q, rows) @ part.mT
    torch.testing.assert_close(
        scores, rows @ codec.dequantize(q)[:, 30:53].mT, atol=1e-4, rtol=1e-4
    )


@EACH
def test_empty_and_strided_input(codec):
    assert codec.dequantize(codec.quantize(torch.empty(2, 0, 64))).shape == (2, 0, 64)
    strided = draw(40, 64, 3).permute(2, 0, 1)
    a, b = codec.quantize(strided), codec.quantize(strided.contiguous())
    assert torch.equal(codec.dequantize(a), codec.dequantize(b))


@EACH
@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_tiny_and_huge_tensors_are_stored_as_well_as_any(codec, exponent):
    """A power of two changes no code and no half-precision scale, so nothing may change at all."""
    x = draw(2, 10, 64)
    got = codec.dequantize(codec.quantize(x * 2.0**exponent))
    torch.testing.assert_close(
        got, codec.dequantize(codec.quantize(x)) * 2.0**exponent, rtol=1e-6, atol=0
    )


@EACH
def test_zero_is_stored_exactly(codec):
    assert (codec.dequantize(codec.quantize(torch.zeros(2, 10, 64))) == 0).all()


@EACH
def test_a_zero_token_among_others_stays_zero(codec):
    x = draw(2, 10, 64)
    x[:, 4] = 0
    x[:, 5] *= 1e-4
    back = codec.dequantize(codec.quantize(x))
    # The groups of Affine hold no exact zero, and harmonics make no exception of a token.
    if not isinstance(codec, Affine | HarmonicTurboQuant):
        assert (back[:, 4] == 0).all()
    if isinstance(codec, TurboQuant):  # its own norm: relative error of any other token
        error = (back - x)[:, 5].norm() / x[:, 5].norm()
        assert error < 0.7


@pytest.mark.parametrize("family", [TurboQuant, lambda bits: Affine(bits, 32)])
def test_bits_really_change_the_levels(family):
    x = draw(2, 100, 64)
    errors = [(family(b).dequantize(family(b).quantize(x)) - x).square().mean() for b in (2, 3, 4)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


@EACH
def test_codecs_are_frozen_values_of_the_contract(codec):
    assert isinstance(codec, Quantizer)
    assert hash(codec) == hash(dataclasses.replace(codec))
    for field in dataclasses.fields(codec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(codec, field.name, None)


def unchecked(family: type, **fields: object) -> object:
    """A codec as a caller without type checks makes it."""
    codec = object.__new__(family)
    for name, value in fields.items():
        object.__setattr__(codec, name, value)
    codec.__post_init__()
    return codec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TurboQuant(5), "bits must be 1, 2, 3 or 4"),
        (
            lambda: unchecked(TurboQuant, bits=3, rotation="sined"),
            "'sined'.*: signed, plain, double, none",
        ),
        (
            lambda: unchecked(Int8, scale="row"),
            "'row'.*choose one of: tensor, channel, token, block",
        ),
        (lambda: unchecked(TurboQuant, bits=3.0), "bits must be 1, 2, 3 or 4"),
        (lambda: Affine(9), "bits must be 2 to 8"),
        (lambda: unchecked(Affine, bits="4"), "bits must be 2 to 8"),
        (lambda: unchecked(Affine, bits=4.5), "whole numbers"),
        (lambda: check_input([1.0], Int8()), "got a list; pass a tensor"),
        (lambda: check_input(torch.ones(4), Int8()), r"of shape \[4\]; it stores floating-point"),
        (
            lambda: check_input(torch.ones(2, 4, dtype=torch.int64), Int8()),
            "got a torch.int64 tensor",
        ),
        (lambda: TurboQuant().quantize(torch.ones(2, 12)), "head_dim=12 can not be packed"),
    ],
)
def test_bad_arguments_say_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@EACH
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_of_fp16_come_back_finite(codec, sign):
    x = torch.full((1, 2, 8, 64), sign * 65504.0, dtype=torch.float16)
    q = codec.quantize(x)
    assert codec.dequantize(q).isfinite().all()
    levels = codec.levels(q, 2, 5, torch.float16)
    assert levels.isfinite().all()
    if not isinstance(codec, TurboQuant):  # a constant becomes one spike there, clipped by 3 bits
        assert (codec.dequantize(q).float() / x.float() - 1).abs().max() < 0.01


@EACH
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_without_a_code_are_refused(codec, number):
    x = draw(1, 2, 8, 64)
    x[0, 1, 3, 5] = number
    if codec == FullPrecision():
        assert_equal_with_nan(codec.dequantize(codec.quantize(x)), x)
        return
    with pytest.raises(ValueError, match="got a tensor with infinite or NaN numbers"):
        codec.quantize(x)


def assert_equal_with_nan(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)
