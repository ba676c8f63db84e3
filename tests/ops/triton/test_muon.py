"""Muon of the kernels against its plain form, and that an optimizer's whole step takes the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.optim import plain
from undertow.ops.triton.optimizer import momentum as module
from undertow.ops.triton.optimizer import symmetric
from undertow.ops.triton.optimizer.momentum import Matrices, refusal
from undertow.optim import adamw, kernels, muon
from undertow.optim.clipping import clip_gradients
from undertow.optim.master import join_master, split_master

PROFILES = {
    "fp32": (torch.float32, torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.int16, torch.bfloat16),
    "float32 weights": (torch.float32, None, torch.float32),
}


@pytest.fixture
def tile(monkeypatch):
    monkeypatch.setattr(module, "tiles", lambda *_: {"CHUNK": 128, "num_warps": 1})


def relative(found, wanted):
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("profile", PROFILES)
def test_directions_and_updates(profile, tile, device, monkeypatch):
    """Two stacks that lie in larger ones, of matrices that no piece divides."""
    real = torch.empty
    monkeypatch.setattr(module.torch, "empty", lambda *shape, **how: real(*shape, **how).fill_(float("nan")))
    moment, beneath, kind = PROFILES[profile]
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(5, 30, 24, generator=generator) for _ in range(3)]
    grad, buffer, master = (exact[0] * 1e-3).to(kind), (exact[1] * 1e-3).to(moment), exact[2] * 0.02
    weight, behind = master, None
    if beneath == torch.int16:
        weight, behind = split_master(master)
    elif beneath == torch.float32:
        weight, behind = master.bfloat16(), master
    held = [None if x is None else x.clone().to(device) for x in (grad, buffer, weight, behind)]
    columns = [None if x is None else [x[:2, 10:20], x[3:, 20:]] for x in held]
    assert refusal(*(None if column is None else column[0] for column in columns)) is None
    matrices = Matrices(*columns)
    x = matrices.directions(0.95, torch.float32, 1e-20)
    moved = buffer.double() * 0.95 + grad.double()
    direction = grad.double() + 0.95 * moved
    places = [(0, 10), (1, 10), (3, 20), (4, 20)]
    wanted = torch.stack([direction[e, t : t + 10] for e, t in places])
    wanted /= wanted.square().sum((1, 2), keepdim=True).sqrt()
    assert relative(x, wanted) <= 1e-6
    matrices.update(x, 0.9, 0.3)
    expected, kept = master.double(), buffer.double()
    for step, (e, t) in zip(x.cpu().double(), places, strict=True):
        expected[e, t : t + 10] = expected[e, t : t + 10] * 0.9 - 0.3 * step
        kept[e, t : t + 10] = moved[e, t : t + 10]
    grads, buffers, weights, rest = held
    assert torch.equal(grads.cpu(), grad)
    assert relative(buffers, kept) <= (1e-6 if moment == torch.float32 else 3e-3)
    found = weights if rest is None else rest if beneath == torch.float32 else join_master(weights, rest)
    assert relative(found, expected) <= 1e-6
    if beneath == torch.float32:
        assert torch.equal(weights, rest.bfloat16())


def test_a_zero_matrix_stays_zero(tile, device):
    zero = torch.zeros(2, 8, 16, device=device)
    matrices = Matrices([zero], [zero.clone()], [torch.ones_like(zero)], None)
    assert torch.equal(matrices.directions(0.95, torch.bfloat16, 1e-20), zero.bfloat16())


def test_other_stacks_are_refused():
    x = torch.zeros(3, 8, 16)
    assert refusal(x, x, x, None) is None
    assert refusal(x, x, x.bfloat16(), None) and refusal(x.double(), x, x, None) and refusal(x, x, x[:0], None)
    assert refusal(*(torch.zeros(3, 3, 5) for _ in range(3)), None)
    assert refusal(x.mT, x, x, None) and refusal(x[:, 1:], x.view(3, 8, 16), torch.zeros(385)[1:].view(3, 8, 16), None)


@pytest.fixture
def everywhere(monkeypatch, device):
    """Kernels are taken wherever they serve, and counted."""
    taken = []
    for where in (kernels, adamw, muon):
        monkeypatch.setattr(where, "available", lambda _: True)
    for where, function, name in (
        (adamw, "_by_kernel", "adamw"),
        (muon, "_update_in_place", "muon"),
        (symmetric, "symmetric_product", "product"),
    ):
        real = getattr(where, function)
        monkeypatch.setattr(where, function, lambda *a, real=real, name=name: taken.append(name) or real(*a))
    monkeypatch.setattr(symmetric, "SMALLEST", 16)
    monkeypatch.setattr(symmetric, "FILLS", 0)
    small = {"BM": 16, "BN": 16, "BK": 16, "STAGES": 1, "num_warps": 1}
    monkeypatch.setattr(symmetric, "tiles", lambda *_: small)
    return taken


@pytest.mark.parametrize("profile", ["fp32", "bf16"])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_steps_of_an_optimizer_take_the_kernels(algorithm, profile, everywhere, device):
    start, *gradients = plain.draws(3, 2, 32, 16, dtype=torch.bfloat16)
    parameter, optimizer = plain.single(
        algorithm, start.to(device), (16, 16), profile=profile, muon_dtype=torch.float32
    )
    plain.run(parameter, optimizer, [gradient.to(device) for gradient in gradients])
    assert everywhere == [algorithm] * 2
    state = {key: value.cpu() for key, value in optimizer.state[parameter].items()}
    found = state["master"] if profile == "fp32" else join_master(parameter.detach().cpu(), state["remainder"])
    matrices = [
        getattr(plain, algorithm)(start[e, t : t + 16], [g[e, t : t + 16].double() for g in gradients], 1e-2)
        for e in range(2)
        for t in (0, 16)
    ]
    wanted = torch.stack(matrices).view(2, 32, 16)
    assert float((found - wanted).abs().max()) <= (1e-5 if profile == "fp32" else 2e-4)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_iteration_in_bfloat16_by_symmetric_products(shape, everywhere, device):
    start, gradient = plain.draws(2, *shape)
    parameter, optimizer = plain.single("muon", start.to(device), lr=1.0, weight_decay=0.0, muon_dtype=torch.bfloat16)
    plain.run(parameter, optimizer, [gradient.to(device)])
    assert everywhere.count("product") == 20
    step = start.to(device) - parameter.detach()
    values = torch.linalg.svdvals(step.cpu().double()) / (0.18 * 48**0.5)
    assert float((values - 1).abs().max()) < 0.04


def test_clipping_takes_the_kernel(everywhere, device):
    weights = [nn.Parameter(torch.zeros(size, device=device)) for size in (3, 700)]
    for weight, value in zip(weights, (2.0, 0.5), strict=True):
        weight.grad = torch.full_like(weight, value)
    norm = clip_gradients(weights, 1.0)
    assert float(norm) == pytest.approx((3 * 4 + 700 / 4) ** 0.5)
    assert float(sum(weight.grad.square().sum() for weight in weights)) == pytest.approx(1.0)
    before = [weight.grad.clone() for weight in weights]
    weights[0].grad[0] = float("inf")
    assert not torch.isfinite(clip_gradients(weights, 0.5))
    assert torch.equal(weights[1].grad, before[1])
