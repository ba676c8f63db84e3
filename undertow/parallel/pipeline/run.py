"""Microbatches of a step through the stages of this rank, forward and backward, by the schedule of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from undertow.model.transformer import Transformer
from undertow.parallel.mesh import Mesh
from undertow.parallel.pipeline.schedule import Steps, build_steps
from undertow.parallel.pipeline.stage import Stage, Work
from undertow.parallel.pipeline.stages import Stages
from undertow.parallel.pipeline.timeline import Clock, TimedStage, gather, timeline_document


class Pipeline:
    """The stages of this rank, `own`, of a pipeline over the ranks of `mesh`.

    The `measured`-th call of `run`, counted from 1, is measured: from then on `timeline` has every operation of all
    ranks, as `timeline_document` says.
    """

    def __init__(self, model: Transformer, mesh: Mesh, own: Sequence[Stage], measured: int = 0):
        """`own` are those that `share_out` gave."""
        self.stages, self.own, self.group = cast(Stages, mesh.stages), own, mesh.group("pipeline")
        self.timeline: dict[str, Any] | None = None
        self._measured, self._runs = measured, 0
        self._width = model.config.hc_mult, model.config.hidden_size
        self._device, self._dtype = model.device, model.dtype
        self._rank = mesh.place("pipeline")
        self._built: tuple[int, int, Steps, list[TimedStage]] | None = None

    def run(self, microbatches: int, tokens: int, work: Work) -> None:
        """Gradients of so many microbatches of `tokens` each: `work` is done by every stage for each of them.

        Every rank of the pipeline must call it alike. Raises `ConfigError` for a number that the schedule does not run.
        """
        steps, timed = self._steps(microbatches, tokens)
        self._runs += 1
        clock = Clock(self._device) if self._runs == self._measured else None
        for stage, each in zip(self.own, timed, strict=True):
            stage.work, each.clock = work, clock
        numbers = torch.arange(microbatches)
        if clock is not None:
            clock.begin(self.group)
        steps.step(microbatch=numbers, target=numbers, return_outputs=False)
        if clock is not None:
            every = gather(clock, self.group, len(self.own) * microbatches * 3)
            self.timeline = timeline_document(every, self.stages, microbatches)

    @torch.no_grad()
    def forward(self, tokens: int, work: Work) -> None:
        """One batch of `tokens` through all stages without gradients: each does `work` on what the one before sent.

        Every rank of the pipeline must call it alike.
        """
        sent: Tensor | None = None
        for stage in self.own:
            stage.work = work
            streams = [] if stage.number == 0 else [self._received(stage.number - 1, sent, tokens)]
            made: Tensor = stage(*streams, microbatch=torch.zeros(1, dtype=torch.int64))
            sent, after = made, stage.number + 1
            if after < self.stages.count and self.stages.rank_of(after) != self._rank:
                self._pass(dist.isend, made.contiguous(), self.stages.rank_of(after))
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a backward pass would have done it

    def _received(self, number: int, sent: Tensor | None, tokens: int) -> Tensor:
        """What a stage sent: `sent` is the last that one of this rank did."""
        source = self.stages.rank_of(number)
        if source == self._rank:
            return cast(Tensor, sent)
        streams = torch.empty(tokens, *self._width, dtype=self._dtype, device=self._device)
        self._pass(dist.irecv, streams, source)
        return streams

    def _pass(self, way: object, streams: Tensor, peer: int) -> None:
        # As a batch, like those of a step: alone, NCCL would open a communicator for each pair of ranks.
        operation = dist.P2POp(way, streams, group=self.group, group_peer=peer)  # type: ignore[arg-type]
        for work in dist.batch_isend_irecv([operation]):
            work.wait()

    @property
    def timed(self) -> list[TimedStage]:
        """The stages of this rank as torch's schedule knows them; none before the first step."""
        return [] if self._built is None else self._built[3]

    def _steps(self, microbatches: int, tokens: int) -> tuple[Steps, list[TimedStage]]:
        """Shapes are told, not asked for on the wire: what is built serves until one of them is another."""
        if self._built is None or self._built[:2] != (microbatches, tokens):
            timed = [self._stage(stage, tokens) for stage in self.own]
            steps = build_steps(self.stages.schedule, timed, microbatches, self.group)
            self._built = microbatches, tokens, steps, timed
        return self._built[2:]

    def _stage(self, stage: Stage, tokens: int) -> TimedStage:
        streams = torch.empty(tokens, *self._width, dtype=self._dtype, device="meta", requires_grad=True)
        last = stage.number == self.stages.count - 1
        return TimedStage(
            stage,
            stage.number,
            self.stages.count,
            self._device,
            input_args=() if stage.number == 0 else (streams,),
            output_args=torch.empty((), device="meta", requires_grad=True) if last else (streams,),
            group=self.group,
        )
