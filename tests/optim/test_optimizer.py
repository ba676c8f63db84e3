"""One optimizer for a whole model: state that survives, states that do not fit, and models that learn."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from tests.optim import plain
from undertow.checkpoint.training import Progress, load_checkpoint, save_checkpoint
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.model.build import build_model
from undertow.model.transformer import Transformer
from undertow.ops.segments import Segments
from undertow.optim.build import build_optimizer
from undertow.optim.optimizer import MuonAdamW

CONFIG = ModelConfig.from_preset("v4-debug")
KINDS = list(itertools.product(("muon", "adamw"), ("fp32", "bf16")))


def begin(algorithm, profile="fp32", seed=0, **changes) -> tuple[Transformer, MuonAdamW]:
    """A debug model, bfloat16 under either profile so that each has something beside the weights."""
    model = build_model(CONFIG, seed, dtype=torch.bfloat16)
    return model, build_optimizer(model, plain.Settings(algorithm, profile, **changes))


def advance(model, optimizer, steps) -> None:
    """Steps on gradients that depend on parameter and number alone; the indexer never has one."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for name, parameter in model.named_parameters():
            if ".indexer." not in name:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def assert_same(one, two) -> None:
    """Weights and state of two models with their optimizers, bit for bit."""
    (model, optimizer), (other, others) = one, two
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        mine, theirs = optimizer.state.get(p, {}), others.state.get(q, {})
        assert mine.keys() == theirs.keys(), name
        for key, value in mine.items():
            assert value.dtype == theirs[key].dtype and torch.equal(value, theirs[key]), (name, key)


@pytest.mark.parametrize(("algorithm", "profile"), KINDS)
def test_state_dict_goes_on_as_if_uninterrupted(algorithm, profile):
    whole = begin(algorithm, profile)
    advance(*whole, range(4))
    first = begin(algorithm, profile)
    advance(*first, range(2))
    second = begin(algorithm, profile, seed=1, learning_rate=1.0)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    assert_same(first, second)
    assert {group["lr"] for group in second[1].param_groups} == {1e-2}
    advance(*second, range(2, 4))
    assert_same(whole, second)


@pytest.mark.parametrize(("algorithm", "profile"), KINDS)
def test_checkpoint_goes_on_as_if_uninterrupted(algorithm, profile, tmp_path):
    whole, first = begin(algorithm, profile), begin(algorithm, profile)
    advance(*whole, range(3))
    advance(*first, range(2))
    path = save_checkpoint(tmp_path, *first, Progress(2, 0, {}))
    second = begin(algorithm, profile, seed=1)
    load_checkpoint(path, *second)
    assert_same(first, second)
    advance(*second, [2])
    assert_same(whole, second)
    names = {name for name, p in second[0].named_parameters() if p not in second[1].state}
    assert names == {name for name, _ in second[0].named_parameters() if ".indexer." in name}


def test_a_loaded_state_is_a_copy():
    first, second = begin("muon"), begin("muon")
    advance(*first, range(1))
    saved = first[1].state_dict()
    second[1].load_state_dict(saved)
    before = copy.deepcopy(saved)
    advance(*second, range(1))
    for number, state in saved["state"].items():
        assert all(torch.equal(value, before["state"][number][key]) for key, value in state.items())


@pytest.mark.parametrize(
    ("saved", "now"), [(("muon", "fp32"), ("muon", "bf16")), (("adamw", "bf16"), ("muon", "bf16"))]
)
def test_state_of_another_optimizer_is_refused(saved, now, tmp_path):
    first, second = begin(*saved), begin(*now)
    advance(*first, range(1))
    load_checkpoint(save_checkpoint(tmp_path, *first, Progress(1, 0, {})), *second)
    with pytest.raises(InputError, match=r"optimizer state of layers\.0\..*go on with train\.optimizer"):
        advance(*second, range(1))


def test_float32_state_of_torchs_adamw_is_taken_over():
    model = build_model(CONFIG)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.1)
    advance(model, theirs, range(2))
    other = build_model(CONFIG)
    other.load_state_dict(model.state_dict())
    ours = build_optimizer(other, plain.Settings("adamw"))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        ours.state[q].update({key: value.clone() for key, value in theirs.state.get(p, {}).items()})
    advance(model, theirs, [2])
    advance(other, ours, [2])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


def test_groups_share_one_rate_and_cover_the_model():
    model, optimizer = begin("muon")
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


def test_closure_gives_its_loss():
    parameter, optimizer = plain.single("adamw", torch.ones(2, 2))

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert (parameter < 1).all()


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_quadratic_converges(algorithm):
    target, start = plain.draws(2, 12, 20)
    parameter, optimizer = plain.single(algorithm, start, weight_decay=0.0)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 300)
        plain.run(parameter, optimizer, [parameter.detach() - target])
    assert (parameter - target).norm() < 1e-2 * (start - target).norm()


@pytest.mark.parametrize(
    ("algorithm", "profile", "dtype"), [("muon", "fp32", torch.float32), ("adamw", "bf16", torch.bfloat16)]
)
def test_twenty_steps_lower_the_loss_of_a_model(algorithm, profile, dtype):
    model = build_model(CONFIG, dtype=dtype)
    optimizer = build_optimizer(model, plain.Settings(algorithm, profile, learning_rate=3e-3))
    ids = torch.randint(0, CONFIG.vocab_size, (32,), generator=torch.Generator().manual_seed(0))
    segments, losses = Segments.from_lengths([32]), []
    for _ in range(20):
        optimizer.zero_grad()
        logits = model.logits(model.collapse(model.trunk(ids, segments).streams))
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 256
    assert losses[-1] < 0.4 * losses[0]
