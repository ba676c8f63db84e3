"""Tensors of a checkpoint: what they are is read off types and shapes; what cannot be is refused in one line."""

from __future__ import annotations

import itertools

import pytest
import torch

from undertow.config.errors import InputError
from undertow.quant.blocks import WHOLE, Block, grid_shape, join, split
from undertow.quant.formats import E4M3, E4M3_FNUZ
from undertow.quant.quantise import quantise
from undertow.quant.scheme import MXFP4, WEIGHTS, Scheme
from undertow.quant.stored import BLOCKS, from_stored, to_stored

NAME = "layers.3.ffn.w1"


def fp8(*shape, value=1.0, dtype=torch.float8_e4m3fn):
    return torch.full(shape, value).to(dtype)


def e8m0(*shape, code=127):
    return torch.full(shape, code, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def refused(match, *arguments, **options):
    with pytest.raises(InputError, match=match) as caught:
        from_stored(NAME, *arguments, **options)
    text = str(caught.value)
    assert text.startswith(NAME) and "\n" not in text


@pytest.mark.parametrize(
    "scheme",
    [*(Scheme(f, b, s) for f in (E4M3, E4M3_FNUZ) for b in BLOCKS for s in ("ue8m0", "float32")), MXFP4],
    ids=str,
)
def test_what_was_stored_is_read(scheme):
    made = quantise(torch.randn(300, 352, generator=torch.Generator().manual_seed(0)), scheme)
    weight, scale = to_stored(made)
    assert weight.dtype is (torch.int8 if scheme is MXFP4 else scheme.format.dtype)
    found = from_stored(NAME, weight, scale, shape=(300, 352), dialect=scheme.dialect)
    assert found.scheme == scheme and found.shape == (300, 352)
    assert torch.equal(found.dequantise(), made.dequantise())
    assert found.payload.data_ptr() == made.payload.data_ptr()


def test_stacks_and_labelled_fp4():
    made = quantise(torch.randn(2, 40, 64), MXFP4)
    for weight in (made.payload, made.payload.view(torch.uint8)):
        assert torch.equal(from_stored(NAME, weight, made.scales, shape=(2, 40, 64)).dequantise(), made.dequantise())


def test_a_scale_of_the_whole_has_any_number_of_dimensions():
    for shape in ((), (1,), (1, 1)):
        found = from_stored(NAME, fp8(300, 300), torch.full(shape, 3.0))
        assert found.scheme.block == WHOLE and bool((found.dequantise() == 3).all())


def test_blocks_with_equal_grids_cut_alike():
    """So a grid never leaves open which block it belongs to."""
    for shape in itertools.product((1, 2, 31, 32, 33, 64, 65, 127, 128, 129, 300), repeat=2):
        by_grid = {}
        for block in BLOCKS[:-1]:
            grid = grid_shape(shape, block)
            numbers = torch.arange(grid[0] * grid[1]).view(grid)
            owner = join(split(torch.zeros(shape, dtype=torch.int64), block) + numbers[:, None, :, None], shape)
            assert torch.equal(by_grid.setdefault(grid, owner), owner), (shape, block)


def test_packed_fp4_labelled_fp8_is_refused():
    made = quantise(torch.randn(256, 512), MXFP4)
    wrong = made.payload.view(torch.float8_e4m3fn)
    refused(
        "labelled torch.float8_e4m3fn, but has a scale for 16 bytes of a row, as packed FP4 has", wrong, made.scales
    )
    refused("as packed FP4 has; view it as int8", wrong, made.scales, shape=(256, 512))


def test_fp4_with_the_scales_of_fp8_is_refused():
    refused("one for each FP8 block; FP8 is read only as float8", torch.zeros(256, 512, dtype=torch.int8), e8m0(2, 4))
    refused(
        r"packed FP4 of shape \[256, 512\] has \[256, 32\], one for 32",
        torch.zeros(256, 512, dtype=torch.int8),
        e8m0(7, 9),
    )
    refused("packed FP4 with float32 scales", torch.zeros(256, 512, dtype=torch.uint8), torch.ones(256, 32))


def test_another_shape_than_the_configuration_says_is_refused():
    refused(
        r"\[256, 256\] numbers; \[256, 512\] are expected \(FP8 holds one", fp8(256, 256), e8m0(2, 2), shape=(256, 512)
    )
    packed = torch.zeros(256, 512, dtype=torch.int8)
    refused(
        r"\[256, 1024\] numbers; \[256, 512\] are expected \(packed FP4 holds two",
        packed,
        e8m0(256, 32),
        shape=(256, 512),
    )


def test_another_dialect_is_refused():
    refused(
        "dialect fnuz, ocp is expected; the same bytes would be off by a factor of two",
        fp8(64, 64, dtype=torch.float8_e4m3fnuz),
        e8m0(1, 1),
        dialect="ocp",
    )
    refused("dialect ocp, fnuz is expected", fp8(64, 64), e8m0(1, 1), dialect="fnuz")


@pytest.mark.parametrize(
    ("code", "label", "other"),
    [(0x80, torch.float8_e4m3fnuz, "ocp"), (0x7F, torch.float8_e4m3fn, "fnuz"), (0xFF, torch.float8_e4m3fn, "fnuz")],
)
def test_a_wrong_label_shows_in_the_bytes(code, label, other):
    raw = torch.full((64, 64), 0x38, dtype=torch.uint8)
    raw[5, 6] = code
    refused(
        f"1 of 4096 bytes are NaN in .* numbers in {other}, so the label is likely wrong", raw.view(label), e8m0(1, 1)
    )


def test_scales_are_positive_numbers():
    for bad, said in ((0.0, "0.0"), (-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf")):
        scale = torch.ones(2, 2)
        scale[1, 0] = bad
        refused(f"a scale is {said}; positive finite numbers are expected", fp8(256, 256), scale)
    refused("a scale is nan", fp8(256, 256), e8m0(2, 2, code=255))


def test_types_without_a_meaning_are_refused():
    refused(
        "its scale is torch.uint8; float8_e8m0fnu, viewed as it if", fp8(64, 64), torch.ones(1, 1, dtype=torch.uint8)
    )
    refused("its scale is torch.bfloat16; float8_e8m0fnu, or float32", fp8(64, 64), torch.ones(1, 1).bfloat16())
    refused("torch.bfloat16 with a scale; float8_e4m3fn", torch.ones(64, 64).bfloat16(), e8m0(1, 1))
    refused("torch.float8_e5m2 with a scale", fp8(64, 64, dtype=torch.float8_e5m2), e8m0(1, 1))
    refused(r"shape \[64\]; a matrix is expected", fp8(64), e8m0(1))


def test_an_unknown_grid_names_the_known_ones():
    refused(
        r"scales of shape \[3, 3\] for \[256, 512\]; \[2, 4\] \(128x128\), \[8, 16\] \(32x32\), \[256, 4\] \(1x128\)",
        fp8(256, 512),
        e8m0(3, 3),
    )


def test_reads_the_released_weights_scheme():
    found = from_stored(NAME, fp8(200, 300, value=2.0), e8m0(2, 3, code=128))
    assert found.scheme == WEIGHTS and found.scheme.block == Block(128, 128)
    assert bool((found.dequantise(torch.bfloat16) == 4).all())
