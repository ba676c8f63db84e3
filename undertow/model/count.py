"""How many parameters a model has, and where: counted on its module tree, without memory for the weights."""

from __future__ import annotations

from undertow.config.model import ModelConfig
from undertow.model.parameters import Counts, counts_of
from undertow.model.transformer import Transformer

__all__ = ["Counts", "count"]


def count(model: ModelConfig | Transformer) -> Counts:
    """Count a model, or the one that a configuration describes (built on the meta device: seconds, no memory)."""
    if isinstance(model, ModelConfig):
        model = Transformer(model, device="meta")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return counts_of(model.config, ((name, tensor.numel()) for name, tensor in tensors))
