"""The optimizer on a GPU: the CPU's results, state where it belongs, and the iteration in bfloat16."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.optim import plain
from undertow.config.model import ModelConfig
from undertow.model.build import build_model
from undertow.optim.build import build_optimizer
from undertow.optim.orthogonal import orthogonalise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(64, 64), (48, 128), (512, 2048), (2048, 512)])
def test_singular_values_in_bfloat16(shape):
    """Singular values from 1 down to 1/30, as momentum may have: all come to one, within bfloat16's rounding."""
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(3, *shape, generator=generator), full_matrices=False)
    given = (u * torch.logspace(0, -1.5, min(shape))) @ v
    values = torch.linalg.svdvals(orthogonalise(given.cuda(), torch.bfloat16).double())
    assert (values - 1).abs().max() < 0.05


@pytest.mark.parametrize("shape", [(32, 512, 784), (40, 800, 480)])
def test_stacks_that_symmetric_products_serve(shape):
    """As many matrices as keep a GPU busy, of sizes that no tile divides."""
    pytest.importorskip("triton")
    from undertow.ops.triton.optimizer.symmetric import refusal

    given = torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()
    lying = given if shape[1] <= shape[2] else given.mT
    assert refusal(lying.bfloat16()) is None
    values = torch.linalg.svdvals(orthogonalise(given, torch.bfloat16).float())
    assert (values - 1).abs().max() < 0.05


@pytest.mark.parametrize(("algorithm", "profile"), list(itertools.product(("muon", "adamw"), ("fp32", "bf16"))))
def test_steps_equal_the_cpus(algorithm, profile):
    results = []
    for device in ("cpu", "cuda"):
        model = build_model(ModelConfig.from_preset("v4-debug"), dtype=torch.bfloat16, device=device)
        optimizer = build_optimizer(model, plain.Settings(algorithm, profile, muon_dtype="float32"))
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
            optimizer.step()
        for parameter in model.parameters():
            for key, value in optimizer.state[parameter].items():
                assert value.device.type == ("cpu" if key == "step" else device)
        results.append({name: parameter.detach().cpu().float() for name, parameter in model.named_parameters()})
    for name, value in results[0].items():
        # A last bit of bfloat16 may fall the other way.
        assert torch.allclose(results[1][name], value, rtol=2**-7, atol=1e-4), name


@pytest.mark.parametrize(("algorithm", "profile"), list(itertools.product(("muon", "adamw"), ("fp32", "bf16"))))
def test_state_on_the_host_gives_the_same_bits(algorithm, profile):
    found = []
    for offload in (False, True):
        model = build_model(ModelConfig.from_preset("v4-debug"), dtype=torch.bfloat16, device="cuda")
        optimizer = build_optimizer(model, plain.Settings(algorithm, profile, offload_optimizer=offload))
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
            optimizer.step()
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        if offload:
            kept = [value for state in states for key, value in state.items() if key != "step"]
            assert all(value.device.type == "cpu" and value.is_pinned() for value in kept)
        found.append([*model.parameters(), *(value.cpu() for state in states for value in state.values())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
