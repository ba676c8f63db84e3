"""Clipping by the global norm, and the name of what is not finite."""

import pytest
import torch
from torch import nn

from undertow.optim.clipping import clip_gradients, first_not_finite


@pytest.fixture
def model():
    model = nn.ModuleDict({"first": nn.Linear(2, 1, bias=False), "second": nn.Linear(1, 1, bias=False)})
    for parameter, gradient in zip(model.parameters(), ([[3.0, 0.0]], [[4.0]]), strict=True):
        parameter.grad = torch.tensor(gradient)
    return model


def test_norm_before_clipping_and_gradient_after(model):
    assert float(clip_gradients(model.parameters(), 1.0)) == 5.0
    assert [p.grad.tolist() for p in model.parameters()] == [[[pytest.approx(0.6), 0.0]], [[pytest.approx(0.8)]]]


def test_small_gradients_stay(model):
    assert float(clip_gradients(model.parameters(), 5.0)) == 5.0
    assert model["second"].weight.grad.item() == 4.0


def test_gradients_of_zero_and_of_every_type(model):
    for parameter in model.parameters():
        parameter.grad.zero_()
    assert float(clip_gradients(model.parameters(), 1.0)) == 0.0
    assert all(not parameter.grad.any() for parameter in model.parameters())
    weights = [nn.Parameter(torch.zeros(300, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 3.0)
    assert float(clip_gradients(weights, 1.0)) == pytest.approx(3 * 600**0.5)
    assert [weight.grad.unique().item() for weight in weights] == pytest.approx([600**-0.5] * 2, rel=2**-8)


def test_parameters_without_gradient_do_not_count(model):
    model["first"].weight.grad = None
    assert float(clip_gradients(model.parameters(), 10.0)) == 4.0


def test_a_norm_that_is_not_finite_changes_nothing_and_is_named(model):
    assert first_not_finite(model) is None
    model["second"].weight.grad.fill_(float("nan"))
    assert not torch.isfinite(clip_gradients(model.parameters(), 1.0))
    assert model["first"].weight.grad.tolist() == [[3.0, 0.0]]
    assert first_not_finite(model) == "second.weight (its gradient)"
    with torch.no_grad():
        model["first"].weight[0, 1] = float("inf")
    assert first_not_finite(model) == "first.weight (its value)"
