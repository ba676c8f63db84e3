"""Quantising against a plain loop over the blocks, and what it promises of scales, bytes and memory."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.quant import oracle
from undertow.config.errors import InputError
from undertow.quant.blocks import WHOLE, Block
from undertow.quant.canonical import FOREIGN, count_codes
from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ, UE8M0
from undertow.quant.packing import unpack
from undertow.quant.quantise import block_maxima, quantise
from undertow.quant.scheme import ACTIVATIONS, CACHE, MXFP4, WEIGHTS, Scheme

BLOCKS = (Block(128, 128), Block(32, 32), Block(1, 128), Block(1, 64), WHOLE)
FP8 = [Scheme(E4M3, block, scale) for block in BLOCKS for scale in ("ue8m0", "float32")]
named = pytest.mark.parametrize("scheme", [*FP8, MXFP4], ids=str)
NAN = float("nan")


def values(*shape, seed=0, dtype=torch.float32):
    """Values of magnitudes that differ by row and column."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 8, (*shape[:-1], 1), generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype)


def plain(matrix, scheme):
    """Codes and scales of a matrix, block after block, with ml_dtypes' rounding."""
    high, wide = (each or size for each, size in zip(scheme.block, matrix.shape, strict=True))
    codes = torch.empty(matrix.shape, dtype=torch.uint8)
    scales = torch.empty(-(-matrix.shape[0] // high), -(-matrix.shape[1] // wide))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            largest = matrix[where].abs().max()
            scale = largest / scheme.format.largest
            if scheme.scale == "ue8m0":
                scale = torch.tensor(2.0 ** math.ceil(math.log2(scale.item())))
            scales[i, j] = scale
            codes[where] = oracle.encoded(matrix[where] / scale, scheme.format)
    return codes, scales


def codes_of(tensor):
    raw = tensor.payload.view(torch.uint8)
    return unpack(raw) if tensor.scheme.format is E2M1 else raw


@named
@pytest.mark.parametrize("shape", [(128, 256), (200, 330), (1, 2), (300, 64)])
def test_equals_a_plain_loop(scheme, shape):
    matrix = values(*shape)
    found = quantise(matrix, scheme)
    codes, scales = plain(matrix, scheme)
    negative_zero = (codes == 0x80) & (scheme.format is E4M3)
    assert torch.equal(codes_of(found), codes.masked_fill(negative_zero, 0))
    assert torch.equal(found.scales.float().reshape(scales.shape), scales)
    assert found.scheme == scheme and found.shape == shape


@named
def test_several_tiles_equal_one(scheme):
    matrix = values(520, 600, seed=1)
    codes, scales = plain(matrix, scheme)
    found = quantise(matrix, scheme)
    assert torch.equal(codes_of(found), codes.masked_fill((codes == 0x80) & (scheme.format is E4M3), 0))
    assert torch.equal(found.scales.float().reshape(scales.shape), scales)


@named
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_float32(scheme, dtype):
    matrix = values(140, 70, dtype=dtype)
    one, two = quantise(matrix, scheme), quantise(matrix.float(), scheme)
    assert torch.equal(codes_of(one), codes_of(two))
    assert torch.equal(one.scales.float(), two.scales.float())


@named
def test_stacks_and_transposes(scheme):
    stack = values(3, 140, 70, seed=2)
    found = quantise(stack, scheme).dequantise()
    if scheme.block != WHOLE:
        assert torch.equal(found, torch.stack([quantise(each, scheme).dequantise() for each in stack]))
    assert torch.equal(
        quantise(stack[0].t(), scheme).dequantise(), quantise(stack[0].t().contiguous(), scheme).dequantise()
    )
    strided = stack.transpose(0, 1)
    assert torch.equal(quantise(strided, scheme).dequantise(), quantise(strided.contiguous(), scheme).dequantise())


@named
def test_empty_tensors(scheme):
    assert quantise(torch.empty(0, 64), scheme).dequantise().shape == (0, 64)
    assert quantise(torch.empty(0, 8, 64), scheme).dequantise().shape == (0, 8, 64)
    assert quantise(torch.empty(8, 0), scheme).dequantise().shape == (8, 0)


@named
def test_zeros_have_scale_one(scheme):
    found = quantise(torch.zeros(40, 64), scheme)
    assert bool((found.scales.float() == 1).all()) and not bool(found.dequantise().any())


@pytest.mark.parametrize("scheme", FP8, ids=str)
def test_fnuz_has_the_same_bytes_under_doubled_scales(scheme):
    matrix = values(200, 330, seed=3)
    ocp, fnuz = quantise(matrix, scheme), quantise(matrix, scheme.in_dialect("fnuz"))
    assert fnuz.scheme.format is E4M3_FNUZ
    assert torch.equal(ocp.payload.view(torch.uint8), fnuz.payload.view(torch.uint8))
    assert torch.equal(fnuz.scales.float(), 2 * ocp.scales.float())
    assert torch.equal(ocp.dequantise(), fnuz.dequantise())


@pytest.mark.parametrize("scheme", [*FP8, *(each.in_dialect("fnuz") for each in FP8)], ids=str)
def test_bytes_are_canonical(scheme):
    matrix = values(200, 330, seed=4)
    matrix[3, 5], matrix[150, 200] = -0.0, -1e-30
    generator = torch.Generator().manual_seed(0)
    for found in (quantise(matrix, scheme), quantise(matrix, scheme, generator=generator)):
        assert count_codes(found.payload, FOREIGN) == 0


@named
def test_a_block_with_nan_or_infinity_is_nan_and_no_other(scheme):
    for bad in (NAN, math.inf, -math.inf):
        matrix = values(130, 160, seed=5)
        whole = quantise(matrix, scheme).dequantise()
        matrix[1, 2] = bad
        found = quantise(matrix, scheme)
        rows, columns = scheme.block.rows or 130, scheme.block.columns or 160
        inside = (torch.arange(130)[:, None] // rows == 1 // rows) & (torch.arange(160) // columns == 2 // columns)
        assert torch.equal(found.dequantise().isnan(), inside)
        assert torch.equal(found.dequantise()[~inside], whole[~inside])
        assert count_codes(found.payload, FOREIGN) == 0 or scheme.format is E2M1


def test_floor_as_the_release_assumes_for_activations():
    rows = torch.tensor([[1e-6] * 128, [1e-4] * 128, [2.0] * 128, [0.0] * 128])
    found = quantise(rows, ACTIVATIONS, floor=1e-4)
    smallest = 2.0 ** math.ceil(math.log2(1e-4 / 448))
    assert found.scales.float().flatten().tolist() == [smallest, smallest, 2.0**-7, smallest]
    with pytest.raises(InputError, match=r"floor -1.0: a finite magnitude"):
        quantise(rows, ACTIVATIONS, floor=-1.0)


@named
def test_extreme_magnitudes(scheme):
    for magnitude in (2.5e38, 1e30, 1e-36):
        found = quantise(torch.full((2, 64), magnitude), scheme).dequantise()
        assert torch.allclose(found, torch.full((2, 64), magnitude), rtol=0.25 if scheme is MXFP4 else 0.0625)
    assert not bool(quantise(torch.full((2, 64), 1e-45), scheme).dequantise().any())


@pytest.mark.parametrize("scheme", [WEIGHTS, CACHE, MXFP4, WEIGHTS.in_dialect("fnuz")], ids=str)
def test_the_result_quantised_again_is_the_same_numbers(scheme):
    once = quantise(values(256, 256, seed=6), scheme).dequantise()
    assert torch.equal(quantise(once, scheme).dequantise(), once)
    assert torch.equal(quantise(once.bfloat16(), scheme).dequantise(torch.bfloat16).float(), once)


@named
def test_stochastic_rounding_is_seeded_and_right_on_average(scheme):
    matrix = values(8, 64, seed=7)
    draw = torch.Generator().manual_seed
    first, again, other = (quantise(matrix, scheme, generator=draw(seed)).dequantise() for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    generator, rounds = draw(3), 400
    mean = sum(quantise(matrix, scheme, generator=generator).dequantise().double() for _ in range(rounds)) / rounds
    largest = block_maxima(matrix, Block(1, 64) if scheme.block.rows == 1 else WHOLE)
    # A step is at most 1/8 (FP8) or 1/3 (FP4) of the block's largest, and a mean of 400 draws strays by 1/40 of it.
    assert bool(((mean - matrix).abs() <= largest * 5 / 40 / (3 if scheme is MXFP4 else 8)).all())
    assert (mean - matrix).abs().mean() < 0.2 * (quantise(matrix, scheme).dequantise() - matrix).abs().mean()


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(InputError, match=r"values of type torch\.float64"):
        quantise(torch.zeros(2, 2, dtype=torch.float64), WEIGHTS)
    with pytest.raises(InputError, match=r"shape \[64\]: a tensor with rows and columns"):
        quantise(torch.zeros(64), WEIGHTS)
    with pytest.raises(InputError, match="33 columns of FP4"):
        quantise(torch.zeros(2, 33), MXFP4)


def test_values_that_lie_nowhere_and_floors_beyond_float32_are_refused():
    with pytest.raises(InputError, match=r"^values of the layout torch\.sparse_coo: numbers that lie in memory"):
        quantise(torch.zeros(2, 2).to_sparse(), WEIGHTS)
    with pytest.raises(InputError, match=r"^values on the meta device: numbers that lie in memory"):
        quantise(torch.zeros(2, 2, device="meta"), WEIGHTS)
    for floor, told in ((1e300, "1e.300"), (float("inf"), "inf"), (float("nan"), "nan")):
        with pytest.raises(InputError, match=f"^floor {told}: a finite magnitude that float32 holds"):
            quantise(torch.zeros(2, 2), WEIGHTS, floor=floor)


def test_what_is_no_tensor_and_no_scheme_is_refused():
    with pytest.raises(InputError, match=r"^scheme 'fp8': a Scheme is expected, such as WEIGHTS or MXFP4 of undertow"):
        quantise(torch.zeros(2, 2), "fp8")
    with pytest.raises(
        InputError, match=r"^values of type ndarray: a torch\.Tensor is expected; use torch\.from_numpy$"
    ):
        quantise(np.zeros((2, 2), dtype=np.float32), WEIGHTS)
    with pytest.raises(InputError, match=r"^format 'fp8': E4M3, E4M3_FNUZ or E2M1 of undertow\.quant\.formats is exp"):
        Scheme("fp8", Block(128, 128))
    with pytest.raises(InputError, match=r"^blocks of \(128, 128\): a Block is expected, such as Block\(128, 128\) of"):
        Scheme(E4M3, (128, 128))


def test_the_largest_float32_reads_as_infinite():
    found = quantise(torch.full((1, 128), 3.4e38), ACTIVATIONS)
    assert found.scales.float().tolist() == [[2.0**120]] and bool(found.dequantise().isinf().all())


def test_schemes_that_are_none_are_refused():
    with pytest.raises(InputError, match=r"FP4 with blocks of 128x128 and ue8m0 scales: 1x32 and ue8m0 \(MXFP4\)"):
        Scheme(E2M1, Block(128, 128))
    with pytest.raises(InputError, match="FP4 with blocks of 1x32 and float32 scales"):
        Scheme(E2M1, Block(1, 32), "float32")
    with pytest.raises(InputError, match="scales of type 'fp32': ue8m0 or float32"):
        Scheme(E4M3, Block(1, 64), "fp32")
    with pytest.raises(InputError, match="ue8m0 holds scales, not numbers"):
        Scheme(UE8M0, Block(1, 64))
    with pytest.raises(InputError, match="two positive numbers"):
        Scheme(E4M3, Block(0, 64))
    with pytest.raises(InputError, match="two positive numbers"):
        Scheme(E4M3, Block(True, True))
    with pytest.raises(InputError, match=r"scales of type \['x'\]: ue8m0 or float32"):
        Scheme(E4M3, Block(1, 64), ["x"])


PROBE = """
import resource, sys, torch
torch.set_num_threads(1)
from undertow.quant.quantise import quantise
from undertow.quant.scheme import MXFP4, WEIGHTS
values = torch.empty(2048, 4096, dtype=torch.bfloat16).fill_(0.3)
quantise(values[:128], WEIGHTS).dequantise(torch.bfloat16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for scheme in (WEIGHTS, WEIGHTS.in_dialect("fnuz"), MXFP4):
    made = quantise(values, scheme)
    made.in_dialect("ocp").dequantise(torch.bfloat16)
    del made
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_beside_the_result_is_small():
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    # Results of one pass: 8 MiB of FP8 in each dialect and 16 MiB of bfloat16. A copy in float32 alone would be 32.
    assert int(result.stdout) * unit < (8 + 8 + 16 + 16) * 2**20
