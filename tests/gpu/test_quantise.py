"""Quantising on a GPU gives the bits of the CPU, whichever way it takes there."""

import pytest
import torch

from undertow.quant.blocks import WHOLE, Block
from undertow.quant.formats import E4M3, E4M3_FNUZ
from undertow.quant.kernels import converts, refusal
from undertow.quant.quantise import quantise
from undertow.quant.records import read_records, write_records
from undertow.quant.scheme import ACTIVATIONS, CACHE, MXFP4, WEIGHTS, Scheme

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize(
    "scheme",
    [
        *(WEIGHTS, ACTIVATIONS, CACHE, MXFP4, Scheme(E4M3_FNUZ, Block(32, 32), "float32")),
        *(Scheme(E4M3, WHOLE, "float32"), Scheme(E4M3, Block(16, 48))),  # without a kernel
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_the_cpu(scheme, dtype):
    torch.manual_seed(0)
    values = (torch.randn(3, 300, 514) * torch.exp2(torch.randint(-20, 20, (3, 300, 514)).float())).to(dtype)
    values[1, 7, 9] = float("nan")
    here, there = quantise(values, scheme), quantise(values.to(DEVICE), scheme)
    assert torch.equal(here.payload.view(torch.uint8), there.payload.view(torch.uint8).cpu())
    a, b = here.dequantise(dtype), there.dequantise(dtype).cpu()
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_small_magnitudes_are_not_flushed():
    values = torch.full((2, 128), 2.0**-130, dtype=torch.bfloat16)
    here, there = quantise(values, ACTIVATIONS), quantise(values.to(DEVICE), ACTIVATIONS)
    assert torch.equal(here.payload.view(torch.uint8), there.payload.view(torch.uint8).cpu())
    assert here.payload.view(torch.uint8).unique().tolist() != [0]


def test_more_numbers_than_32_bits_count():
    rows = 2**31 // 4096 + 3
    values = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=DEVICE)
    values[-2:] = torch.randn(2, 4096, device=DEVICE, dtype=torch.bfloat16)
    for scheme in (ACTIVATIONS, MXFP4):
        found = quantise(values, scheme)
        expected = quantise(values[-2:].cpu(), scheme)
        assert torch.equal(found.payload[-2:].view(torch.uint8).cpu(), expected.payload.view(torch.uint8))
        assert torch.equal(found.dequantise(torch.bfloat16)[-2:].cpu(), expected.dequantise(torch.bfloat16))
        del found


def test_records():
    torch.manual_seed(1)
    entries = torch.randn(1001, 512).bfloat16()
    records = write_records(entries.to(DEVICE), 64)
    assert torch.equal(records.cpu(), write_records(entries, 64))
    assert torch.equal(read_records(records, 512, 64).cpu(), read_records(records.cpu(), 512, 64))


def test_what_serves_here():
    assert refusal(DEVICE, WEIGHTS.block) is None and refusal(DEVICE, WHOLE) is not None
    assert converts(DEVICE) is (torch.cuda.get_device_capability() >= (8, 9))


@pytest.mark.parametrize("largest", [3e38, 6.0, 1.0, 1e-30, 1e-37, 2e-38, 0.0])
def test_every_bfloat16_in_mxfp4_beside_the_largest_of_its_group(largest):
    """NVIDIA's kernel takes two numbers an instruction; the CPU tests cannot run it."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    groups = torch.full((65536, 32), largest).bfloat16()
    groups[:, 5], groups[:, 18] = numbers, -numbers
    here, there = quantise(groups, MXFP4), quantise(groups.to(DEVICE), MXFP4)
    assert torch.equal(here.payload.view(torch.uint8), there.payload.view(torch.uint8).cpu())
    assert torch.equal(here.scales.view(torch.uint8), there.scales.view(torch.uint8).cpu())
