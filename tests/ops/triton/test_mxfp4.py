"""MXFP4 of bfloat16 by words, against `undertow.quant`: numbers near every boundary, and wide ranges."""

import pytest
import torch

from undertow.ops.triton.mxfp4 import read_mxfp4, write_mxfp4
from undertow.quant.quantise import quantise
from undertow.quant.scheme import MXFP4


def check(values: torch.Tensor, device: str, floor: float = 0.0) -> None:
    expected = quantise(values, MXFP4, floor)
    codes, scales = write_mxfp4(values.to(device), floor)
    assert torch.equal(codes.cpu(), expected.payload.view(torch.uint8))
    assert torch.equal(scales.cpu(), expected.scales.view(torch.uint8))
    found, wanted = read_mxfp4(codes, scales).cpu(), expected.dequantise(torch.bfloat16)
    assert torch.equal(found.isnan(), wanted.isnan())
    # Below the normal numbers a chip may give zero.
    usual = wanted.abs() >= 2.0**-126
    assert torch.equal(found[usual], wanted[usual]) and (found[~usual & ~wanted.isnan()].abs() < 2.0**-126).all()


def test_every_magnitude_and_tie(device):
    """All bfloat16 numbers up to 6 in groups whose scale is 1."""
    bits = torch.arange(0x3E00, 0x40C1, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    numbers = torch.cat((numbers, -numbers))
    groups = torch.zeros(-(-len(numbers) // 31), 32, dtype=torch.bfloat16)
    groups[:, 0] = 6
    padded = torch.zeros(groups.shape[0] * 31, dtype=torch.bfloat16)
    padded[: len(numbers)] = numbers
    groups[:, 1:] = padded.view(-1, 31)
    check(groups, device)


@pytest.mark.parametrize("shape", [(1, 2), (5, 70), (3, 45, 130), (7, 1026)], ids=str)
def test_wide_ranges(shape, device):
    g = torch.Generator().manual_seed(shape[-1])
    values = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-30, 30, shape, generator=g).float())
    values[..., ::7] = 0
    values = values.bfloat16()
    if values.numel() > 1000:
        values.view(-1)[77], values.view(-1)[777] = float("nan"), -float("inf")
    check(values, device)
    check(values, device, floor=1e-4)


def test_the_ends_of_the_range(device):
    values = torch.cat((torch.linspace(-3.3e38, 3.3e38, 64), torch.linspace(-3e-37, 3e-37, 64))).bfloat16()
    check(values[None], device)


def test_nothing(device):
    codes, scales = write_mxfp4(torch.empty(0, 64, dtype=torch.bfloat16, device=device))
    assert codes.shape == (0, 32) and scales.shape == (0, 2) and read_mxfp4(codes, scales).shape == (0, 64)
