"""Quantisation in training: the numbers of a stored tensor, and a gradient that passes."""

from __future__ import annotations

import pytest
import torch

from undertow.quant.blocks import Block
from undertow.quant.fake import fake_quantise
from undertow.quant.formats import E4M3
from undertow.quant.quantise import quantise
from undertow.quant.scheme import ACTIVATIONS, CACHE, MXFP4, WEIGHTS, Scheme

SCHEMES = (WEIGHTS, ACTIVATIONS, CACHE, MXFP4, Scheme(E4M3, Block(32, 32), "float32"), WEIGHTS.in_dialect("fnuz"))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient(scheme, dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 70, 192, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(2, 70, 192, generator=generator).to(dtype)
    found = fake_quantise(values, scheme)
    assert found.dtype is dtype
    assert torch.equal(found, quantise(values, scheme).dequantise(dtype)) and not torch.equal(found, values)
    (found * weight).sum().backward()
    assert torch.equal(values.grad, weight)


def test_training_reaches_the_nearest_number():
    """Straight through, the weight moves on below the rounding until the rounded one is right."""
    weight = torch.full((1, 32), 2.2, requires_grad=True)
    target = torch.full((1, 32), 3.0)
    for _ in range(100):
        loss = (fake_quantise(weight, MXFP4) - target).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight.detach() - 0.05 * gradient).requires_grad_()
    assert torch.equal(fake_quantise(weight, MXFP4), target)


def test_stochastic_and_floor_are_passed_on():
    values = torch.full((1, 128), 1e-10)
    assert not bool(fake_quantise(values, ACTIVATIONS, floor=1e-4).any())
    assert torch.allclose(fake_quantise(values, ACTIVATIONS), values, rtol=0.0625, atol=0)
    spread = torch.linspace(1, 2, 128)[None]
    draws = [fake_quantise(spread, MXFP4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_nan_is_not_hidden():
    values = torch.ones(3, 64)
    values[1, 5] = float("nan")
    assert fake_quantise(values, CACHE).isnan().all(dim=1).tolist() == [False, True, False]
