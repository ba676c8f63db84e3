"""Batches that a geometry can share out. Widths of the axes and what they ask of a model are the configuration's."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.errors import ConfigError
from undertow.config.geometry import Geometry, build_geometry, check_model
from undertow.config.model import ModelConfig

__all__ = ["Batch", "Geometry", "build_geometry", "check_batch", "check_model"]

LARGEST_STEP = 400_000
"""Microbatches of a step on all pipeline ranks that are simulated at most."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a step: `size` in all, `micro_batch` a forward pass and data-parallel rank, `sequence_length` tokens
    each."""

    size: int
    sequence_length: int
    micro_batch: int = 1

    def microbatches(self, geometry: Geometry) -> int:
        """Forward passes a step on each rank."""
        return self.size // (self.micro_batch * geometry.data)

    def tokens(self, geometry: Geometry) -> int:
        """Tokens of one forward pass that attention sees on a rank."""
        return self.micro_batch * self.sequence_length // geometry.context


def check_batch(config: ModelConfig, geometry: Geometry, batch: Batch) -> None:
    """Raises `ConfigError`, naming the constraint, for a batch that the geometry cannot share out."""
    for name in ("size", "sequence_length", "micro_batch"):
        if getattr(batch, name) < 1:
            raise ConfigError(f"batch {name} is {getattr(batch, name)}; allowed: at least 1")
    per_pass = batch.micro_batch * geometry.data
    if batch.size % per_pass:
        raise ConfigError(
            f"batch of {batch.size} sequences is not a multiple of micro-batch {batch.micro_batch} x data-parallel "
            f"width {geometry.data} = {per_pass}"
        )
    passes = batch.microbatches(geometry) * geometry.pipeline
    if passes > LARGEST_STEP:
        raise ConfigError(
            f"batch of {batch.size} sequences is {batch.microbatches(geometry)} microbatches on each of "
            f"{geometry.pipeline} pipeline ranks; allowed: {LARGEST_STEP} in all, take a smaller batch or a larger "
            "micro-batch"
        )
    if batch.sequence_length > config.max_position_embeddings:
        raise ConfigError(
            f"sequence length {batch.sequence_length} exceeds max_position_embeddings {config.max_position_embeddings}"
        )
    if batch.sequence_length % geometry.sequence_ranks:
        raise ConfigError(
            f"sequence length {batch.sequence_length} is not a multiple of tensor {geometry.tensor} x context "
            f"{geometry.context} = {geometry.sequence_ranks}: those ranks share the tokens of a sequence"
        )
    part = batch.sequence_length // geometry.context
    if geometry.context > 1 and part < config.sliding_window:
        raise ConfigError(
            f"context {geometry.context} leaves each rank {part} tokens, fewer than sliding_window "
            f"{config.sliding_window}: a window may reach into one neighbour only"
        )
