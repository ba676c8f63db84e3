"""Quantising kernels against `undertow.quant`, whose bits they must give."""

from itertools import product

import pytest
import torch

from undertow.ops.triton.block_scales import dequantise_blocks, quantise_blocks, refusal
from undertow.quant.blocks import WHOLE, Block
from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import Scheme

BLOCKS = [Block(1, 128), Block(1, 64), Block(1, 32), Block(128, 128), Block(32, 32)]
SCHEMES = [
    *(Scheme(f, b, s) for f, b, s in product((E4M3, E4M3_FNUZ), BLOCKS, ("ue8m0", "float32"))),
    Scheme(E2M1, Block(1, 32)),
]
SHAPES = [(1, 2), (5, 70), (130, 258), (3, 45, 130)]


def spread(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of many magnitudes, some of them zero, a NaN in the last block of the larger shapes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-12, 12, shape, generator=g).float())
    x[..., ::7] = 0
    if x.numel() > 1000:
        x.view(-1)[-1] = float("nan")
    return x.to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """With NaN equal to NaN, whatever its bits."""
    a, b = a.cpu().float(), b.cpu().float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def plain(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8) if scales.dtype is torch.float8_e8m0fnu else scales


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_bits_are_those_of_the_definition(shape, scheme, device, hardware):
    dtype = (torch.bfloat16, torch.float32, torch.float16)[len(shape) % 3]
    x = spread(shape, dtype, seed=len(str(scheme)) + shape[0])
    rows, columns = scheme.block
    expected = quantise(x, scheme)
    options = {"fp4": scheme.format is E2M1, "hardware": hardware}
    codes, scales = quantise_blocks(
        x.to(device), rows, columns, ue8m0=scheme.scale == "ue8m0", doubled=scheme.format is E4M3_FNUZ, **options
    )
    assert torch.equal(codes.cpu(), expected.payload.view(torch.uint8))
    assert equal(scales, plain(expected.scales))
    for wanted in (torch.float32, torch.bfloat16):
        found = dequantise_blocks(
            codes, plain(expected.scales).to(device), rows, columns, wanted, fnuz=scheme.format is E4M3_FNUZ, **options
        )
        assert found.dtype is wanted and equal(found, expected.dequantise(wanted))


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_every_code_is_read(dialect, device, hardware):
    format = E4M3 if dialect == "ocp" else E4M3_FNUZ
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scales = torch.tensor([[127], [130]], dtype=torch.uint8)
    expected = Quantised(codes.view(format.dtype), scales.view(torch.float8_e8m0fnu), Block(1, 128)).dequantise()
    found = dequantise_blocks(
        codes.to(device), scales.to(device), 1, 128, torch.float32, fnuz=dialect == "fnuz", hardware=hardware
    )
    assert equal(found, expected)


def test_floor(device):
    x = torch.full((2, 64), 1e-6)
    scheme = Scheme(E4M3, Block(1, 64))
    codes, scales = quantise_blocks(x.to(device), 1, 64, floor=1e-4)
    expected = quantise(x, scheme, floor=1e-4)
    assert torch.equal(codes.cpu(), expected.payload.view(torch.uint8))
    assert torch.equal(scales.cpu(), plain(expected.scales))


def test_nothing_and_views(device):
    codes, scales = quantise_blocks(torch.empty(0, 128, device=device), 1, 128)
    assert codes.shape == (0, 128) and scales.shape == (0, 1)
    x = spread((128, 64), torch.float32, 3).nan_to_num().to(device)
    codes, _ = quantise_blocks(x.T, 1, 64)
    assert torch.equal(codes, quantise_blocks(x.T.contiguous(), 1, 64)[0])


def test_blocks_without_a_kernel_say_so():
    assert refusal(1, 128) is None and refusal(128, 128) is None
    for block in (Block(1, 48), Block(64, 128), WHOLE):
        assert "kernels have rows" in str(refusal(*block))
