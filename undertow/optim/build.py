"""The optimizer of a run: Muon with AdamW, or AdamW alone, on the state profile that the settings name."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from undertow.config.errors import ConfigError
from undertow.model.packed import refuse_packed
from undertow.model.transformer import Transformer
from undertow.optim.groups import everything, split
from undertow.optim.optimizer import MuonAdamW, Profile
from undertow.parallel.mesh import Mesh

# Rounding to bfloat16 can undo a step that forgets less than 2^-8 of a moment; twice that is safe.
LONGEST_BF16_MEMORY = 1 - 2**-7


class OptimizerSettings(Protocol):
    """What `build_optimizer` reads of a run's training settings."""

    optimizer: Literal["muon", "adamw"]
    state_profile: Profile
    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    momentum: float
    muon_split_heads: bool
    muon_dtype: Literal["auto", "float32", "bfloat16"]
    offload_optimizer: bool


def build_optimizer(model: Transformer, settings: OptimizerSettings, mesh: Mesh | None = None) -> MuonAdamW:
    """The optimizer that the settings name, for what this rank holds of a model shared out over `mesh`.

    Router biases and hash tables are buffers and stay outside. Raises `ConfigError` for a state profile that does not
    suit the model, and `InputError` for a model that holds matrices as codes.
    """
    refuse_packed(model, "no optimizer")
    groups = split(model, settings.muon_split_heads) if settings.optimizer == "muon" else everything(model)
    if settings.state_profile == "bf16":
        _refuse_unsuited(model, settings)
    return MuonAdamW(
        groups,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2),
        epsilon=settings.epsilon,
        momentum=settings.momentum,
        profile=settings.state_profile,
        muon_dtype=None if settings.muon_dtype == "auto" else getattr(torch, settings.muon_dtype),
        shard=None if mesh is None else mesh.group("shard"),
        offload=settings.offload_optimizer,
    )


def _refuse_unsuited(model: Transformer, settings: OptimizerSettings) -> None:
    """What bfloat16 state cannot serve."""
    if all(parameter.dtype != torch.bfloat16 for parameter in model.parameters()):
        raise ConfigError(
            "train.state_profile bf16: keeps the state of bfloat16 weights, this model has none; set "
            "numerics.dtype=bfloat16 or train.state_profile=fp32"
        )
    for key in ("beta1", "beta2", *(["momentum"] if settings.optimizer == "muon" else [])):
        if getattr(settings, key) > LONGEST_BF16_MEMORY:
            raise ConfigError(
                f"train.{key} {getattr(settings, key)}: a bfloat16 moment that forgets so little a step never "
                f"shrinks; use at most {LONGEST_BF16_MEMORY} or train.state_profile=fp32"
            )
