"""FP4 as FP8 without rounding, or refused."""

from __future__ import annotations

import pytest
import torch

from undertow.config.errors import InputError
from undertow.quant.blocks import WHOLE, Block
from undertow.quant.canonical import FOREIGN, count_codes
from undertow.quant.formats import E2M1, UE8M0
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import MXFP4, WEIGHTS
from undertow.quant.widen import fp8_from_fp4


def experts(rows, columns, low, high, seed=0):
    """Random FP4 codes under random scale bytes from `low` to `high`, with both ends present."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, high + 1, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    scales[0, 0], scales[-1, -1] = low, high
    return Quantised(packed.view(E2M1.dtype), scales.view(UE8M0.dtype), Block(1, 32))


@pytest.mark.parametrize(("low", "high"), [(120, 134), (0, 14), (240, 254), (127, 127), (0, 3)])
@pytest.mark.parametrize("shape", [(128, 128), (200, 352), (5, 32)])
def test_a_span_of_two_to_the_fourteen_is_exact(low, high, shape):
    tensor = experts(*shape, low, high)
    found = fp8_from_fp4(tensor)
    assert found.scheme == WEIGHTS and found.shape == shape
    assert torch.equal(found.dequantise(), tensor.dequantise())
    assert count_codes(found.payload, FOREIGN) == 0
    if shape != (200, 352):
        assert found.scales.view(torch.uint8).tolist() == [[max(high - 6, 0)]]


def test_every_code_at_either_end_of_the_span():
    packed = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    scales = torch.tensor([100, 114], dtype=torch.uint8)[:, None, None].expand(2, 8, 1).contiguous()
    both = Quantised(packed.view(16, 16).view(E2M1.dtype), scales.view(16, 1).view(UE8M0.dtype), Block(1, 32))
    assert torch.equal(fp8_from_fp4(both).dequantise(), both.dequantise())


def test_one_power_more_is_refused():
    with pytest.raises(InputError, match=r"\d+ of 16384 FP4 numbers are no FP8 numbers in blocks of 128x128"):
        fp8_from_fp4(experts(128, 128, 100, 115))


def test_scales_of_groups_of_zeros_do_not_count():
    tensor = experts(4, 64, 100, 110)
    packed, scales = tensor.payload.view(torch.uint8), tensor.scales.view(torch.uint8)
    packed[0, :16], scales[0, 0] = 0, 250
    packed[1, 16:], scales[1, 1] = 0x88, 0
    made = Quantised(packed.view(E2M1.dtype), scales.view(UE8M0.dtype), Block(1, 32))
    assert torch.equal(fp8_from_fp4(made).dequantise(), made.dequantise())
    zeros = fp8_from_fp4(quantise(torch.zeros(4, 64), MXFP4))
    assert zeros.scales.float().tolist() == [[1.0]] and not bool(zeros.dequantise().any())


def test_stacks_blocks_and_dialect():
    stack = quantise(torch.randn(3, 40, 96, generator=torch.Generator().manual_seed(1)), MXFP4)
    for block in (Block(32, 32), Block(128, 128)):
        found = fp8_from_fp4(stack, block)
        assert found.scheme.block == block
        assert torch.equal(found.dequantise(), stack.dequantise())
        assert torch.equal(found.in_dialect("fnuz").dequantise(), stack.dequantise())


def test_what_is_not_fp4_and_odd_blocks_are_refused():
    with pytest.raises(InputError, match="e4m3, blocks of 128x128, ue8m0 scales: MXFP4 is expected"):
        fp8_from_fp4(quantise(torch.randn(4, 64), WEIGHTS))
    experts_ = quantise(torch.randn(4, 64), MXFP4)
    for block in (WHOLE, Block(1, 16)):
        with pytest.raises(InputError, match="columns a multiple of 32"):
            fp8_from_fp4(experts_, block)


def test_a_scale_of_nan_is_refused():
    tensor = experts(4, 64, 100, 110)
    tensor.scales.view(torch.uint8)[2, 1] = 255
    with pytest.raises(InputError, match="FP4 numbers are no FP8 numbers"):
        fp8_from_fp4(tensor)
