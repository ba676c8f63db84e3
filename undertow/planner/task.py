"""A training run as the planner sees it: a model, a geometry, a batch, a schedule and an implementation, no layout yet.

A layout and what is recomputed are chosen afterwards, by hand, evenly or by search.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from undertow.config.clusters import Pool
from undertow.config.layout import Layout, check_layout, spread_evenly
from undertow.config.model import ModelConfig
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.calibration.measured import Calibration
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.activations import Microbatch
from undertow.planner.memory.inflight import held_by_1f1b, held_by_schedule, stage_bytes
from undertow.planner.memory.model import Memory, MemoryModel
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.recompute import NONE, Recompute
from undertow.planner.memory.saved import SavedTable
from undertow.planner.memory.state import StateProfile
from undertow.planner.pipeline.run import pipeline_timeline
from undertow.planner.pipeline.schedules import EQUAL, ScheduleName, build_schedule, placement_of, splits_backward
from undertow.planner.pipeline.timeline import Timeline
from undertow.planner.timing.costs import ModelTimes, stage_times
from undertow.planner.timing.rates import Rates
from undertow.planner.timing.times import computed_times, run_times


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
    calibration: Calibration = field(default_factory=shipped_calibration)
    remarks: tuple[str, ...] = ()
    """Sentences about what was chosen unasked."""
    limit: int | None = None
    """Bytes that may be taken of a GPU, None for all that it has."""

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
        """What may be taken of a GPU."""
        return self.pool.gpu.memory if self.limit is None else self.limit

    @cached_property
    def memory_model(self) -> MemoryModel:
        """Memory of any division into stages, with the constant that was measured for the implementation, if any."""
        constant = self.calibration.memory_of(self.microbatch.implementation)
        return MemoryModel(self.microbatch, self.profile, constant)

    @property
    def saved(self) -> SavedTable:
        """Bytes that each place keeps for one microbatch."""
        return self.memory_model.saved

    @cached_property
    def rates(self) -> Rates:
        """Those of the calibration, or their guess in proportion to the peak of another GPU."""
        return self.calibration.rates_of(self.pool.gpu)

    @cached_property
    def times(self) -> ModelTimes:
        """Seconds of every layer for one microbatch, and once an iteration; see `run_times`."""
        return run_times(self.memory_model, self.pool.gpu, self.calibration, frozen_indexer=self.frozen_indexer)

    def sending_seconds(self, layout: Layout, recompute: Recompute = NONE) -> float:
        """Seconds of an iteration, the mean of all ranks, in which nothing is done but sending: weights gathered,
        gradients summed, tokens and sequences exchanged, beyond what the rates contain."""
        computed = computed_times(
            self.memory_model, self.pool.gpu, self.calibration, frozen_indexer=self.frozen_indexer
        )
        whole, bare = (
            sum(self.microbatches * float(time.forward + time.backward) + float(time.step) for time in stages)
            for stages in (stage_times(times, layout, recompute) for times in (self.times, computed))
        )
        return max(0.0, whole - bare) / self.geometry.pipeline

    def memory(self, layout: Layout, recompute: Recompute = NONE) -> Memory:
        """Memory of every rank under a layout."""
        chunks = check_layout(layout, self.config, self.geometry.pipeline, placement_of(self.schedule))
        if self.schedule == "1f1b":
            held = held_by_1f1b(layout, self.microbatches)
        else:
            pace = self.times.pace if self.schedule == "zbv" else EQUAL
            order = build_schedule(self.schedule, self.geometry.pipeline, self.microbatches, chunks, pace)
            held = held_by_schedule(order, layout, self.saved, recompute)
        return self.memory_model.plan(held, self.limit_bytes, recompute=recompute)

    def timeline(self, layout: Layout, recompute: Recompute = NONE) -> Timeline:
        """One iteration under a layout, with what microbatches hold meanwhile."""
        split, count = splits_backward(self.schedule), len(layout.stages)
        stages = [stage_bytes(self.saved, Stage.of(layout, stage), split, recompute) for stage in range(count)]
        return pipeline_timeline(
            layout,
            self.times,
            ranks=self.geometry.pipeline,
            microbatches=self.microbatches,
            schedule=self.schedule,
            recompute=recompute,
            held=stages,
            transfer=self.times.transfer,
        )

    def even_layout(self) -> Layout:
        """Layers as equal as possible, the first stages with one fewer, MTP block and head last."""
        return spread_evenly(self.config, self.geometry.pipeline, self.chunks)
