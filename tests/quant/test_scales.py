"""Scales: the smallest power of two that suffices, by exact fractions; doubling and halving without rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undertow.config.errors import InputError
from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ, UE8M0
from undertow.quant.scales import ceil_scales, doubled, halved, scale_values, scales_for

NAN = float("nan")


def ue8m0(*codes):
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def codes(scales):
    return scales.view(torch.uint8).tolist()


@pytest.mark.parametrize("format", [E4M3, E4M3_FNUZ, E2M1], ids=lambda format: format.name)
@given(magnitude=st.floats(min_value=0, width=32, allow_infinity=False))
def test_is_the_smallest_power_of_two_that_suffices(format, magnitude):
    code = codes(ceil_scales(torch.tensor([magnitude]), format))[0]
    scale = Fraction(2) ** (code - 127)
    if magnitude == 0:
        assert code == 127
        return
    assert Fraction(magnitude) <= Fraction(format.largest) * scale
    assert code == 1 or Fraction(magnitude) > Fraction(format.largest) * scale / 2


@pytest.mark.parametrize("format", [E4M3, E4M3_FNUZ, E2M1], ids=lambda format: format.name)
def test_exactly_the_largest_keeps_its_power_and_the_next_float_gets_the_next(format):
    powers = torch.arange(-126, 119)
    exact = format.largest * 2.0**powers
    assert codes(ceil_scales(exact, format)) == (powers + 127).tolist()
    above = torch.nextafter(exact, torch.tensor(math.inf))
    assert codes(ceil_scales(above, format)) == (powers + 128).tolist()


def test_limits_of_both_types():
    maxima = torch.tensor([0.0, 1e-45, 2.0**-126, 3.4028234e38, math.inf, NAN, -NAN])
    assert maxima.view(torch.int32)[-1] < 0
    assert codes(ceil_scales(maxima, E4M3)) == [127, 1, 1, 247, 255, 255, 255]
    assert codes(ceil_scales(maxima, E2M1)) == [127, 1, 1, 253, 255, 255, 255]
    found = scales_for(maxima, E4M3, torch.float32)
    assert found[:4].tolist() == [1.0, 2.0**-126, 2.0**-126, (maxima[3] / 448).item()]
    assert bool(found[4:].isnan().all())


def test_float_scales_are_the_quotient():
    maxima = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    assert torch.equal(scales_for(maxima, E4M3, torch.float32), maxima / 448)
    assert torch.equal(
        scales_for(maxima, E4M3, torch.float8_e8m0fnu).view(torch.uint8), ceil_scales(maxima, E4M3).view(torch.uint8)
    )


def test_torch_rounds_a_scale_down_where_this_rounds_up():
    magnitude = torch.tensor([448 * 2.9])
    assert scale_values((magnitude / 448).to(torch.float8_e8m0fnu)).item() == 2
    assert scale_values(ceil_scales(magnitude, E4M3)).item() == 4


def test_doubling_and_halving_every_scale_byte():
    finite = torch.arange(255, dtype=torch.uint8)
    assert codes(doubled(ue8m0(*finite[:-1].tolist(), 255))) == [*range(1, 255), 255]
    assert codes(halved(ue8m0(*finite[1:].tolist(), 255))) == [*range(254), 255]
    values = scale_values(finite.view(UE8M0.dtype))
    assert torch.equal(scale_values(doubled(finite[:-1].view(UE8M0.dtype))), 2 * values[:-1])
    with pytest.raises(InputError, match=r"1 of 2 scales cannot be doubled within torch\.float8_e8m0fnu"):
        doubled(ue8m0(254, 3))
    with pytest.raises(InputError, match="2 of 3 scales cannot be halved"):
        halved(ue8m0(0, 0, 255))


def test_doubling_and_halving_float_scales():
    scales = torch.tensor([1.5, 2.0**-126, 3e38 / 2, NAN])
    assert doubled(scales)[:3].tolist() == (scales[:3] * 2).tolist() and doubled(scales)[3].isnan()
    assert torch.equal(halved(doubled(scales))[:3], scales[:3])
    with pytest.raises(InputError, match=r"1 of 2 scales cannot be doubled within torch\.float32"):
        doubled(torch.tensor([3e38, 1.0]))
    with pytest.raises(InputError, match="1 of 2 scales cannot be halved"):
        halved(torch.tensor([1e-45, 1.0]))
