"""Matrix products: plain, per group of features, and in fixed tiles."""

from __future__ import annotations

import pytest
import torch

from tests.ops import naive
from tests.ops.compare import DTYPES, Draw, check, same_bits
from undertow.ops.reference.linear import TILE, block_linear, linear, wide_linear


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 7, 5), (33, 24, 3), (64, 5, 30), (70, 100, 1)])
def test_linear(rows, inputs, outputs, dtype, invariant):
    draw = Draw(rows, inputs, outputs)
    operands = [draw.normal(rows, inputs, dtype=dtype), draw.normal(outputs, inputs, dtype=dtype)]
    check(lambda x, w: linear(x, w, invariant=invariant), naive.linear, operands)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_wide_linear(rows, dtype, invariant):
    """Of factors in their own types, in float32: as exact as that, and gradients in the types of the factors."""
    draw = Draw(rows)
    x, weight = draw.normal(2, rows, 24, dtype=dtype), draw.normal(7, 24, dtype=dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    out = wide_linear(x, weight, invariant=invariant)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and out.shape == (2, rows, 7)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = exact[0] @ exact[1].t()
    upstream = draw.normal(2, rows, 7)
    assert (out - want).norm() <= 1e-6 * want.norm()
    for got, due in zip(
        torch.autograd.grad(out, leaves, upstream.to(out.dtype)),
        torch.autograd.grad(want, exact, upstream.double()),
        strict=True,
    ):
        assert got.dtype == dtype and (got - due).norm() <= {torch.bfloat16: 3e-3}.get(dtype, 1e-6) * due.norm()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
def test_block_linear(rows, dtype, invariant):
    draw = Draw(rows)
    operands = [draw.normal(rows, 3, 10, dtype=dtype), draw.normal(3, 6, 10, dtype=dtype)]
    check(lambda x, w: block_linear(x, w, invariant=invariant), naive.block_linear, operands)


def test_block_linear_keeps_groups_apart():
    x, weight = torch.zeros(1, 2, 3, dtype=torch.float64), torch.ones(2, 4, 3, dtype=torch.float64)
    x[0, 1] = 1.0
    assert block_linear(x, weight).tolist() == [[[0.0] * 4, [3.0] * 4]]


@pytest.mark.parametrize("invariant", [False, True])
def test_no_rows(invariant):
    x, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    out = linear(x, weight, invariant=invariant)
    assert out.shape == (0, 3)
    grad_x, grad_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert grad_x.shape == (0, 4)
    assert (grad_weight == 0).all()
    assert block_linear(torch.zeros(0, 2, 4), torch.ones(2, 3, 4), invariant=invariant).shape == (0, 2, 3)


@pytest.mark.parametrize("invariant", [False, True])
def test_leading_dimensions(invariant):
    draw = Draw("leading")
    x, weight = draw.normal(2, 3, 5, 7), draw.normal(4, 7)
    out = linear(x, weight, invariant=invariant)
    assert out.shape == (2, 3, 5, 4)
    assert linear(x[0, 0, 0], weight, invariant=invariant).shape == (4,)
    if invariant:
        assert same_bits(linear(x[1, 2], weight, invariant=True), out[1, 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layout_of_operands_changes_no_bit(dtype):
    """Views that start at any byte, transposed and strided ones."""
    draw = Draw("views")
    x, weight = draw.normal(TILE + 7, 30, dtype=dtype), draw.normal(12, 30, dtype=dtype)
    want = linear(x, weight, invariant=True)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    strided = torch.stack([x, x], 1)[:, 1]
    for view in (shifted, x.t().contiguous().t(), strided):
        assert same_bits(linear(view, weight, invariant=True), want)


def test_expanded_upstream_gradient():
    draw = Draw("expanded")
    x, weight = draw.normal(5, 3).requires_grad_(), draw.normal(4, 3).requires_grad_()
    grad_x, _ = torch.autograd.grad(linear(x, weight, invariant=True).sum(), (x, weight))
    torch.testing.assert_close(grad_x, weight.sum(0).expand(5, 3).detach())
