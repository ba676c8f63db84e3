"""Small models whose every tensor is random, so that a swapped or forgotten one shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from undertow.config.model import ModelConfig
from undertow.model.build import build_model
from undertow.model.transformer import Transformer


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    """A model with random values in every parameter and buffer; hash tables keep their distinct experts."""
    model = build_model(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 + 0.5)
    return model


@pytest.fixture(scope="session")
def debug() -> ModelConfig:
    return ModelConfig.from_preset("v4-debug")


@pytest.fixture
def model(debug: ModelConfig) -> Transformer:
    return random_model(debug)


@pytest.fixture
def make_model() -> Callable[..., Transformer]:
    return random_model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model"
