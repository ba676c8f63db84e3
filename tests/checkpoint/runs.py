"""A model with its optimizer after some steps, and what a checkpoint of it must bring back."""

from __future__ import annotations

import torch

from tests.model.small import small_config
from undertow.checkpoint.training import Progress, load_checkpoint
from undertow.model.build import build_model

CONFIG = small_config()
CURSOR = {"epoch": 1, "document": 2, "offset": 3, "fingerprint": "abc"}


def learned(seed: int = 0, steps: int = 1):
    """A model and its optimizer after some steps; one parameter never had a gradient."""
    model = build_model(CONFIG, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        learn(model, optimizer)
    return model, optimizer


def learn(model, optimizer) -> None:
    """One step."""
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == "norm.weight" else torch.full_like(parameter, 0.5)
    optimizer.step()


def state_of(model, optimizer) -> dict[str, torch.Tensor]:
    """Copies of the weights and the optimizer's state, by name."""
    state = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state |= {f"{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: tensor.clone() for name, tensor in state.items()}


def loaded(path) -> tuple[Progress, dict[str, torch.Tensor]]:
    """The progress and the state that a checkpoint holds."""
    model, optimizer = learned(seed=9, steps=0)
    progress = load_checkpoint(path, model, optimizer)
    return progress, state_of(model, optimizer)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
