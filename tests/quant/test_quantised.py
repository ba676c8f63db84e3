"""A quantised tensor carries its meaning: what it refuses, how it reads, and how it changes dialect."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from undertow.config.errors import InputError
from undertow.quant.blocks import WHOLE, Block
from undertow.quant.canonical import FOREIGN, canonical, count_codes
from undertow.quant.codec import decode
from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ, UE8M0
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import MXFP4, WEIGHTS, Scheme

ALL = torch.arange(256, dtype=torch.uint8)
COMMON = torch.tensor([code for code in range(256) if code not in FOREIGN], dtype=torch.uint8)


def ue8m0(*codes):
    return torch.tensor(codes, dtype=torch.uint8).view(UE8M0.dtype)


def rows(codes, dtype, *scales):
    """A row of codes a scale."""
    payload = codes.repeat(len(scales), 1).view(dtype)
    return Quantised(payload, ue8m0(*scales)[:, None], Block(1, payload.shape[1]))


@pytest.mark.parametrize("format", [E4M3, E4M3_FNUZ], ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_every_byte_under_every_scale_that_float32_can_hold(format, dtype):
    codes = torch.arange(20, 240, dtype=torch.uint8)
    found = rows(ALL, format.dtype, *codes.tolist()).dequantise(dtype)
    expected = decode(ALL, format).double() * 2.0 ** (codes.double() - 127)[:, None]
    assert found.dtype is dtype
    assert torch.equal(found.double().nan_to_num(nan=7e77), expected.nan_to_num(nan=7e77))


def test_a_scale_of_nan_reads_as_nan():
    found = rows(COMMON, E4M3.dtype, 127, 255, 128).dequantise()
    assert found.isnan().all(dim=1).tolist() == [False, True, False]


def test_reads_fp4_in_the_order_of_columns():
    payload = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    found = Quantised(payload.view(E2M1.dtype), ue8m0(128)[None], Block(1, 32))
    half = [0, 1, 2, 3, 4, 6, 8, 12]
    assert found.shape == (1, 32) and found.nbytes == 17
    assert found.dequantise().tolist() == [[*half, *(-each for each in half)] * 2]


def test_dialect_and_scale_type_are_those_of_the_dtypes():
    scales = torch.ones(1, 2)
    found = Quantised(torch.zeros(5, 256, dtype=torch.float8_e4m3fnuz), scales, Block(128, 128))
    assert found.scheme == Scheme(E4M3_FNUZ, Block(128, 128), "float32")
    assert (found.scheme.dialect, found.shape) == ("fnuz", (5, 256))
    assert repr(found) == "Quantised([5, 256], e4m3fnuz, blocks of 128x128, float32 scales, cpu)"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float32, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_bytes_without_a_label_are_refused(dtype):
    with pytest.raises(InputError, match="say no format and no dialect"):
        Quantised(torch.zeros(4, 64, dtype=dtype), torch.ones(4, 1), Block(1, 64))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_scales_without_a_label_are_refused(dtype):
    with pytest.raises(InputError, match="float8_e8m0fnu or float32 is expected"):
        Quantised(torch.zeros(4, 64, dtype=E4M3.dtype), torch.ones(4, 1).to(dtype), Block(1, 64))


def test_a_wrong_grid_is_refused():
    payload = torch.zeros(200, 300, dtype=E4M3.dtype)
    with pytest.raises(InputError, match=r"scales of shape \[2, 2\]: \[2, 3\] is expected for \[200, 300\]"):
        Quantised(payload, torch.ones(2, 2), Block(128, 128))
    with pytest.raises(InputError, match=r"\[1, 1\]: \[\] is expected for \[200, 300\] in blocks of whole tensor"):
        Quantised(payload, torch.ones(1, 1), WHOLE)
    with pytest.raises(InputError, match="FP4 with blocks of 128x128"):
        Quantised(torch.zeros(128, 64, dtype=E2M1.dtype), ue8m0(127)[None], Block(128, 128))
    with pytest.raises(InputError, match="a tensor with rows and columns"):
        Quantised(torch.zeros(128, dtype=E4M3.dtype), torch.ones(1), Block(1, 128))


def test_what_is_no_tensor_and_no_block_is_refused():
    payload, scales = torch.zeros(128, 128, dtype=E4M3.dtype), torch.ones(1, 1)
    with pytest.raises(InputError, match=r"^blocks of \(128, 128\): a Block is expected, such as Block\(128, 128\) of"):
        Quantised(payload, scales, (128, 128))
    with pytest.raises(InputError, match=r"^codes of type ndarray: a torch\.Tensor is expected$"):
        Quantised(payload.float().numpy(), scales, Block(128, 128))
    with pytest.raises(InputError, match=r"^scales of type list: a torch\.Tensor is expected$"):
        Quantised(payload, scales.tolist(), Block(128, 128))


def test_what_it_is_cannot_be_set():
    made = quantise(torch.randn(4, 64), WEIGHTS)
    for name in ("scheme", "scales", "payload", "shape", "dialect"):
        with pytest.raises(AttributeError):
            setattr(made, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.scheme.format = E4M3_FNUZ


def test_reading_into_another_type_is_refused():
    with pytest.raises(InputError, match=r"dequantising to torch\.int8"):
        quantise(torch.randn(4, 64), WEIGHTS).dequantise(torch.int8)


@pytest.mark.parametrize(("start", "end"), [("ocp", "fnuz"), ("fnuz", "ocp")])
def test_the_other_dialect_has_the_same_numbers(start, end):
    label = {"ocp": E4M3.dtype, "fnuz": E4M3_FNUZ.dtype}
    before = rows(COMMON, label[start], 60, 127, 200)
    after = before.in_dialect(end)
    assert torch.equal(after.dequantise(), before.dequantise())
    assert after.scheme.dialect == end and after.payload.dtype is label[end]
    assert torch.equal(after.payload.view(torch.uint8), before.payload.view(torch.uint8))
    step = 1 if end == "fnuz" else -1
    assert after.scales.view(torch.uint8).flatten().tolist() == [60 + step, 127 + step, 200 + step]
    back = after.in_dialect(start)
    assert torch.equal(back.scales.view(torch.uint8), before.scales.view(torch.uint8))


def test_relabelling_without_it_would_be_off_by_two():
    """The factor that `in_dialect` takes care of."""
    ocp = rows(COMMON, E4M3.dtype, 127)
    relabelled = Quantised(ocp.payload.view(torch.uint8).view(E4M3_FNUZ.dtype), ocp.scales, ocp.scheme.block)
    assert torch.equal(2 * relabelled.dequantise(), ocp.dequantise())


def test_negative_zero_becomes_zero_on_the_way_to_fnuz():
    ocp = rows(torch.tensor([0x80, 0x81, 0x00], dtype=torch.uint8), E4M3.dtype, 127)
    fnuz = ocp.in_dialect("fnuz")
    assert fnuz.payload.view(torch.uint8).tolist() == [[0x00, 0x81, 0x00]]
    assert torch.equal(fnuz.dequantise(), ocp.dequantise())
    assert ocp.payload.view(torch.uint8)[0, 0] == 0x80


@pytest.mark.parametrize(
    ("dtype", "code", "other"),
    [
        (E4M3.dtype, 0x7F, "ocp"),
        (E4M3.dtype, 0xFF, "ocp"),
        (E4M3_FNUZ.dtype, 0x80, "fnuz"),
        (E4M3_FNUZ.dtype, 0x7F, "fnuz"),
        (E4M3_FNUZ.dtype, 0xFF, "fnuz"),
    ],
)
def test_a_byte_that_the_other_dialect_lacks_is_refused(dtype, code, other):
    made = rows(torch.tensor([0x38, code], dtype=torch.uint8), dtype, 127, 127)
    with pytest.raises(InputError, match=r"2 of 4 bytes of e4m3.* have no equal in"):
        made.in_dialect("fnuz" if other == "ocp" else "ocp")


def test_a_scale_at_the_end_of_its_range_is_refused():
    with pytest.raises(InputError, match="1 of 2 scales cannot be doubled"):
        rows(COMMON, E4M3.dtype, 254, 1).in_dialect("fnuz")
    with pytest.raises(InputError, match="1 of 2 scales cannot be halved"):
        rows(COMMON, E4M3_FNUZ.dtype, 254, 0).in_dialect("ocp")


def test_the_same_dialect_and_fp4_are_returned_as_they_are():
    weights, experts = quantise(torch.randn(4, 64), WEIGHTS), quantise(torch.randn(4, 64), MXFP4)
    assert weights.in_dialect("ocp") is weights
    assert experts.in_dialect("fnuz") is experts
    with pytest.raises(InputError, match="'nvidia' is unknown; ocp or fnuz"):
        weights.in_dialect("nvidia")


def test_one_cache_of_bytes_serves_both_dialects():
    """A row is written once; either dialect reads it, fnuz with one more on the scale byte."""
    entries = torch.randn(64, 448, generator=torch.Generator().manual_seed(0))
    written = quantise(entries, Scheme(E4M3, Block(1, 64)), floor=1e-4)
    raw, scale = written.payload.view(torch.uint8), written.scales.view(torch.uint8)
    assert count_codes(written.payload, FOREIGN) == 0
    native = Quantised(raw.view(E4M3_FNUZ.dtype), (scale + 1).view(UE8M0.dtype), Block(1, 64))
    assert torch.equal(native.dequantise(), written.dequantise())


def test_canonical_bytes_of_every_byte():
    valid = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)
    found = canonical(valid.view(E4M3.dtype))
    assert found.tolist() == [0 if code == 0x80 else code for code in valid.tolist()]
    assert canonical(COMMON.view(E4M3_FNUZ.dtype)).tolist() == COMMON.tolist()
    with pytest.raises(InputError, match=r"codes of type torch\.uint8"):
        canonical(valid)


def test_counting_codes_of_a_large_strided_tensor():
    payload = torch.zeros(1100, 2200, dtype=torch.uint8)
    payload[1099, 2198], payload[0, 0], payload[5, 7] = 0x80, 0x7F, 0xFF
    view = payload[:, ::2]
    assert count_codes(payload, FOREIGN) == 3
    assert count_codes(view, FOREIGN) == 2


@pytest.mark.parametrize("scheme", [WEIGHTS, Scheme(E4M3, Block(32, 32), "float32"), MXFP4], ids=str)
def test_slices_of_whole_blocks_are_the_slices_of_the_result(scheme):
    """So a tensor larger than memory can be worked through by rows."""
    matrix = torch.randn(300, 160, generator=torch.Generator().manual_seed(2))
    whole, high = quantise(matrix, scheme), scheme.block.rows
    for start in (0, 128, 256):
        rows = slice(start, start + 128)
        part = quantise(matrix[rows], scheme)
        grid = slice(start // high, -(-min(start + 128, 300) // high))
        assert torch.equal(part.payload.view(torch.uint8), whole.payload.view(torch.uint8)[rows])
        assert torch.equal(part.scales.float(), whole.scales[grid].float())
        read = Quantised(
            whole.payload.view(torch.uint8)[rows].view(whole.payload.dtype), whole.scales[grid], scheme.block
        )
        assert torch.equal(read.dequantise(), whole.dequantise()[rows])
