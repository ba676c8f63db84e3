"""Parameters that each rank holds, exact, dense ones and experts apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from undertow.config.layout import Layout
from undertow.config.model import ModelConfig
from undertow.model.parameters import NO_PARAMETERS, Parameters, sum_weights
from undertow.model.weights import Weight
from undertow.planner.geometry import Geometry


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage (one chunk of a rank) holds: `layers` by their number, MTP blocks following the trunk's,
    with or without `embedding` and `head`."""

    layers: tuple[int, ...]
    embedding: bool = False
    head: bool = False

    @classmethod
    def of(cls, layout: Layout, stage: int) -> Stage:
        """A stage of a layout."""
        letters = layout.stages[stage]
        return cls((*layout.layers(stage), *layout.mtp_blocks(stage)), "E" in letters, "L" in letters)

    def borrows_embedding(self, config: ModelConfig) -> bool:
        """Whether the stage has a second copy of the embedding: an MTP block reads it, and it lives elsewhere."""
        return not self.embedding and any(layer >= config.num_hidden_layers for layer in self.layers)


class RankParameters(NamedTuple):
    """Parameters of one rank: `experts` are repeated on fewer ranks than the `dense` rest."""

    dense: Parameters
    experts: Parameters

    def __add__(self, other: RankParameters) -> RankParameters:  # type: ignore[override]
        """Both together."""
        return RankParameters(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense.total + self.experts.total


NOTHING = RankParameters(NO_PARAMETERS, NO_PARAMETERS)


def local(weight: Weight, geometry: Geometry) -> Weight:
    """A rank's part of a tensor. One axis is cut, which one does not matter to the count: the last that divides."""
    parts = {"whole": 1, "tensor": geometry.tensor, "experts": geometry.expert}[weight.split]
    if weight.split == "experts":
        return weight._replace(shape=(weight.shape[0] // parts, *weight.shape[1:]))
    cut = max((axis for axis, size in enumerate(weight.shape) if size % parts == 0), default=-1)
    if cut < 0 and prod(weight.shape) % parts:
        raise ValueError(f"{weight.name} {list(weight.shape)} does not divide into {parts} equal parts")
    return weight._replace(
        shape=tuple(size // parts if axis == cut else size for axis, size in enumerate(weight.shape))
    )


def rank_parameters(weights: Iterable[Weight], geometry: Geometry) -> RankParameters:
    """What one rank holds of the given tensors."""
    parts = [local(weight, geometry) for weight in weights]
    return RankParameters(
        sum_weights(part for part in parts if part.split != "experts"),
        sum_weights(part for part in parts if part.split == "experts"),
    )


def sum_parameters(parts: Iterable[RankParameters]) -> RankParameters:
    """All parts together."""
    return sum(parts, start=NOTHING)
