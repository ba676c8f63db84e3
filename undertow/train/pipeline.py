"""The micro-batches of a step over the stages of a pipeline, with the losses that each stage adds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config.errors import ConfigError
from undertow.model.context import Indexing
from undertow.model.modules import Again
from undertow.model.transformer import Transformer
from undertow.parallel.pipeline.edge import enter, leave
from undertow.parallel.pipeline.run import Pipeline
from undertow.parallel.pipeline.stages import check_schedule, splits_backward
from undertow.train.batches import Denominators, FlatBatch
from undertow.train.objective import Losses, Weights, losses_of

_PARTS = ("lm", "mtp", "z", "balance", "indexer")


class PipelinePasses:
    """`Passes` of a rank that has some stages of the model: gradients of its own parameters, losses of all stages.

    The losses of all micro-batches come as one, the same on every rank of the pipeline.
    """

    def __init__(self, model: Transformer, pipeline: Pipeline):
        self._model, self._pipeline = model, pipeline
        self._parts = {stage.number: stage.part for stage in pipeline.own}

    def __call__(
        self,
        parts: Sequence[FlatBatch],
        weights: Weights,
        denominators: Denominators,
        indexing: Indexing,
        recompute: Collection[Again],
    ) -> list[Losses]:
        """Raises `ConfigError` for micro-batches of different sizes, or a number that the schedule does not run, and
        `InputError` for `recompute` of what the model has not."""
        schedule, ranks = self._pipeline.stages.schedule, self._pipeline.stages.ranks
        check_schedule(schedule, ranks, len(parts), recompute)
        self._model.check_recompute(recompute)
        tokens, split = _tokens(parts), splits_backward(schedule)
        indexing = indexing._replace(distil=weights.indexer > 0)
        found = _Found(self._model, weights, parts[0].ids.device)

        def work(number: int, streams: Tensor | None, microbatch: int) -> Tensor:
            model, batch, stage = self._model, parts[microbatch], self._parts[number]
            context = model.context(batch.ids, batch.segments, indexing)
            entered = model.embedded(batch.ids) if streams is None else enter(streams)
            trunk = model.through(stage.layers, entered, context, recompute=recompute)
            losses = losses_of(model, batch, weights, denominators, trunk, stage, split=split)
            found.add(losses, list(stage.layers), stage.mtp)
            return losses.total if stage.head else leave(trunk.streams, losses.total)

        self._pipeline.run(len(parts), tokens, work)
        return [found.of_all_stages(self._pipeline.group)]


def _tokens(parts: Sequence[FlatBatch]) -> int:
    sizes = {len(part.ids) for part in parts}
    if len(sizes) > 1:
        told = " and ".join(map(str, sorted(sizes)))
        raise ConfigError(
            f"micro-batches of {told} tokens in one step: a pipeline takes equal ones; let train.micro_batch_size "
            "divide the sequences of each data-parallel rank"
        )
    return sizes.pop()


class _Found:
    """Losses and counts that the stages of this rank add up in a step."""

    def __init__(self, model: Transformer, weights: Weights, device: torch.device):
        config = model.config
        drafting = config.num_nextn_predict_layers > 0 and weights.mtp > 0
        self._depth, layers = config.num_hidden_layers, config.num_hidden_layers + drafting
        self._values = torch.zeros(1 + len(_PARTS), dtype=torch.float64, device=device)
        self._counts = torch.zeros(layers, config.n_routed_experts, dtype=torch.int64, device=device)
        self._names = _names(model, weights, drafting)

    @torch.no_grad()
    def add(self, losses: Losses, layers: list[int], mtp: bool) -> None:
        """The losses of one micro-batch on one stage that has these layers and, or not, the MTP block."""
        self._values[0] += losses.total.detach()
        for name, part in losses.parts.items():
            self._values[1 + _PARTS.index(name)] += part
        rows = [*layers, self._depth] if mtp and len(losses.counts) > len(layers) else layers
        for row, counts in zip(rows, losses.counts, strict=True):
            self._counts[row] += counts

    def of_all_stages(self, group: dist.ProcessGroup) -> Losses:
        """Those of all ranks of the pipeline, by one exchange."""
        flat = torch.cat([self._values, self._counts.flatten().double()])  # counts stay exact below 2^53
        dist.all_reduce(flat, group=group)
        values, counts = flat[: len(self._values)], flat[len(self._values) :]
        parts = {name: values[1 + _PARTS.index(name)] for name in self._names}
        return Losses(values[0], parts, counts.long().view_as(self._counts))


def _names(model: Transformer, weights: Weights, drafting: bool) -> list[str]:
    """Parts of the loss that one process would tell, in its order."""
    config = model.config
    depth = config.num_hidden_layers
    told = {
        "lm": True,
        "z": weights.z > 0,
        "mtp": drafting,
        "balance": weights.balance > 0 and not all(map(config.is_hash, range(depth + drafting))),
        "indexer": weights.indexer > 0 and any(config.kind(layer) == "csa" for layer in range(depth)),
    }
    return [name for name, there in told.items() if there]
