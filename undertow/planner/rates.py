"""Rates that turn operations into seconds, each with its origin: measured, fitted, or scaled from another GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from undertow.config.model import LayerKind, ModelConfig

Mark = Literal["measured", "fitted", "scaled"]


@dataclass(frozen=True)
class Figure:
    """One number, how it was come by, and from what."""

    value: float
    mark: Mark
    source: str

    def times(self, factor: float, why: str) -> Figure:
        """The number scaled, marked so."""
        return Figure(self.value * factor, "scaled", f"{why}; {self.source}")


@dataclass(frozen=True)
class Core:
    """Attention core of one kind of layer: milliseconds forward and backward on one row of the measured shape."""

    forward: Figure
    backward: Figure


@dataclass(frozen=True)
class Row:
    """One measured run: layout, how many layers at the start of each stage were recomputed, seconds an iteration."""

    layout: str
    recomputed: int
    ranks: int
    microbatches: int
    seconds: float


@dataclass(frozen=True)
class Rates:
    """What turns operations into seconds, for one GPU and one shape.

    `matrix_tflops` is the algorithmic rate of all but the attention core and the logits, `head_tflops` that of the
    logits, both per GPU. `core` was measured for `preset` at `sequence_length` tokens, one row. `rows` are the runs
    that the rates were fitted to.
    """

    name: str
    gpu: str
    preset: str
    sequence_length: int
    rows: tuple[Row, ...]
    matrix_tflops: Figure
    head_tflops: Figure
    core: dict[LayerKind, Core]

    def covers(self, config: ModelConfig, sequence_length: int) -> bool:
        """Whether this is the shape and the GPU of the fit, whichever query path the indexer has."""
        fitted = ModelConfig.from_preset(self.preset, indexer=config.indexer)
        return self.matrix_tflops.mark == "fitted" and (config, sequence_length) == (fitted, self.sequence_length)

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
                kind: Core(core.forward.times(1 / factor, why), core.backward.times(1 / factor, why))
                for kind, core in self.core.items()
            },
        )


_FIT = "fit_rates over four published pretraining runs of v4-flash in BF16 on 32 MI355X"
_BENCHMARK = "published benchmark of the attention kernels on an MI355X"


def _core(forward: float, backward: float) -> Core:
    return Core(Figure(forward, "measured", _BENCHMARK), Figure(backward, "measured", _BENCHMARK))


MI355X_V4_FLASH = Rates(
    name="mi355x-v4-flash",
    gpu="MI355X",
    preset="v4-flash",
    sequence_length=4096,
    rows=(
        Row("Et*10|t*11|t*11|t*11mL", 3, 4, 32, 10.0964),
        Row("Et*10|t*12|t*12|t*9mL", 3, 4, 32, 9.2543),
        Row("Et*10|t*11|t*11|t*11mL", 0, 4, 32, 9.3848),
        Row("Et*10|t*12|t*12|t*9mL", 0, 4, 32, 8.5469),
    ),
    matrix_tflops=Figure(396.87, "fitted", _FIT),
    head_tflops=Figure(1044.24, "fitted", _FIT),
    core={"swa": _core(0.20, 0.67), "csa": _core(0.53, 2.55), "hca": _core(0.22, 0.78)},
)
"""Fused kernels, compiled attention, and dispatch fused with the experts, one row of 4,096 tokens a microbatch.

The seconds are 377.10 PFLOP of the reported convention over the published 1,167.2, 1,273.4, 1,255.7 and 1,378.8
TFLOP/s of 32 GPUs. The fit takes the operations of the shared-query indexer, learning; the runs had the variant with
a query path of its own, frozen. The rates absorb the difference.
"""
