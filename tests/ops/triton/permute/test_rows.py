"""Rows and weights in expert order and back, forward and backward, to the bit of the reference."""

import pytest
import torch

from tests.ops.compare import Draw
from undertow.ops.reference import experts as reference
from undertow.ops.triton.permute import permute as rows_module
from undertow.ops.triton.permute import unpermute as sum_module
from undertow.ops.triton.permute import weights as weights_module
from undertow.ops.triton.permute.order import dispatch_order
from undertow.ops.triton.permute.permute import permute
from undertow.ops.triton.permute.unpermute import unpermute
from undertow.ops.triton.permute.weights import permute_weights

EXPERTS = 7
SIZES = [(1, 1, 8), (5, 3, 33), (4, 6, 2048), (2, 6, 1300), (2, 16, 1)]
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""

    def empty(size, dtype, device):
        size = size if isinstance(size, tuple) else (size,)
        return torch.full(
            size, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype, device=device
        )

    monkeypatch.setattr(rows_module.torch, "empty", empty)


def equal(op, name, x, indices, device):
    """The kernel with its own order and the reference's, result and gradient, as the reference has them."""
    want_order = reference.dispatch_order(indices, EXPERTS)
    definition = getattr(reference, name)
    theirs = x.detach().clone().requires_grad_()
    want = definition(theirs, want_order)
    upstream = Draw("up", name, x.shape).normal(*want.shape, dtype=want.dtype)
    (grad_want,) = torch.autograd.grad(want, theirs, upstream)
    there = reference.dispatch_order(indices.to(device), EXPERTS)
    for order in (dispatch_order(indices.to(device), EXPERTS), there):
        mine = x.to(device).requires_grad_()
        got = op(mine, order)
        (grad,) = torch.autograd.grad(got, mine, upstream.to(device))
        for found, due in ((got, want), (grad, grad_want)):
            assert found.dtype == due.dtype and torch.equal(found.cpu(), due)
    # The reference takes the kernels' order too.
    assert torch.equal(definition(x.to(device), dispatch_order(indices.to(device), EXPERTS)).cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "width"), SIZES)
def test_rows_and_weights(tokens, k, width, dtype, device):
    draw = Draw(tokens, k, width, dtype)
    indices = draw.integers(EXPERTS, tokens, k)
    equal(permute, "permute", draw.normal(tokens, width, dtype=dtype), indices, device)
    equal(unpermute, "unpermute", draw.normal(tokens * k, width, dtype=dtype), indices, device)
    equal(permute_weights, "permute_weights", draw.normal(tokens, k, dtype=dtype), indices, device)


def test_strides(device):
    draw = Draw("strides")
    indices = draw.integers(EXPERTS, 6, 2)
    equal(permute, "permute", draw.normal(40, 6).t(), indices, device)
    equal(unpermute, "unpermute", draw.normal(40, 12).t(), indices, device)
    equal(permute_weights, "permute_weights", draw.normal(2, 6).t(), indices, device)
    order = dispatch_order(indices.to(device), EXPERTS)
    x = draw.normal(6, 40).to(device).requires_grad_()
    (grad,) = torch.autograd.grad(permute(x, order).sum(), x)  # the gradient of a sum has no strides
    assert torch.equal(grad, torch.full_like(x, 2.0))


def test_no_tokens(device):
    order = dispatch_order(torch.zeros(0, 2, dtype=torch.int64, device=device), EXPERTS)
    x = torch.zeros(0, 4, device=device, requires_grad=True)
    out = unpermute(permute(x, order), order)
    assert out.shape == torch.autograd.grad(out.sum(), x)[0].shape == (0, 4)
    weights = torch.zeros(0, 2, device=device, requires_grad=True)
    moved = permute_weights(weights, order)
    assert moved.shape == (0,) and torch.autograd.grad(moved.sum(), weights)[0].shape == (0, 2)


def test_gradients_of_weights_are_moved_once(device):
    weights = torch.arange(6.0, device=device).view(3, 2).requires_grad_()
    order = dispatch_order(torch.tensor([[2, 0], [1, 2], [0, 1]], device=device), 3)
    moved = permute_weights(weights, order)
    assert moved.tolist() == [1.0, 4.0, 2.0, 5.0, 0.0, 3.0]
    (grad,) = torch.autograd.grad(moved, weights, torch.arange(6.0, device=device))
    assert grad.tolist() == [[4.0, 0.0], [2.0, 5.0], [1.0, 3.0]]


@pytest.mark.parametrize(("module", "name"), [(rows_module, "rows"), (sum_module, "rows"), (weights_module, "weights")])
def test_refusals(module, name):
    assert all(module.refusal(torch.zeros(2, 3, dtype=dtype)) is None for dtype in DTYPES)
    told = f"{name} are float64, neither bfloat16 nor float32"
    assert module.refusal(torch.zeros(2, 3, dtype=torch.float64)) == told
