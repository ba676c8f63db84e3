"""Facts of the types, and the meaning of every code, against ml_dtypes, torch and a table written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.quant import oracle
from undertow.config.errors import InputError
from undertow.quant.codec import decode
from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ, FORMATS, UE8M0, e4m3, format_of

EIGHT_BITS = (E4M3, E4M3_FNUZ, UE8M0)


def all_codes(format):
    return torch.arange(1 << format.bits, dtype=torch.uint8)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_code_equals_ml_dtypes(format):
    ours, theirs = decode(all_codes(format), format), oracle.decoded(format)
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~ours.isnan()
    assert torch.equal(ours[numbers].view(torch.int32), theirs[numbers].view(torch.int32))


@pytest.mark.parametrize("format", EIGHT_BITS, ids=lambda format: format.name)
def test_every_code_equals_torch(format):
    ours, theirs = decode(all_codes(format), format), all_codes(format).view(format.dtype).float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~ours.isnan()
    assert torch.equal(ours[numbers].view(torch.int32), theirs[numbers].view(torch.int32))


@pytest.mark.parametrize("format", oracle.POSITIVE, ids=lambda format: format.name)
def test_every_code_equals_the_table(format):
    positive = [float(number) for number in oracle.POSITIVE[format]]
    assert [format.value(code) for code in range(len(positive))] == positive
    sign = 1 << (format.bits - 1)
    for code, number in list(enumerate(positive))[1:]:
        assert format.value(code | sign) == -number


@pytest.mark.parametrize(
    ("format", "one", "largest", "largest_code", "smallest_normal", "step"),
    [
        (E4M3, 0x38, 448.0, 0x7E, 2.0**-6, 2.0**-9),
        (E4M3_FNUZ, 0x40, 240.0, 0x7F, 2.0**-7, 2.0**-10),
        (E2M1, 0x2, 6.0, 0x7, 1.0, 0.5),
        (UE8M0, 0x7F, 2.0**127, 0xFE, 2.0**-127, 2.0**-127),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_facts(format, one, largest, largest_code, smallest_normal, step):
    assert format.value(one) == 1.0
    assert format.largest == largest == format.value(largest_code)
    assert (format.smallest_normal, format.step) == (smallest_normal, step)
    values = [format.value(code) for code in range(1 << format.bits)]
    assert max(value for value in values if not math.isnan(value)) == largest
    assert min(value for value in values if value > 0) == step
    assert tuple(code for code, value in enumerate(values) if math.isnan(value)) == format.nan_codes
    assert tuple(code for code, value in enumerate(values) if value == 0) == format.zero_codes


def test_negative_zero_is_a_number_of_ocp_alone():
    assert math.copysign(1, E4M3.value(0x80)) == -1 and E4M3.value(0x80) == 0
    assert math.isnan(E4M3_FNUZ.value(0x80))
    assert math.copysign(1, E2M1.value(0x8)) == -1


def test_the_same_byte_is_twice_as_much_in_ocp():
    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0x80, 0xFF)], dtype=torch.uint8)
    assert len(codes) == 253
    assert torch.equal(decode(codes, E4M3), 2 * decode(codes, E4M3_FNUZ))


def test_labels():
    assert [format_of(format.dtype) for format in FORMATS] == list(FORMATS)
    assert format_of(torch.uint8) is format_of(torch.float32) is None
    assert (e4m3("ocp"), e4m3("fnuz")) == (E4M3, E4M3_FNUZ)
    with pytest.raises(InputError, match="'OCP' is unknown; ocp or fnuz"):
        e4m3("OCP")


def test_decoding_keeps_the_shape_and_refuses_other_types():
    codes = torch.tensor([[0x38, 0x00, 0xB8], [0x40, 0x7E, 0xFE]], dtype=torch.uint8)
    assert decode(codes, E4M3).tolist() == [[1, 0, -1], [2, 448, -448]]
    assert decode(codes.t(), E4M3).tolist() == [[1, 2], [0, 448], [-1, -448]]
    assert decode(torch.empty(0, 3, dtype=torch.uint8), E4M3).shape == (0, 3)
    with pytest.raises(InputError, match=r"codes of type torch.int8: uint8 is expected"):
        decode(codes.view(torch.int8), E4M3)
