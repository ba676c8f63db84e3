"""Which of a model's modules a rank holds: all of them, or those of its stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.model import ModelConfig


@dataclass(frozen=True)
class Part:
    """`layers` of the trunk by their number in the model, ascending; the `embedding` that opens it, the `head` that
    closes it (collapse, norm and LM head), and the `mtp` blocks.

    MTP blocks read embedding and LM head: where these are another rank's, the part has a copy of their matrices.
    """

    layers: tuple[int, ...]
    embedding: bool
    head: bool
    mtp: bool

    @staticmethod
    def whole(config: ModelConfig) -> Part:
        """All of a model."""
        return Part(tuple(range(config.num_hidden_layers)), True, True, config.num_nextn_predict_layers > 0)

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters that are another rank's: they are updated here too, but count there."""
        tables = {"embed.weight": self.embedding, "head.weight": self.head}
        return frozenset(name for name, ours in tables.items() if self.mtp and not ours)
