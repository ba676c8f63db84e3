"""A small model with every kind of layer, for tests that call it in many ways."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.model import ModelConfig
from undertow.model.build import build_model
from undertow.model.transformer import Transformer
from undertow.ops import Ops

# Where every branch is active: past the window of 8, groups of 4 and 8, and the 3 entries that selection keeps.
LENGTH = 48


def small_config(**changes: object) -> ModelConfig:
    """SWA with hash routing, CSA, HCA and an MTP block."""
    shape = dict(num_hidden_layers=3, compress_ratios=(0, 4, 8, 0), hidden_size=48)
    return ModelConfig.from_preset("v4-debug", **(shape | changes))


@torch.no_grad()
def stirred(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, ops: Ops | None = None
) -> Transformer:
    """A fresh model whose biases, sinks and positional gates are not zero and whose norms are not one."""
    model = build_model(config, seed=seed, dtype=dtype, ops=ops)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith((".ape", ".attn_sink", ".bias", ".base")):
            tensor.copy_(0.1 * noise)
        elif name.endswith(("norm.weight", ".scale")):
            tensor.copy_(1 + 0.1 * noise)
    return model


def tokens(config: ModelConfig, *shape: int, seed: int = 0) -> Tensor:
    """Random token ids."""
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
