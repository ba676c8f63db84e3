"""Rounding to codes, against exact fractions, ml_dtypes and, where it is right, torch's cast."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.quant import oracle
from undertow.config.errors import InputError
from undertow.quant.codec import decode, encode
from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ, UE8M0

NUMBERS = (E4M3, E4M3_FNUZ, E2M1)
FP8 = (E4M3, E4M3_FNUZ)
named = pytest.mark.parametrize("format", NUMBERS, ids=lambda format: format.name)
fp8 = pytest.mark.parametrize("format", FP8, ids=lambda format: format.name)
INFINITY = float("inf")


def million(seed=0):
    """A million float32 of all bit patterns, NaN among them, and a million more of magnitudes near the formats'."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (500_000,), generator=generator).int().view(torch.float32)
    exponents = torch.randint(-14, 11, (500_000,), generator=generator)
    return torch.cat([bits, torch.randn(500_000, generator=generator) * 2.0**exponents])


def overflow(format):
    """Magnitudes from which another rounding than clamping would leave the format."""
    positive = oracle.POSITIVE[format]
    return float(positive[-1] + (positive[-1] - positive[-2]) / 2)


@named
def test_every_tie_and_its_neighbours(format):
    values = oracle.boundaries(format)
    expected = [oracle.nearest(value, format) for value in values.tolist()]
    assert encode(values, format).tolist() == expected


@named
def test_every_number_is_its_own_code(format):
    codes = torch.tensor([code for code in range(1 << format.bits) if code not in format.nan_codes], dtype=torch.uint8)
    assert torch.equal(encode(decode(codes, format), format), codes)


@named
def test_a_million_values_equal_ml_dtypes(format):
    values = million()
    within = values.abs() < overflow(format)
    assert torch.equal(encode(values[within], format), oracle.encoded(values[within], format))
    beyond = values[values.abs() >= overflow(format)]
    assert len(beyond) > 100_000
    assert torch.equal(decode(encode(beyond, format), format), beyond.sign() * format.largest)


@fp8
def test_a_million_values_equal_torch_where_it_does_not_overflow(format):
    values = million(1)
    values = values[values.abs() < overflow(format)]
    assert torch.equal(encode(values, format), values.to(format.dtype).view(torch.uint8))


@named
@given(value=st.floats(width=32, allow_nan=False))
def test_any_number(format, value):
    expected = oracle.nearest(value if abs(value) < 1e6 else (1e6 if value > 0 else -1e6), format)
    assert encode(torch.tensor([value]), format).item() == expected


@named
def test_overflow_and_infinity_become_the_largest(format):
    values = torch.tensor([format.largest, overflow(format), 1e4, 3.4e38, INFINITY])
    largest = [format.largest] * 5
    assert decode(encode(values, format), format).tolist() == largest
    assert decode(encode(-values, format), format).tolist() == [-each for each in largest]


def test_torch_gives_nan_above_the_largest_of_fnuz_where_this_clamps():
    values = torch.tensor([248.0, 500.0, INFINITY])
    assert bool(values.to(torch.float8_e4m3fnuz).float().isnan().all())
    assert encode(values, E4M3_FNUZ).tolist() == [0x7F] * 3


def test_nan_has_a_code_in_fp8():
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert encode(nan, E4M3).tolist() == [0x7F, 0xFF, 0x7F, 0xFF]
    assert encode(nan, E4M3_FNUZ).tolist() == [0x80] * 4
    with pytest.raises(InputError, match="4 of 4 values are NaN, which e2m1 cannot hold"):
        encode(nan, E2M1)


def test_zeros_and_float32_subnormals():
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40])
    assert encode(values, E4M3).tolist() == [0, 0x80] * 3
    assert encode(values, E4M3_FNUZ).tolist() == [0] * 6
    assert encode(values, E2M1).tolist() == [0, 8] * 3


@named
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_value(format, dtype):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[~values.isnan()]
    assert torch.equal(encode(values, format), encode(values.float(), format))


def test_shapes_and_refused_types():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert torch.equal(encode(values.t(), E4M3), encode(values, E4M3).t())
    assert encode(torch.empty(0, 4), E4M3).shape == (0, 4)
    assert encode(torch.tensor(1.0), E4M3).item() == 0x38
    with pytest.raises(InputError, match=r"values of type torch\.float64: float32, bfloat16 or float16"):
        encode(values.double(), E4M3)
    with pytest.raises(InputError, match="ue8m0 holds scales"):
        encode(values, UE8M0)


@named
def test_stochastic_goes_to_the_neighbours_and_is_right_on_average(format):
    positive = [float(number) for number in oracle.POSITIVE[format]]
    generator = torch.Generator().manual_seed(5)
    for low, high in itertools.pairwise(positive):
        for share in (0.125, 0.6875):
            value = low + share * (high - low)
            rounded = decode(encode(torch.full((4000,), -value), format, generator), format)
            assert set(rounded.tolist()) == {-low, -high}
            ups = (rounded == -high).double().mean().item()
            # Five standard deviations of 4000 draws.
            assert abs(ups - share) < 5 * (share * (1 - share) / 4000) ** 0.5


@named
def test_stochastic_keeps_numbers_and_limits(format):
    codes = torch.tensor([code for code in range(1 << format.bits) if code not in format.nan_codes], dtype=torch.uint8)
    values = decode(codes, format).repeat(200)
    generator = torch.Generator().manual_seed(6)
    assert torch.equal(encode(values, format, generator), codes.repeat(200))
    above = torch.tensor([format.largest * 1.01, 1e30, INFINITY] * 100)
    assert decode(encode(above, format, generator), format).tolist() == [format.largest] * 300


def test_stochastic_is_right_far_below_the_step():
    value, draws = E4M3.step / 256, 200_000
    generator = torch.Generator().manual_seed(7)
    mean = decode(encode(torch.full((draws,), value), E4M3, generator), E4M3).double().mean().item()
    assert abs(mean / E4M3.step - 1 / 256) < 5 * (1 / 256 / draws) ** 0.5


def test_stochastic_follows_its_seed():
    values = million(2)[500_000:510_000]
    one, two, other = (encode(values, E4M3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
