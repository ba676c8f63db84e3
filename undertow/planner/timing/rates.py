"""Rates that turn operations into seconds, each with its origin: measured, fitted, or scaled from another GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from undertow.config.model import LayerKind, ModelConfig

if TYPE_CHECKING:
    from undertow.planner.timing.operators import OperatorRates

Mark = Literal["measured", "fitted", "scaled", "ceiling"]
"""`ceiling`: measured of a large copy or product, more than the operator reaches."""

_TIMELESS = {
    "indexer", "initializer_range", "rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor", "rope_theta",
    "compress_rope_theta", "rope_scaling", "max_position_embeddings", "bos_token_id", "eos_token_id",
}  # fmt: skip
"""Fields of a model that change no operation; the query path of the indexer is counted as it is."""


@dataclass(frozen=True)
class Figure:
    """One number, how it was come by, and from what."""

    value: float
    mark: Mark
    source: str

    def times(self, factor: float, why: str) -> Figure:
        """The number scaled, marked so."""
        return Figure(self.value * factor, "scaled", f"{why}; {self.source}")

    def in_units_of(self, unit: float) -> Figure:
        """The same number in other units, to two decimals."""
        return replace(self, value=round(self.value / unit, 2))


@dataclass(frozen=True)
class Core:
    """Attention core of one kind of layer: milliseconds forward and backward, for so many `operations` forward."""

    forward: Figure
    backward: Figure
    operations: float


@dataclass(frozen=True)
class Rates:
    """What turns operations into seconds, for one GPU and one shape.

    `matrix_tflops` is the algorithmic rate of all but the attention core and the logits, `head_tflops` that of the
    logits, both per GPU. They were fitted to runs of `config` on rows of `sequence_length` tokens. `core` has the kinds
    of layer that were measured. Where single `operators` were measured and no runs, these two are those of one large
    product and of the loss, and layers are timed by `operators`.
    """

    name: str
    gpu: str
    config: ModelConfig
    sequence_length: int
    matrix_tflops: Figure
    head_tflops: Figure
    core: Mapping[LayerKind, Core]
    operators: OperatorRates | None = None

    def covers(self, config: ModelConfig, sequence_length: int) -> bool:
        """Whether this is the shape and the GPU of the fit, whichever query path the indexer has."""
        given, fitted = (each.model_dump(exclude=_TIMELESS) for each in (config, self.config))
        return self.matrix_tflops.mark == "fitted" and (given, sequence_length) == (fitted, self.sequence_length)

    def scaled(self, gpu: str, factor: float) -> Rates:
        """A guess for a GPU `factor` times as fast in everything; it covers no shape."""
        why = f"{factor:.3g} times {self.gpu}"
        return replace(
            self,
            name=f"{self.name}-scaled-to-{gpu}",
            gpu=gpu,
            matrix_tflops=self.matrix_tflops.times(factor, why),
            head_tflops=self.head_tflops.times(factor, why),
            core={
                kind: Core(core.forward.times(1 / factor, why), core.backward.times(1 / factor, why), core.operations)
                for kind, core in self.core.items()
            },
            operators=self.operators and self.operators.scaled(factor, why),
        )
