"""A million values of every kind at once, for each format and rounding, and the whole tables of codes."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from tests.quant import oracle
from undertow.config.errors import InputError
from undertow.quant.codec import decode, encode
from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ, UE8M0

NUMBERS = (E4M3, E4M3_FNUZ, E2M1)
named = pytest.mark.parametrize("format", NUMBERS, ids=lambda format: format.name)
SMALLEST_NORMAL, INFINITY = 0x00800000, 0x7F800000  # bits of a float32


def mixture(format, seed=0):
    """1.1 million float32 of random sign, shuffled, of these kinds:

    any bits at all; numbers and ties of the format with the float32 on either side; magnitudes within the range of the
    format; at and beyond its overflow; subnormals of float32; infinities and NaN of any payload.
    """
    draw = torch.Generator().manual_seed(seed)

    def bits(low, high, count):
        return torch.randint(low, high, (count,), generator=draw).int().view(torch.float32)

    edges = oracle.boundaries(format)
    top = torch.tensor(overflow(format)).view(torch.int32).item()
    within = torch.rand(250_000, generator=draw) * 2.0 ** torch.randint(-14, 10, (250_000,), generator=draw)
    kinds = (
        bits(-(2**31), 2**31, 300_000),
        edges[torch.randint(0, len(edges), (300_000,), generator=draw)],
        within,
        bits(top - 4, top + (4 << 23), 100_000),
        bits(0, SMALLEST_NORMAL, 100_000),
        torch.full((25_000,), math.inf),
        bits(INFINITY + 1, 2**31, 25_000),
    )
    values = torch.cat(kinds)
    values = values[torch.randperm(len(values), generator=draw)]
    signs = torch.randint(0, 2, values.shape, generator=draw).int() << 31
    return (values.view(torch.int32) ^ signs).view(torch.float32)


def overflow(format):
    """The tie between the largest number and what would be the next: ml_dtypes leaves the format from there on."""
    positive = oracle.POSITIVE[format]
    return float(positive[-1] + (positive[-1] - positive[-2]) / 2)


def assert_every_kind_is_there(values, format):
    raw = values.view(torch.int32) & 0x7FFFFFFF
    ties = torch.tensor([float((low + high) / 2) for low, high in oracle.steps(format)])
    counts = {
        "subnormal": ((raw > 0) & (raw < SMALLEST_NORMAL)).sum(),
        "tie": torch.isin(values.abs(), ties).sum(),
        "infinite": values.isinf().sum(),
        "NaN": values.isnan().sum(),
        "beyond": (values.abs() >= overflow(format)).sum(),
        "negative": (values.view(torch.int32) < 0).sum(),
    }
    assert len(values) >= 10**6 and min(counts.values()) > 20_000, counts


@named
def test_nearest_equals_ml_dtypes_with_saturation(format):
    values = mixture(format)
    assert_every_kind_is_there(values, format)
    nan, beyond = values.isnan(), values.abs() >= overflow(format)
    negative = values.view(torch.int32) < 0
    expected = oracle.encoded(values, format)
    # What ml_dtypes makes NaN, and PyTorch NaN or the largest depending on its release, is the largest number here.
    largest = next(code for code in range(128) if format.value(code) == format.largest)
    expected[beyond] = (largest | (negative[beyond] << (format.bits - 1))).to(torch.uint8)
    if format is E2M1:  # ml_dtypes makes zero of NaN, which would hide it
        with pytest.raises(InputError, match=rf"{int(nan.sum())} of {len(values)} values are NaN"):
            encode(values, format)
        values, expected = values[~nan], expected[~nan]
    assert torch.equal(encode(values, format), expected)


@named
def test_nearest_is_the_nearest_number_and_ties_are_even(format):
    """The same without a second library: no number is closer, and of two as close the code is even."""
    values = mixture(format, seed=1)
    values = values[~values.isnan()]
    codes = encode(values, format).long() & ((1 << (format.bits - 1)) - 1)
    positive = torch.tensor([float(number) for number in oracle.POSITIVE[format]], dtype=torch.float64)
    magnitude = values.double().abs().clamp(max=format.largest)
    away = (positive[codes] - magnitude).abs()
    for other in ((codes - 1).clamp(min=0), (codes + 1).clamp(max=len(positive) - 1)):
        distance = (positive[other] - magnitude).abs()
        assert bool((away <= distance).all())
        assert bool((codes[(away == distance) & (other != codes)] % 2 == 0).all())


@named
def test_stochastic_takes_one_of_two_neighbours_and_is_right_on_average(format):
    values = mixture(format, seed=2)
    values = values[~values.isnan()]
    assert len(values) >= 10**6
    rounded = decode(encode(values, format, torch.Generator().manual_seed(3)), format).double()
    positive = torch.tensor([float(number) for number in oracle.POSITIVE[format]], dtype=torch.float64)
    magnitude = values.double().abs().clamp(max=format.largest)
    low = torch.searchsorted(positive, magnitude, right=True) - 1
    below, above = positive[low], positive[(low + 1).clamp(max=len(positive) - 1)]
    up = rounded.abs() != below
    assert torch.equal(rounded.abs()[up], above[up]) and not bool(up[magnitude == below].any())
    assert bool((rounded * values.sign() >= 0).all())
    share = torch.where(magnitude == below, 0.0, (magnitude - below) / (above - below).clamp(min=1e-300))
    spread = share * (1 - share)
    assert abs((up.double() - share).sum()) < 5 * spread.sum().sqrt()
    # The same between each two numbers, so that no error is made up for elsewhere.
    total = torch.zeros(len(positive), dtype=torch.float64)
    errors, variances = total.index_add(0, low, up.double() - share), total.index_add(0, low, spread)
    assert bool((errors.abs() <= 5 * variances.sqrt()).all())


@named
def test_codes_decoded_and_encoded_again_are_the_same_numbers(format):
    codes = torch.arange(1 << format.bits, dtype=torch.uint8)
    numbers = decode(codes, format)
    for generator in (None, torch.Generator().manual_seed(0)):
        again = decode(encode(numbers, format, generator), format)
        assert torch.equal(again.view(torch.int32)[~numbers.isnan()], numbers.view(torch.int32)[~numbers.isnan()])
        assert torch.equal(again.isnan(), numbers.isnan())


def test_the_256_scale_bytes_are_powers_of_two():
    values = decode(torch.arange(256, dtype=torch.uint8), UE8M0).tolist()
    assert [Fraction(value) for value in values[:255]] == [Fraction(2) ** (code - 127) for code in range(255)]
    assert math.isnan(values[255])


def test_the_16_codes_of_fp4():
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = decode(torch.arange(16, dtype=torch.uint8), E2M1).tolist()
    assert values == half + [-number for number in half] and math.copysign(1, values[8]) == -1


def test_where_others_differ_from_this_package():
    """Named, so that a release which changes its mind shows."""
    beyond = torch.tensor([480.0, math.inf])
    assert oracle.encoded(beyond, E4M3).tolist() == [0x7F, 0x7F]
    assert oracle.encoded(beyond, E4M3_FNUZ).tolist() == [0x80, 0x80]
    assert beyond.to(E4M3_FNUZ.dtype).view(torch.uint8).tolist() == [0x80, 0x80]
    # PyTorch 2.11 makes NaN of these, 2.13 the largest number.
    assert set(beyond.to(E4M3.dtype).view(torch.uint8).tolist()) <= {0x7E, 0x7F}
    assert encode(beyond, E4M3).tolist() == [0x7E, 0x7E] and encode(beyond, E4M3_FNUZ).tolist() == [0x7F, 0x7F]
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    assert oracle.encoded(nan, E2M1).tolist() == [0x8, 0x0]  # refused here
    # A scale of zero is NaN in ml_dtypes and 2^-127 in PyTorch.
    assert oracle.encoded(torch.zeros(1), UE8M0).tolist() == [0xFF]
    assert torch.zeros(1).to(UE8M0.dtype).view(torch.uint8).tolist() == [0]
