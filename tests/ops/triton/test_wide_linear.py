"""Linear layers with a float32 result: against float64, gradients too, and rows of odd numbers."""

from __future__ import annotations

import pytest
import torch

from tests.ops.compare import Draw, relative
from undertow.ops.triton.wide_linear import refusal, wide_linear

BF16 = torch.bfloat16


@pytest.mark.parametrize("rows", [0, 1, 3, 130])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (40, 24), (33, 7), (128, 1)])
def test_values_and_gradients(rows, inputs, outputs, device):
    draw = Draw(rows, inputs, outputs)
    leaves = [draw.normal(rows, inputs, dtype=BF16).to(device), draw.normal(outputs, inputs, dtype=BF16).to(device)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out, want = wide_linear(*leaves), exact[0] @ exact[1].t()
    upstream = draw.normal(rows, outputs).to(device)
    assert out.dtype == torch.float32 and relative(out, want) < 1e-6
    due = torch.autograd.grad(want, exact, upstream.double())
    for got, wanted in zip(torch.autograd.grad(out, leaves, upstream), due, strict=True):
        assert got.dtype == BF16 and relative(got, wanted) < 3e-3


def test_only_what_is_asked_for_is_made(device):
    draw = Draw("asked")
    x, weight = draw.normal(2, 5, 32, dtype=BF16).to(device), draw.normal(16, 32, dtype=BF16).to(device)
    out = wide_linear(x, weight.requires_grad_())
    assert out.shape == (2, 5, 16)
    out.sum().backward()
    assert x.grad is None and weight.grad is not None
    columns = x.flatten(0, 1).double().sum(0).expand(16, -1)
    assert relative(weight.grad, columns) < 3e-3


def test_refusals():
    x, weight = torch.empty(3, 8, dtype=BF16), torch.empty(2, 8)
    assert refusal(x, x) is None
    assert refusal(x, weight) == "weights are float32, and the products take bfloat16"
    assert "batch_invariant is on" in (refusal(x, x, invariant=True) or "")
