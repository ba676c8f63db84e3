"""Scales that are kept: the bytes of the way back, where numbers alone would not give them."""

from __future__ import annotations

import torch

from undertow.checkpoint.convert.kept import quantise_under
from undertow.quant.blocks import Block
from undertow.quant.formats import E2M1, E4M3
from undertow.quant.packing import pack
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import MXFP4, WEIGHTS


def random_fp4(rows: int = 64, columns: int = 96) -> Quantised:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    codes[:, :32] &= 0xB  # no number above 1.5: twice too large a scale
    scales = torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return Quantised(pack(codes).view(E2M1.dtype), scales.view(torch.float8_e8m0fnu), Block(1, 32))


def same(one: Quantised, other: Quantised) -> bool:
    return torch.equal(one.payload.view(torch.uint8), other.payload.view(torch.uint8)) and torch.equal(
        one.scales.view(torch.uint8), other.scales.view(torch.uint8)
    )


def test_loose_scales_come_back() -> None:
    held = random_fp4()
    numbers = held.dequantise(torch.bfloat16)
    assert not same(quantise(numbers, MXFP4), held)
    assert torch.equal(quantise(numbers, MXFP4).dequantise(), held.dequantise())
    assert same(quantise_under(numbers, MXFP4, held.scales), held)


def test_a_block_that_changed_gets_a_scale_of_its_own() -> None:
    held = random_fp4()
    numbers = held.dequantise()
    numbers[5, 40] = 1000.0
    made = quantise_under(numbers, MXFP4, held.scales)
    fresh = quantise(numbers, MXFP4)
    changed = made.scales.view(torch.uint8) != held.scales.view(torch.uint8)
    assert changed.nonzero().tolist() == [[5, 1]]
    assert torch.equal(made.scales[5, 1].view(torch.uint8), fresh.scales[5, 1].view(torch.uint8))
    assert torch.equal(made.dequantise()[5, 32:64], fresh.dequantise()[5, 32:64])


def test_fnuz_has_twice_the_scale_and_no_negative_zero() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    codes[(codes & 0x7F) == 0x7F] = 0x30
    scales = torch.full((1, 2), 120, dtype=torch.uint8)
    held = Quantised(codes.view(E4M3.dtype), scales.view(torch.float8_e8m0fnu), Block(128, 128))
    numbers = held.dequantise(torch.bfloat16)
    assert same(quantise_under(numbers, WEIGHTS, held.scales), held)
    made = quantise_under(numbers, WEIGHTS.in_dialect("fnuz"), held.scales)
    assert torch.equal(made.payload.view(torch.uint8), codes.masked_fill(codes == 0x80, 0))
    assert made.scales.view(torch.uint8).tolist() == [[121, 121]]
    assert torch.equal(made.dequantise(), held.dequantise())
