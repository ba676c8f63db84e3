"""AdamW and the scaling of the kernels against their plain forms, for many tensors at once."""

from __future__ import annotations

import pytest
import torch

from undertow.ops.triton.optimizer import adamw as module
from undertow.ops.triton.optimizer import scaling, tables
from undertow.ops.triton.optimizer.adamw import Weights, adamw
from undertow.optim.adamw import MOMENTS, adamw_step
from undertow.optim.master import join_master, split_master
from undertow.optim.part import Part

RULE = {"lr": 1e-2, "betas": (0.9, 0.95), "epsilon": 1e-20, "weight_decay": 0.1}
SHAPES = [(0,), (1,), (24,), (7, 33), (16, 32), (2, 10, 48), (1300,)]
PROFILES = {"fp32": (torch.float32, "master"), "bf16": (torch.bfloat16, "remainder")}


def parameter(shape, profile, grad, seed=0):
    """A part of random weights and moments after some steps, with a gradient of type `grad`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return torch.randn(shape, generator=generator) * scale

    moment, beside = PROFILES[profile]
    master = normal(0.02)
    weight, remainder = split_master(master)
    state = {"exp_avg": normal(1e-3).to(moment), "exp_avg_sq": normal(1e-3).square().to(moment)}
    state[beside] = master if beside == "master" else remainder
    return Part(master.bfloat16() if beside == "master" else weight, normal(1e-3).to(grad), state)


def copies(part, device):
    return Weights(*(x.clone().to(device) for x in (part.weight, part.grad, *part.state.values())))


def masters(weight, behind):
    return behind if behind.dtype == torch.float32 else join_master(weight, behind)


def relative(found, wanted):
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("profile", PROFILES)
def test_steps_equal_the_plain_ones(profile, grad, device, monkeypatch):
    """Each from the same state, so that a moment that rounds the other way is not carried on."""
    monkeypatch.setattr(module, "tiles", lambda *_: {"CHUNK": 256, "num_warps": 1})
    parts = [parameter(shape, profile, grad, seed) for seed, shape in enumerate(SHAPES)]
    for step in (1, 17):
        given = [copies(part, device) for part in parts]
        adamw(given, step, **RULE)
        adamw_step(parts, step, **RULE)
        for found, part in zip(given, parts, strict=True):
            if not part.weight.numel():
                continue
            wanted = masters(part.weight, part.state[PROFILES[profile][1]])
            master = masters(found.weight.cpu(), found.behind.cpu())
            assert relative(master, wanted) <= 1e-6
            if profile == "bf16":
                stored = found.weight.cpu(), found.behind.cpu()
                assert all(torch.equal(a, b) for a, b in zip(split_master(master), stored, strict=True))
            else:
                assert torch.equal(found.weight.cpu(), master.bfloat16())
            for moved, key in zip((found.exp_avg, found.exp_avg_sq), MOMENTS, strict=True):
                assert relative(moved, part.state[key]) <= (1e-6 if profile == "fp32" else 3e-3)


@pytest.mark.parametrize("profile", PROFILES)
def test_both_kinds_of_state_take_the_same_first_step(profile, device):
    part = parameter((40, 30), profile, torch.bfloat16)
    found = copies(part, device)
    for moment in (found.exp_avg, found.exp_avg_sq):
        moment.zero_()
    adamw([found], 1, **RULE)
    sign = part.grad.float().sign()
    wanted = masters(part.weight, part.state[PROFILES[profile][1]]) * (1 - 1e-3) - 1e-2 * sign
    assert torch.allclose(masters(found.weight, found.behind).cpu(), wanted, rtol=0, atol=1e-7)


def test_tiny_gradients_move_at_full_size_and_zero_ones_not_at_all(device):
    part = parameter((6, 50), "fp32", torch.float32)
    found = copies(part, device)
    found.grad.zero_()
    found.grad[0], found.grad[1] = 1e-15, 1e-19
    for moment in (found.exp_avg, found.exp_avg_sq):
        moment.zero_()
    before = found.behind.clone()
    adamw([found], 1, **{**RULE, "weight_decay": 0.0})
    assert torch.equal(found.behind[2:], before[2:])
    assert torch.allclose(found.behind[:2], before[:2] - 1e-2, rtol=0, atol=2e-3)


def test_what_is_not_finite_stays_so(device):
    part = parameter((4, 16), "bf16", torch.float32)
    found = copies(part, device)
    found.grad[0, 0] = float("nan")
    adamw([found], 1, **RULE)
    assert masters(found.weight, found.behind).isnan().sum() == 1 and found.weight.isnan().sum() == 1


def test_parameters_of_several_kinds_share_a_call(device):
    parts = [parameter((9, 20), *kind) for kind in (("fp32", torch.float32), ("bf16", torch.bfloat16))]
    together, apart = ([copies(part, device) for part in parts] for _ in range(2))
    adamw(together, 3, **RULE)
    for part in apart:
        adamw([part], 3, **RULE)
    for one, other in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_launches_hold_every_piece_once_and_waste_less_than_half():
    items = [(torch.zeros(size),) for size in (1, 256, 257, 0, 5000, 70000, 300, 65536)]
    found = tables.launches(items, 256)
    rows = torch.cat([launch.table for launch in found])
    assert sorted(rows[:, 0].tolist()) == [1, 256, 257, 300, 5000, 65536, 70000]
    for table, (pieces, count) in found:
        needed = [-(-size // 256) for size in table[:, 0].tolist()]
        assert len(needed) == count and max(needed) == pieces and 2 * min(needed) > pieces
    assert tables.launches([(torch.zeros(0),)], 256) == []


def test_other_tensors_are_refused():
    part = copies(parameter((8, 16), "fp32", torch.float32), "cpu")
    assert module.refusal([part]) is None
    for changed in (
        {"weight": part.weight.float()},
        {"grad": part.grad.double()},
        {"exp_avg": part.exp_avg.t()},
        {"behind": torch.zeros(129)[1:].view(8, 16)},
    ):
        assert module.refusal([part._replace(**changed)])
    assert scaling.refusal([torch.zeros(4)]) is None
    assert scaling.refusal([torch.zeros(4, dtype=torch.float64)]) and scaling.refusal([torch.zeros(5)[1:]])


@pytest.mark.parametrize("factor", [1.0, 0.3337])
def test_scaling_in_float32(factor, device, monkeypatch):
    monkeypatch.setattr(scaling, "tiles", lambda *_: {"CHUNK": 64, "num_warps": 1})
    given = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in SHAPES]
    given += [x.bfloat16() for x in given]
    found = [x.clone().to(device) for x in given]
    scaling.scale(found, torch.tensor(factor, device=device))
    for x, wanted in zip(found, given, strict=True):
        assert torch.equal(x.cpu(), (wanted.float() * factor).to(wanted.dtype))
