"""Pieces of matrices under Muon's kernels against its plain form."""

from __future__ import annotations

import pytest
import torch

from undertow.ops.triton.optimizer import momentum as module
from undertow.optim import pieces
from undertow.optim.master import join_master, split_master
from undertow.optim.muon import MOMENTUM
from undertow.optim.part import Part

KINDS = ["fp32", "bf16", "float32 weights"]
SHAPES = ((3, 16), (10, 24), (3, 16), (5, 40), (1, 8), (7, 9))  # two alike; the last is not served


@pytest.fixture
def everywhere(monkeypatch, device):
    """Kernels are taken wherever they serve, and counted."""
    taken = []
    monkeypatch.setattr(pieces, "available", lambda _: True)
    monkeypatch.setattr(module, "tiles", lambda *_: {"CHUNK": 128, "num_warps": 1})
    for name in ("moved", "update"):
        real = getattr(module.Matrices, name)
        monkeypatch.setattr(
            module.Matrices, name, lambda *a, real=real, name=name, **how: taken.append(name) or real(*a, **how)
        )
    return taken


def some(kind, device):
    """Pieces, and their float64 gradients, momenta and weights."""
    generator = torch.Generator().manual_seed(0)
    made, exact = [], []
    for shape in SHAPES:
        gradient, moment, master = (torch.randn(shape, generator=generator) for _ in range(3))
        state = {MOMENTUM: moment.clone()}
        weight = master.clone()
        if kind == "fp32":
            weight, state["master"] = master.bfloat16(), master.clone()
        elif kind == "bf16":
            weight, state["remainder"] = split_master(master)
            gradient, moment = gradient.bfloat16(), moment.bfloat16()
            state[MOMENTUM] = moment.clone()
        here = {key: value.to(device) for key, value in state.items()}
        made.append(Part(weight.to(device), gradient.to(device), here))
        exact.append((gradient.double(), moment.double(), master.double()))
    return made, exact


def master_of(part):
    if "remainder" in part.state:
        return join_master(part.weight, part.state["remainder"]).cpu()
    return part.state.get("master", part.weight).cpu()


@pytest.mark.parametrize("kind", KINDS)
def test_directions(kind, everywhere, device):
    made, exact = some(kind, device)
    found = pieces.directions(made, 0.95, torch.float32)
    assert everywhere == ["moved"] * 4
    for part, direction, (gradient, moment, master) in zip(made, found, exact, strict=True):
        moved = 0.95 * moment + gradient
        assert direction.dtype == torch.float32 and direction.shape == part.weight.shape
        assert torch.allclose(direction.cpu().double(), gradient + 0.95 * moved, rtol=1e-6, atol=1e-6)
        rounded = 2**-8 if kind == "bf16" else 1e-6
        assert torch.allclose(part.state[MOMENTUM].cpu().double(), moved, rtol=rounded, atol=1e-6)
        assert torch.equal(master_of(part).double(), master)


@pytest.mark.parametrize("kind", KINDS)
def test_updates(kind, everywhere, device):
    made, exact = some(kind, device)
    momenta = [part.state.pop(MOMENTUM).clone() for part in made]
    rates = [0.1, 0.2, 0.1, 0.3, 0.4, 0.5]
    updates = [torch.linspace(-1, 1, part.weight.numel(), device=device).bfloat16() for part in made]
    pieces.apply_all(made, updates, rates, 0.9)
    assert everywhere == ["update"] * 4 and len(momenta) == len(made)
    for part, update, rate, (_, _, master) in zip(made, updates, rates, exact, strict=True):
        wanted = master * 0.9 - rate * update.cpu().double().view(master.shape)
        assert torch.allclose(master_of(part).double(), wanted, rtol=1e-6, atol=1e-6)
        if kind == "fp32":
            assert torch.equal(part.weight.cpu(), master_of(part).bfloat16())
