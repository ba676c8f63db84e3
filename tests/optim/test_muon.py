"""Muon against its plain form, and the independence of matrices that share a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.optim import plain
from undertow.optim.groups import Entry, Groups
from undertow.optim.optimizer import MuonAdamW

LAYOUTS = {
    "lying": ((12, 30), (12,)),
    "standing": ((30, 12), (30,)),
    "groups": ((24, 20), (8, 8, 8)),
    "uneven": ((24, 64), (4, 4, 16)),
    "experts": ((3, 40, 16), (40,)),
    "gate and up of experts": ((3, 24, 16), (12, 12)),
    "experts taller than wide, in parts": ((2, 60, 16), (40, 20)),
}


def matrices(tensor, heights):
    """The independent matrices of a tensor, as copies."""
    experts = tensor if tensor.dim() == 3 else tensor[None]
    return [part.clone() for expert in experts for part in expert.split(heights)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_plain_form(layout, dtype, bound):
    shape, heights = LAYOUTS[layout]
    start, *gradients = plain.draws(7, *shape, dtype=dtype)
    found = plain.run(*plain.single("muon", start, heights), gradients)
    parts = zip(*(matrices(tensor, heights) for tensor in (start, found, *gradients)), strict=True)
    for before, after, *steps in parts:
        assert torch.allclose(after.double(), plain.muon(before, steps, 1e-2), rtol=0, atol=bound)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_has_the_same_size_in_every_matrix(layout):
    shape, heights = LAYOUTS[layout]
    gradient, *_ = plain.draws(1, *shape, dtype=torch.float64)
    found = plain.run(*plain.single("muon", torch.zeros_like(gradient), heights, lr=1.0), [gradient * 1e-6])
    for update in matrices(found, heights):
        assert update.square().mean().sqrt().item() == pytest.approx(0.18, rel=2e-3)


@pytest.mark.parametrize("layout", ["groups", "uneven", "experts", "gate and up of experts"])
def test_matrices_of_one_tensor_are_independent(layout):
    shape, heights = LAYOUTS[layout]
    start, gradient = plain.draws(2, *shape)
    other = gradient.clone()
    first = other if other.dim() == 2 else other[0]
    first[: heights[0]] *= torch.randn(heights[0], 1, generator=torch.Generator().manual_seed(1))
    results = (plain.run(*plain.single("muon", start, heights), [g, g]) for g in (gradient, other))
    one, two = (matrices(result, heights) for result in results)
    assert not torch.allclose(one[0], two[0], atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))


def test_a_tensor_treated_as_one_matrix_couples_its_halves():
    shape, heights = LAYOUTS["groups"]
    start, gradient = plain.draws(2, *shape)
    whole, parts = (plain.run(*plain.single("muon", start, h), [gradient]) for h in ((24,), heights))
    assert not torch.allclose(whole, parts, atol=1e-4)


def test_parameters_together_equal_parameters_alone():
    shapes = [(16, 40), (40, 16), (16, 40), (2, 16, 40), (2, 80, 16), (20, 20)]
    heights = [(16,), (40,), (16,), (16,), (40, 40), (20,)]
    starts, gradients = (
        [plain.draws(1, *shape, seed=seed, dtype=torch.float64)[0] for shape in shapes] for seed in (0, 1)
    )
    together = [nn.Parameter(start.clone()) for start in starts]
    optimizer = MuonAdamW(
        Groups([Entry(str(i), p, h) for i, (p, h) in enumerate(zip(together, heights, strict=True))], []), lr=1e-2
    )
    for _ in range(2):
        for parameter, gradient in zip(together, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for parameter, start, gradient, parts in zip(together, starts, gradients, heights, strict=True):
        alone = plain.run(*plain.single("muon", start, parts), [gradient, gradient])
        assert torch.allclose(parameter, alone, rtol=0, atol=1e-13)


def test_small_workspace_changes_nothing(monkeypatch):
    start, *gradients = plain.draws(4, 5, 24, 16, dtype=torch.float64)
    whole = plain.run(*plain.single("muon", start, (12, 12)), gradients)
    for module in ("muon", "part"):
        monkeypatch.setattr(f"undertow.optim.{module}.workspace", lambda device: 400)  # two matrices
    assert torch.allclose(plain.run(*plain.single("muon", start, (12, 12)), gradients), whole, rtol=0, atol=1e-13)


def test_zero_gradient_only_decays():
    start, *_ = plain.draws(1, 2, 24, 16)
    found = plain.run(*plain.single("muon", start, (12, 12), lr=0.5), [torch.zeros_like(start)])
    assert torch.equal(found, start * (1 - 0.5 * 0.1))


def test_an_expert_without_tokens_moves_by_its_momentum_alone():
    start, gradient = plain.draws(2, 2, 8, 16, dtype=torch.float64)
    second = gradient.clone()
    second[1] = 0
    found = plain.run(*plain.single("muon", start), [gradient, second])
    expected = plain.muon(start[1], [gradient[1], torch.zeros(8, 16)], 1e-2)
    assert torch.allclose(found[1], expected, rtol=0, atol=1e-12)


def test_without_gradient_nothing_happens():
    start, *_ = plain.draws(1, 6, 8)
    parameter, optimizer = plain.single("muon", start)
    optimizer.step()
    assert torch.equal(parameter, start) and not optimizer.state


def test_type_of_the_iteration_can_be_chosen():
    start, gradient = plain.draws(2, 16, 40)
    exact, rough = (
        plain.run(*plain.single("muon", start, lr=1.0, muon_dtype=dtype), [gradient])
        for dtype in (None, torch.bfloat16)
    )
    difference = (exact - rough).norm() / (exact - start).norm()
    assert 1e-4 < difference < 3e-2
