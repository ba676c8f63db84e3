"""When each operation of a step ran, measured, in the terms of the planner's timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from undertow.parallel.pipeline.buffers import LeanStage
from undertow.parallel.pipeline.stages import Stages

Kind = Literal["F", "B", "W"]
_KINDS: tuple[Kind, ...] = ("F", "B", "W")


class Ran(NamedTuple):
    """One operation: forward `F`, backward `B` or weight gradient `W` of a microbatch on a stage, from `start` to `end`
    in seconds from the start of the step."""

    kind: Kind
    microbatch: int
    stage: int
    start: float
    end: float


class Clock:
    """Measures the operations of this rank: by the host's clock, on a GPU by events of its stream."""

    def __init__(self, device: torch.device):
        self.device, self._cuda = device, device.type == "cuda"
        self._begun: Any = None
        self._marks: list[tuple[Kind, int, int, Any, Any]] = []

    def begin(self, group: dist.ProcessGroup) -> None:
        """Start a step, on all ranks of `group` at the same moment."""
        self._marks.clear()
        if self._cuda:
            torch.cuda.synchronize()  # the last update may be under way yet, on one rank longer than on another
        dist.barrier(group)
        self._begun = self._mark()

    @contextmanager
    def measure(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Measure what is done in the context."""
        start = self._mark()
        yield
        self._marks.append((kind, microbatch, stage, start, self._mark()))

    def ran(self) -> list[Ran]:
        """The operations since `begin`, in their order; waits for the GPU."""
        if self._cuda:
            torch.cuda.synchronize()
        return [Ran(*mark[:3], self._since(mark[3]), self._since(mark[4])) for mark in self._marks]

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, mark: Any) -> float:
        return self._begun.elapsed_time(mark) / 1000 if self._cuda else mark - self._begun


class TimedStage(LeanStage):
    """A stage whose operations `clock` measures, if there is one."""

    clock: Clock | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        if self.clock is None:
            return super().forward_one_chunk(fwd_chunk_id, *args, **named)
        with self.clock.measure("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        if self.clock is None:
            return super().backward_one_chunk(bwd_chunk_id, *args, **named)
        with self.clock.measure("B", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **named)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        if self.clock is None:
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **named)
        with self.clock.measure("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **named)


def gather(clock: Clock, group: dist.ProcessGroup, most: int) -> list[list[Ran]]:
    """The operations of every rank of `group`, `most` at most, told to all of them."""
    own = clock.ran()
    told = torch.full((most, 5), -1.0, dtype=torch.float64)
    told[: len(own)] = torch.tensor([[_KINDS.index(ran.kind), *ran[1:]] for ran in own], dtype=torch.float64)
    everyone = told.to(clock.device).repeat(dist.get_world_size(group), 1, 1)
    dist.all_gather(list(everyone.unbind()), told.to(clock.device), group=group)
    return [[_ran(*row) for row in rows if row[0] >= 0] for rows in everyone.tolist()]


def _ran(kind: float, microbatch: float, stage: float, start: float, end: float) -> Ran:
    return Ran(_KINDS[int(kind)], int(microbatch), int(stage), start, end)


def timeline_document(every: Sequence[Sequence[Ran]], stages: Stages, microbatches: int) -> dict[str, Any]:
    """A measured step as plain values, from `gather`: `seconds` from the first operation's start to the last one's end,
    and for each rank its `operations`, each kind, microbatch, stage, start and end, in seconds."""
    begun = min(ran.start for of_rank in every for ran in of_rank)
    ranks = [[[*ran[:3], ran.start - begun, ran.end - begun] for ran in of_rank] for of_rank in every]
    return {
        "schedule": stages.schedule,
        "layout": str(stages.layout),
        "ranks": stages.ranks,
        "microbatches": microbatches,
        "seconds": max(operation[-1] for of_rank in ranks for operation in of_rank),
        "operations": ranks,
    }
