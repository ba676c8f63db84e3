"""Schedules by their names in a recipe, those of `torch.distributed.pipelining`, and what each asks for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from undertow.config.errors import ConfigError
from undertow.config.parallel import Schedule

Steps = Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble | ScheduleZBVZeroBubble
"""A schedule of torch: its `step` takes the microbatches of a step forward and backward."""

_LOOPED = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def splits_backward(schedule: Schedule) -> bool:
    """Whether a schedule makes gradients of inputs first, and those of weights later."""
    return schedule in ("zb-h1", "zbv")


def check_schedule(schedule: Schedule, ranks: int, microbatches: int, recompute: Collection[object] = ()) -> None:
    """Raises `ConfigError` where a schedule does not run so many microbatches of a step, or recomputes nothing."""
    told = f"parallel.schedule {schedule}: {microbatches} micro-batches of a step on each data-parallel rank"
    mend = "change train.batch_size or train.micro_batch_size"
    if schedule == "1f1b" and microbatches < ranks:
        raise ConfigError(f"{told} are fewer than the {ranks} pipeline ranks; allowed: at least {ranks}; {mend}")
    if schedule == "interleaved" and microbatches % ranks:
        raise ConfigError(f"{told}; allowed: a multiple of the {ranks} pipeline ranks; {mend}")
    if schedule == "zb-h1" and microbatches % max(1, microbatches // ranks):
        raise ConfigError(f"{told}; allowed: at most, or a multiple of, the {ranks} pipeline ranks; {mend}")
    if splits_backward(schedule) and recompute:
        raise ConfigError(
            f"parallel.schedule {schedule} splits the backward pass, so nothing can be recomputed; recompute none, or "
            "use 1f1b or interleaved"
        )


def check_backend(schedule: Schedule, backend: str, version: str = torch.__version__) -> None:
    """Raises `ConfigError` where a backend does not carry a schedule: gloo sends nothing to itself before torch 2.13,
    and a folded schedule has neighbouring stages on one rank."""
    if schedule == "zbv" and backend == "gloo" and tuple(map(int, version.split(".")[:2])) < (2, 13):
        raise ConfigError(
            f"parallel.schedule zbv over gloo with torch {version}: the last rank would send to itself, which gloo "
            "does from torch 2.13 on; use zb-h1, or GPUs"
        )


def build_steps(
    schedule: Schedule, stages: Sequence[PipelineStage], microbatches: int, group: dist.ProcessGroup
) -> Steps:
    """The schedule over the stages of this rank, whose last stage returns the loss itself. Raises as `check_schedule`
    and `check_backend`."""
    check_schedule(schedule, dist.get_world_size(group), microbatches)
    check_backend(schedule, dist.get_backend(group))
    if schedule == "1f1b":
        return Schedule1F1B(stages[0], microbatches, loss_fn=_loss, scale_grads=False)
    return _LOOPED[schedule]([*stages], microbatches, loss_fn=_loss, scale_grads=False)


def _loss(total: Tensor, target: object) -> Tensor:
    return total
