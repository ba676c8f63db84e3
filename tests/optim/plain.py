"""The optimizers written down plainly in float64, and what tests build on: settings, draws, single parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from undertow.optim.groups import Entry, Groups
from undertow.optim.optimizer import MuonAdamW


def newton_schulz(matrix: Tensor) -> Tensor:
    """The paper's iteration carried out on the singular values alone, which is all that it changes."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    if matrix.any():
        s = s / s.square().sum().sqrt()
    for _ in range(8):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    for _ in range(2):
        s = 2 * s - 1.5 * s**3 + 0.5 * s**5
    return u @ torch.diag(s) @ v


def muon(weight: Tensor, gradients: list[Tensor], lr: float, decay: float = 0.1, momentum: float = 0.95) -> Tensor:
    """One matrix after a step for each gradient."""
    w, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        m = momentum * m + gradient
        update = newton_schulz(momentum * m + gradient) * 0.18 * max(w.shape) ** 0.5
        w = w * (1 - lr * decay) - lr * update
    return w


def adamw(weight: Tensor, gradients: list[Tensor], lr: float, decay: float = 0.1, epsilon: float = 1e-20) -> Tensor:
    """One parameter after a step for each gradient, beta 0.9 and 0.95."""
    w, m, v = weight.double(), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * gradient.double()
        v = 0.95 * v + 0.05 * gradient.double() ** 2
        w = w - lr * decay * w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + epsilon)
    return w


@dataclass
class Settings:
    """The settings of a run that `build_optimizer` reads, with the paper's values."""

    optimizer: Literal["muon", "adamw"] = "muon"
    state_profile: Literal["fp32", "bf16"] = "fp32"
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-20
    momentum: float = 0.95
    muon_split_heads: bool = False
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    offload_optimizer: bool = False


def draws(count: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Normal tensors of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, *shape, generator=generator).to(dtype))


def single(
    algorithm: str, weight: Tensor, heights: tuple[int, ...] = (), **settings: Any
) -> tuple[nn.Parameter, MuonAdamW]:
    """A parameter that starts at `weight`, and its optimizer."""
    parameter = nn.Parameter(weight.clone())
    entry = Entry("w", parameter, heights or weight.shape[-2:-1])
    groups = Groups([entry], []) if algorithm == "muon" else Groups([], [entry])
    return parameter, MuonAdamW(groups, **{"lr": 1e-2, **settings})


def run(parameter: nn.Parameter, optimizer: MuonAdamW, gradients: list[Tensor]) -> Tensor:
    """The parameter's value after a step for each gradient."""
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameter.detach()
