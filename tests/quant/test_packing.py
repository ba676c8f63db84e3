"""Two FP4 codes a byte."""

from __future__ import annotations

import pytest
import torch

from undertow.config.errors import InputError
from undertow.quant.packing import pack, unpack


def test_the_even_column_is_the_low_half():
    assert pack(torch.tensor([[0x1, 0xA, 0xF, 0x2]], dtype=torch.uint8)).tolist() == [[0xA1, 0x2F]]


def test_every_byte_goes_round():
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(pack(unpack(packed)), packed)
    assert unpack(packed).shape == (4, 128)


def test_an_odd_width_is_refused():
    with pytest.raises(InputError, match="3 columns of FP4: an even number is expected"):
        pack(torch.zeros(2, 3, dtype=torch.uint8))
