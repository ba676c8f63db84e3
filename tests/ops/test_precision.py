"""Accumulation type and the elementary functions that have the same bits everywhere in a tensor."""

from __future__ import annotations

import pytest
import torch

from tests.ops.compare import DTYPES, TOLERANCE, Draw, check, gradients, same_bits
from undertow.ops.reference.precision import sigmoid, twinned, wide


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_wide(dtype):
    x = Draw("wide").normal(3, dtype=dtype)
    assert wide(x).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(wide(x).to(dtype), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sigmoid(dtype):
    check(sigmoid, torch.sigmoid, [Draw("sigmoid").normal(50, dtype=dtype, scale=5.0)], TOLERANCE[dtype])


@pytest.mark.parametrize("x", [-1e30, -1e4, -89.0, 0.0, 89.0, 1e4, 1e30, -torch.inf, torch.inf])
def test_sigmoid_is_finite_with_a_finite_gradient(x):
    value = torch.tensor([x], requires_grad=True)
    out = sigmoid(value)
    (grad,) = gradients(out, [value], [torch.full((1,), 1e6)])
    torch.testing.assert_close(out, torch.sigmoid(value))
    torch.testing.assert_close(grad, 1e6 * torch.sigmoid(value) * torch.sigmoid(-value), atol=1e-6, rtol=1e-5)


def test_sigmoid_of_an_element_does_not_depend_on_its_place():
    x = Draw("place").normal(77)
    whole = sigmoid(x)
    for start in range(77):
        assert same_bits(sigmoid(x[start : start + 1].clone()), whole[start : start + 1])
        assert same_bits(sigmoid(x[start:].clone()), whole[start:])


def test_twinned():
    lone, several = torch.ones(1, 4), torch.ones(3, 4)
    assert twinned(lone).shape == (2, 4)
    assert twinned(several) is several
    assert twinned(torch.ones(0, 4)).shape == (0, 4)
