"""Products with quantised weights: the plain operators on the numbers that the codes are read as."""

from __future__ import annotations

import pytest
import torch

from tests.ops.compare import Draw, same_bits
from undertow.config.errors import InputError
from undertow.ops.reference.experts import grouped_linear
from undertow.ops.reference.linear import linear
from undertow.ops.reference.quantised import grouped_linear_quantised, linear_quantised
from undertow.quant.quantise import quantise
from undertow.quant.scheme import ACTIVATIONS, MXFP4, WEIGHTS

SCHEMES = {"fp8": WEIGHTS, "fnuz": WEIGHTS.in_dialect("fnuz"), "mxfp4": MXFP4, "rows of 128": ACTIVATIONS}
SCHEME = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@SCHEME
def test_products_are_those_of_the_numbers(scheme, dtype, invariant):
    draw = Draw(str(scheme))
    weight, experts = quantise(draw.normal(40, 160), scheme), quantise(draw.normal(3, 24, 160), scheme)
    x, counts = draw.normal(2, 35, 160, dtype=dtype), torch.tensor([40, 0, 30])
    got = linear_quantised(x, weight, invariant=invariant)
    assert got.dtype == dtype and got.shape == (2, 35, 40)
    assert same_bits(got, linear(x, weight.dequantise(dtype), invariant=invariant))
    rows = x.flatten(0, 1)
    got = grouped_linear_quantised(rows, experts, counts, invariant=invariant)
    assert got.dtype == dtype and got.shape == (70, 24)
    assert same_bits(got, grouped_linear(rows, experts.dequantise(dtype), counts, invariant=invariant))


def test_values():
    """Codes that are whole numbers under scales of 2: a matrix of twos, one of them -6."""
    numbers = torch.full((2, 32), 2.0)
    numbers[1, 3] = -6.0
    weight = quantise(numbers, MXFP4)
    x = torch.ones(1, 32)
    assert linear_quantised(x, weight).tolist() == [[64.0, 56.0]]
    both = quantise(torch.stack([numbers, -numbers]), MXFP4)
    assert grouped_linear_quantised(torch.cat([x, 2 * x]), both, torch.tensor([1, 1])).tolist() == [
        [64.0, 56.0],
        [-128.0, -112.0],
    ]


def test_rows_have_a_gradient_and_weights_none():
    draw = Draw("gradient")
    weight, experts = quantise(draw.normal(8, 64), WEIGHTS), quantise(draw.normal(2, 8, 64), WEIGHTS)
    x, upstream = draw.normal(5, 64).requires_grad_(), draw.normal(5, 8)
    (of_rows,) = torch.autograd.grad(linear_quantised(x, weight), x, upstream)
    assert torch.allclose(of_rows, upstream @ weight.dequantise(), atol=1e-5)
    (of_rows,) = torch.autograd.grad(grouped_linear_quantised(x, experts, torch.tensor([2, 3])), x, upstream)
    parts = zip(upstream.split([2, 3]), experts.dequantise(), strict=True)
    assert torch.allclose(of_rows, torch.cat([part @ matrix for part, matrix in parts]), atol=1e-5)


def test_float64_rows_are_refused():
    with pytest.raises(InputError, match=r"^dequantising to torch\.float64: float32, bfloat16 or float16 is expected$"):
        linear_quantised(torch.ones(1, 32, dtype=torch.float64), quantise(torch.ones(2, 32), MXFP4))


def test_no_rows():
    experts = quantise(torch.ones(2, 8, 64), WEIGHTS)
    assert grouped_linear_quantised(torch.ones(0, 64), experts, torch.zeros(2, dtype=torch.int64)).shape == (0, 8)
    assert linear_quantised(torch.ones(3, 0, 64), quantise(torch.ones(8, 64), WEIGHTS)).shape == (3, 0, 8)
