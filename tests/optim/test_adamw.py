"""AdamW against torch's and against its plain form."""

from __future__ import annotations

import torch
from torch import nn

from tests.optim import plain
from undertow.optim.groups import Entry, Groups
from undertow.optim.optimizer import MuonAdamW


def test_equals_torch():
    start, *gradients = plain.draws(41, 17, 9)
    parameter = nn.Parameter(start.clone())
    theirs = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.1, foreach=False, fused=False
    )
    for gradient in gradients:
        parameter.grad = gradient
        theirs.step()
    found = plain.run(*plain.single("adamw", start), gradients)
    assert torch.allclose(found, parameter, rtol=1e-7, atol=1e-7)


def test_equals_the_plain_form():
    start, *gradients = plain.draws(21, 17, 9, dtype=torch.float64)
    found = plain.run(*plain.single("adamw", start), gradients)
    assert torch.allclose(found, plain.adamw(start, gradients, 1e-2), rtol=0, atol=1e-13)


def test_vectors_and_scalars_are_updated():
    for shape in ((5,), (1,)):
        start, *gradients = plain.draws(4, *shape, dtype=torch.float64)
        found = plain.run(*plain.single("adamw", start, (1,)), gradients)
        assert torch.allclose(found, plain.adamw(start, gradients, 1e-2), rtol=0, atol=1e-13)


def test_epsilon_keeps_zero_gradients_finite_and_tiny_ones_at_full_size():
    start, *_ = plain.draws(1, 4, 4)
    gradient = torch.zeros(4, 4)
    gradient[0] = 1e-15
    found = plain.run(*plain.single("adamw", start, weight_decay=0.0), [gradient])
    assert torch.equal(found[1:], start[1:])
    assert torch.allclose(found[0], start[0] - 1e-2, rtol=0, atol=1e-6)


def test_a_parameter_that_joins_late_counts_its_own_steps():
    start, *gradients = plain.draws(6, 4, 4, dtype=torch.float64)
    late, other = (nn.Parameter(start.clone()) for _ in range(2))
    optimizer = MuonAdamW(Groups([], [Entry("late", late), Entry("other", other)]), lr=1e-2)
    for number, gradient in enumerate(gradients):
        other.grad = gradient
        late.grad = gradient if number >= 3 else None
        optimizer.step()
    assert torch.allclose(other, plain.adamw(start, gradients, 1e-2), rtol=0, atol=1e-13)
    assert torch.allclose(late, plain.adamw(start, gradients[3:], 1e-2), rtol=0, atol=1e-13)
