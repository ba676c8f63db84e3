"""Rotary tables (model card 2.2): plain for sliding-window layers, YaRN for layers with compressed entries."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.config.model import ModelConfig


class Table(NamedTuple):
    """cos and sin of `position * frequency`, each `[T, R]` float32 whatever the model is cast to."""

    cos: Tensor
    sin: Tensor


def frequencies(config: ModelConfig, compressed: bool, device: torch.device | None = None) -> Tensor:
    """Radians per position of each of the `qk_rope_head_dim / 2` pairs, float32.

    Compressed layers blend `f` and `f / factor` by a ramp that is linear in the dimension index, between the dimensions
    that turn `beta_fast` and `beta_slow` times within the original length. No magnitude correction.
    """
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    plain = 1.0 / (theta**exponent)
    if not compressed:
        return plain
    yarn = config.rope_scaling

    def dimension(rotations: float) -> float:
        return (
            width * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), width - 1)
    steps = torch.arange(width // 2, dtype=torch.float32, device=device)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain * (1.0 - ramp) + plain / yarn.factor * ramp


def table(config: ModelConfig, positions: Tensor, compressed: bool) -> Table:
    """Table for `positions [T]`: angles, cos and sin in float32, as the released code computes them."""
    angles = positions.float()[:, None] * frequencies(config, compressed, positions.device)
    return Table(angles.cos(), angles.sin())
