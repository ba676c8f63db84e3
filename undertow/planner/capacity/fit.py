"""A run that fits, with its memory and seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from undertow.config.layout import Layout
from undertow.planner.memory.model import Memory
from undertow.planner.memory.recompute import Recompute
from undertow.planner.pipeline.run import approximate_seconds
from undertow.planner.task import Task
from undertow.planner.timing.costs import stage_times
from undertow.planner.tuner.tuning import Bounds


@dataclass(frozen=True)
class Fit:
    """A run that fits: its task, layout, memory and seconds an iteration."""

    task: Task
    layout: Layout
    memory: Memory
    seconds: float

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of training, all tokens of the batch."""
        return self.task.tokens / (self.seconds * self.task.geometry.gpus)


def about_seconds(task: Task, layout: Layout, recompute: Recompute) -> float:
    """Seconds of an iteration in closed form, to compare ways to run."""
    stages = stage_times(task.times, layout, recompute)
    return float(approximate_seconds(stages, task.microbatches)) + max(float(stage.step) for stage in stages)


def fit_of(task: Task, layout: Layout, recompute: Recompute) -> Fit:
    """Memory and seconds of a run. Where there are many microbatches fewer are simulated, and the rest take as long as
    those in the middle of them: from there on a schedule repeats itself. ZBV fills its gaps differently with each
    number of microbatches, so it is simulated in full."""
    few, many = task.geometry.pipeline, 2 * task.geometry.pipeline
    if task.microbatches <= many or task.schedule == "zbv":
        return Fit(task, layout, task.memory(layout, recompute), float(task.timeline(layout, recompute).seconds))
    each = {}
    for microbatches in (few, many):
        size = microbatches * task.batch.micro_batch * task.geometry.data
        shorter = replace(task, microbatch=replace(task.microbatch, batch=replace(task.batch, size=size)))
        each[microbatches] = float(shorter.timeline(layout, recompute).seconds)
    more = (task.microbatches - many) * (each[many] - each[few]) / (many - few)
    return Fit(task, layout, task.memory(layout, recompute), each[many] + more)


def within(bounds: Bounds) -> str:
    """What may be taken of a GPU, in words."""
    memory = "its memory" if bounds.memory_limit is None else f"{bounds.memory_limit:,.4g} GB"
    return f"of a GPU {1 - bounds.margin:.3g} of {memory} may be taken"


def unguarded(bounds: Bounds) -> tuple[str, ...]:
    """A sentence where no memory is left free for what a plan leaves out."""
    return () if bounds.margin else ("memory: no margin is kept for what is left out",)
