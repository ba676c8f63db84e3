"""Schedules by their names in a recipe, those of `torch.distributed.pipelining`, and what each asks for."""

from __future__ import annotations

from collections.abc import Sequence

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

from undertow.config.parallel import Schedule
from undertow.parallel.pipeline.stages import check_schedule, check_torch

Steps = Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble | ScheduleZBVZeroBubble
"""A schedule of torch: its `step` takes the microbatches of a step forward and backward."""

_LOOPED = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def build_steps(
    schedule: Schedule, stages: Sequence[PipelineStage], microbatches: int, group: dist.ProcessGroup
) -> Steps:
    """The schedule over the stages of this rank, whose last stage returns the loss itself. Raises as `check_schedule`
    and `check_torch`."""
    check_schedule(schedule, dist.get_world_size(group), microbatches)
    check_torch(schedule, torch.__version__)
    if schedule == "1f1b":
        return Schedule1F1B(stages[0], microbatches, loss_fn=_loss, scale_grads=False)
    return _LOOPED[schedule]([*stages], microbatches, loss_fn=_loss, scale_grads=False)


def _loss(total: Tensor, target: object) -> Tensor:
    return total
