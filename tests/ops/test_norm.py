"""RMSNorm with and without a weight."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops import naive
from tests.ops.compare import DTYPES, Draw, check, island
from undertow.ops.reference.norm import rms_norm

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 24), (1, 100), (7, 3, 30), (40, 2), (2, 3, 4, 6), (16,)])
@pytest.mark.parametrize("weight", ["own type", "float32", "none"])
def test_rms_norm(shape, weight, dtype):
    draw = Draw(shape)
    x = draw.normal(*shape, dtype=dtype)
    if weight == "none":
        check(lambda x: rms_norm(x, None, EPS), lambda x: naive.rms_norm(x, None, EPS), [x])
        return
    w = 1.0 + 0.3 * draw.normal(shape[-1], dtype=dtype if weight == "own type" else island(dtype))
    check(lambda x, w: rms_norm(x, w, EPS), lambda x, w: naive.rms_norm(x, w, EPS), [x, w])


def test_gradcheck():
    draw = Draw("gradcheck")
    x = draw.normal(4, 5, dtype=torch.float64).requires_grad_()
    w = draw.normal(5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, w))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-3), (x,))


def test_epsilon_is_inside_the_root():
    x = torch.tensor([[3e-3, 4e-3]], dtype=torch.float64)
    scale = 1.0 / math.sqrt(12.5e-6 + 1e-6)
    torch.testing.assert_close(rms_norm(x, None, 1e-6), x * scale, rtol=1e-14, atol=0)


def test_zero_rows_stay_zero_with_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(x, torch.ones(8), EPS)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (out == 0).all()
    torch.testing.assert_close(grad, torch.full((2, 8), 1e3))


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8)])
def test_no_rows(shape):
    x, w = torch.zeros(shape, requires_grad=True), torch.ones(8, requires_grad=True)
    out = rms_norm(x, w, EPS)
    grad_x, grad_w = torch.autograd.grad(out.sum(), (x, w))
    assert out.shape == grad_x.shape == shape
    assert (grad_w == 0).all()


def test_large_bfloat16_inputs_are_squared_in_float32():
    x = torch.full((1, 64), 1e18, dtype=torch.bfloat16)
    torch.testing.assert_close(rms_norm(x, None, EPS), torch.ones(1, 64, dtype=torch.bfloat16))


def test_inputs_are_left_alone():
    draw = Draw("alone")
    x, w = draw.normal(3, 8), draw.normal(8)
    before = x.clone(), w.clone()
    x.requires_grad_(), w.requires_grad_()
    rms_norm(x, w, EPS).sum().backward()
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
