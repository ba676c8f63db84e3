"""A training run as the planner sees it: a model, a geometry, a batch, a schedule and an implementation, no layout yet.

A layout and the layers that are recomputed are chosen afterwards, by hand, evenly or by search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError
from undertow.config.gpus import GPUS
from undertow.config.model import ModelConfig
from undertow.planner.activations import Microbatch, SavedTable
from undertow.planner.calibration import calibration_for
from undertow.planner.costs import MicrobatchShape, ModelTimes, model_times
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.inflight import held_by_schedule
from undertow.planner.layout import Layout, check_layout, layout_of
from undertow.planner.memory import Memory, MemoryModel
from undertow.planner.parameters import Stage
from undertow.planner.pipeline import pipeline_timeline
from undertow.planner.rates import MI355X_V4_FLASH, Rates
from undertow.planner.schedules import ScheduleName, build_schedule, placement_of
from undertow.planner.state import StateProfile
from undertow.planner.timeline import StageBytes, Timeline


@dataclass(frozen=True)
class Task:
    """Everything about a run but its layout and what is recomputed. `microbatch` has model, geometry, batch and
    implementation; `chunks` are the stages of each pipeline rank."""

    name: str
    pool: Pool
    microbatch: Microbatch
    profile: StateProfile
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    frozen_indexer: bool = False

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.microbatch.config

    @property
    def geometry(self) -> Geometry:
        """How the GPUs are shared out."""
        return self.microbatch.geometry

    @property
    def batch(self) -> Batch:
        """Sequences of a step."""
        return self.microbatch.batch

    @property
    def microbatches(self) -> int:
        """Forward passes a step on each rank."""
        return self.batch.microbatches(self.geometry)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch.size * self.batch.sequence_length

    @property
    def limit_bytes(self) -> int:
        """Memory of a GPU."""
        return self.pool.gpu.memory

    @cached_property
    def memory_model(self) -> MemoryModel:
        """Memory of any division into stages, with the constant that was measured for the implementation, if any."""
        return MemoryModel(self.microbatch, self.profile, calibration_for(self.microbatch.implementation))

    @property
    def saved(self) -> SavedTable:
        """Bytes that each place keeps for one microbatch."""
        return self.memory_model.saved

    @cached_property
    def rates(self) -> Rates:
        """Those fitted on the MI355X, or their guess in proportion to the peak of another GPU."""
        gpu, fitted = self.pool.gpu, MI355X_V4_FLASH
        home = next(known for known in GPUS if known.name == fitted.gpu)
        return fitted if gpu == home else fitted.scaled(gpu.name, gpu.bf16 / home.bf16)

    @cached_property
    def times(self) -> ModelTimes:
        """Seconds of every layer for one microbatch.

        The indexer counts as in the fit of the rates, with the shared query path and learning, whichever it is: the
        rates absorb the difference to the runs that were measured.
        """
        counted = self.config.model_copy(update={"indexer": "shared"})
        batch, geometry = self.batch, self.geometry
        shape = MicrobatchShape(counted, batch.sequence_length, batch.micro_batch, geometry.sequence_ranks)
        return model_times(shape, self.rates)

    def memory(self, layout: Layout, recompute: frozenset[int] = frozenset()) -> Memory:
        """Memory of every rank under a layout."""
        chunks = check_layout(layout, self.config, self.geometry.pipeline, placement_of(self.schedule))
        order = build_schedule(self.schedule, self.geometry.pipeline, self.microbatches, chunks)
        held = held_by_schedule(order, layout, self.saved, recompute)
        return self.memory_model.plan(held, self.limit_bytes, recompute=recompute)

    def timeline(self, layout: Layout, recompute: frozenset[int] = frozenset()) -> Timeline:
        """One iteration under a layout, with what microbatches hold meanwhile."""
        stages = [self.saved.stage(Stage.of(layout, stage), recompute) for stage in range(len(layout.stages))]
        return pipeline_timeline(
            layout,
            self.times,
            ranks=self.geometry.pipeline,
            microbatches=self.microbatches,
            schedule=self.schedule,
            recompute=recompute,
            held=[StageBytes(stage.total, 0, stage.transient) for stage in stages],
        )

    def even_layout(self) -> Layout:
        """Layers as equal as possible, the first stages with one fewer, MTP block and head last."""
        stages, layers = self.geometry.pipeline * self.chunks, self.config.num_hidden_layers
        if stages > layers:
            raise ConfigError(
                f"{stages} stages ({self.geometry.pipeline} pipeline ranks, {self.chunks} each) exceed the {layers} "
                "layers of the model: every stage needs a layer"
            )
        each, left = divmod(layers, stages)
        counts = [each + (stage >= stages - left) for stage in range(stages)]
        return layout_of(counts, self.config.num_nextn_predict_layers)


def read_layers(text: str, layout: Layout) -> frozenset[int]:
    """Layers to recompute: `none`, `all`, numbers and ranges as `0,4,10-12`, or `first:N`, the first N of each stage.

    Raises `ConfigError` for another form and for layers that the layout does not have.
    """
    layers = range(sum(layout.counts("t")))
    told = f"recompute '{text}'"
    if text in ("none", "all"):
        return frozenset(layers if text == "all" else ())
    if text.startswith("first:"):
        count = _number(text.removeprefix("first:"), told)
        return frozenset(n for stage in range(len(layout.stages)) for n in layout.layers(stage)[:count])
    found = frozenset(_ranges(text, told))
    if wrong := sorted(found - set(layers)):
        raise ConfigError(f"{told}: layer {wrong[0]} is none of this model's, 0 to {layers[-1]}")
    return found


def _ranges(text: str, told: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = _number(first, told)
        high = _number(last, told) if dash else low
        if high < low:
            raise ConfigError(f"{told}: the range {part.strip()} runs backwards")
        yield from range(low, high + 1)


def _number(text: str, told: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ConfigError(f"{told}: '{text}' is no layer number; write none, all, 0,4,10-12, or first:3 of each stage")
    return int(text)
