"""State profiles of bfloat16 weights: bytes, exactness of the master weights, nearness of the trajectories."""

from __future__ import annotations

import pytest
import torch

from tests.optim import plain
from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.model.build import build_model
from undertow.optim.build import LONGEST_BF16_MEMORY, build_optimizer
from undertow.optim.master import join_master

ALGORITHMS = ("adamw", "muon")


def bytes_per_parameter(parameter, optimizer) -> int:
    held = [parameter, parameter.grad, *(t for t in optimizer.state[parameter].values() if t.dim())]
    assert all(tensor.shape == parameter.shape for tensor in held)
    return sum(tensor.element_size() for tensor in held)


@pytest.mark.parametrize(
    ("algorithm", "profile", "expected"),
    [("adamw", "bf16", 10), ("adamw", "fp32", 16), ("muon", "bf16", 8), ("muon", "fp32", 12)],
)
def test_bytes_per_bfloat16_parameter(algorithm, profile, expected):
    start, gradient = plain.draws(2, 8, 6, dtype=torch.bfloat16)
    parameter, optimizer = plain.single(algorithm, start, profile=profile)
    plain.run(parameter, optimizer, [gradient])
    assert bytes_per_parameter(parameter, optimizer) == expected


@pytest.mark.parametrize("profile", ["fp32", "bf16"])
@pytest.mark.parametrize(("algorithm", "expected"), [("adamw", 16), ("muon", 12)])
def test_float32_parameters_keep_float32_state(algorithm, expected, profile):
    start, gradient = plain.draws(2, 8, 6)
    parameter, optimizer = plain.single(algorithm, start, profile=profile)
    plain.run(parameter, optimizer, [gradient])
    assert bytes_per_parameter(parameter, optimizer) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_first_step_leaves_the_same_master_in_both_profiles(algorithm):
    start, gradient = plain.draws(2, 40, 30, dtype=torch.bfloat16)
    whole, whole_optimizer = plain.single(algorithm, start, profile="fp32")
    parts, parts_optimizer = plain.single(algorithm, start, profile="bf16")
    plain.run(whole, whole_optimizer, [gradient])
    plain.run(parts, parts_optimizer, [gradient])
    master = whole_optimizer.state[whole]["master"]
    assert torch.equal(join_master(parts.detach(), parts_optimizer.state[parts]["remainder"]), master)
    assert torch.equal(whole, master.to(torch.bfloat16))


@pytest.mark.parametrize("profile", ["fp32", "bf16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_too_small_for_bfloat16_add_up(algorithm, profile):
    gradient, *_ = plain.draws(1, 16, 16, dtype=torch.bfloat16)
    start = torch.ones(16, 16, dtype=torch.bfloat16)
    parameter, optimizer = plain.single(algorithm, start, profile=profile, lr=1e-4, weight_decay=1.0)
    assert torch.equal(plain.run(parameter, optimizer, [gradient]), start)
    plain.run(parameter, optimizer, [gradient] * 199)
    expected = getattr(plain, algorithm)(start, [gradient.double()] * 200, 1e-4, decay=1.0)
    assert (expected - 0.98).abs().max() < 0.03
    assert (parameter - expected).abs().max() < 2**-8  # half a step of bfloat16 above one


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bfloat16_state_follows_float32_state(algorithm):
    """400 steps of noisy regression: master weights stay within 3 % of the way gone, and fit as well."""
    inputs, target, start = (
        plain.draws(1, *shape, seed=i)[0] for i, shape in enumerate([(64, 24), (64, 16), (16, 24)])
    )
    masters, losses = [], []
    for profile in ("fp32", "bf16"):
        parameter, optimizer = plain.single(algorithm, start.bfloat16(), profile=profile, lr=1e-2)
        for step in range(400):
            rows = torch.randperm(64, generator=torch.Generator().manual_seed(step))[:16]
            optimizer.zero_grad()
            (inputs[rows] @ parameter.float().T - target[rows]).square().mean().backward()
            optimizer.step()
        state = optimizer.state[parameter]
        masters.append(state["master"] if profile == "fp32" else join_master(parameter.detach(), state["remainder"]))
        losses.append((inputs @ masters[-1].T - target).square().mean().item())
    way = (masters[0] - start.bfloat16().float()).norm()
    assert (masters[1] - masters[0]).norm() < 0.01 * way
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_moments_that_forget_as_little_as_allowed_still_shrink():
    for forgotten in (0.0625, 2**-7):
        values = torch.arange(1, 128).float().mul(2**-7).add(1).bfloat16()
        assert (values.float().mul(1 - forgotten).bfloat16() < values).all()
    assert LONGEST_BF16_MEMORY == 1 - 2**-7


def test_what_bfloat16_state_cannot_serve_is_refused():
    config = ModelConfig.from_preset("v4-debug")
    with pytest.raises(ConfigError, match=r"train\.state_profile bf16: .* set numerics.dtype=bfloat16"):
        build_optimizer(build_model(config), plain.Settings(state_profile="bf16"))
    low = build_model(config, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"train\.beta2 0\.999: .* at most 0\.9921875"):
        build_optimizer(low, plain.Settings(state_profile="bf16", beta2=0.999))
    with pytest.raises(ConfigError, match=r"train\.momentum 0\.999"):
        build_optimizer(low, plain.Settings(state_profile="bf16", momentum=0.999))
    build_optimizer(low, plain.Settings(optimizer="adamw", state_profile="bf16", momentum=0.999))
