"""Held-out loss: pooled over all labels, per token and per byte of text; and how well the indexer chooses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from undertow.data.packing import Batch
from undertow.data.tokenizer import Tokenizer
from undertow.model.context import Indexing
from undertow.model.transformer import Transformer, Trunk
from undertow.parallel.mesh import Mesh
from undertow.parallel.pipeline.run import Pipeline
from undertow.train.batches import FlatBatch, flat_batch, rows_of


@dataclass(frozen=True)
class Evaluation:
    """`nats` of next-token cross-entropy over `labels` tokens that stand for `bytes` of UTF-8 text.

    Of the `wanted` entries that attention weighs most among all a query sees, as many as the indexer may choose, it
    chose `found`; queries that see no more than that do not count.
    """

    nats: float
    labels: int
    bytes: int
    found: int = 0
    wanted: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(self.labels, 1)

    @property
    def nats_per_byte(self) -> float:
        """Nats per byte: comparable between tokenizers, and with the byte entropies of the text."""
        return self.nats / max(self.bytes, 1)

    @property
    def figures(self) -> dict[str, float]:
        """By their names in `metrics.jsonl`."""
        recall = {"eval/indexer_recall": self.found / self.wanted} if self.wanted else {}
        return {"eval/loss": self.loss, "eval/nats_per_byte": self.nats_per_byte, **recall}


@torch.no_grad()
def evaluate(
    model: Transformer,
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    device: torch.device | str,
    indexing: Indexing = Indexing(),  # noqa: B008 - immutable
    mesh: Mesh | None = None,
    pipeline: Pipeline | None = None,
) -> Evaluation:
    """Next-token loss of `model` on `batches`, and with `indexing.recall` the indexer's.

    Sums are pooled over all of them, never means of means. The ranks of `mesh` share the rows of each batch, those of
    `pipeline` the layers, and all get the whole result; every rank must call this with the same batches.
    """
    place, ranks = (0, 1) if mesh is None else mesh.data_place
    nats, labels, size, found, wanted = 0.0, 0, 0, 0, 0
    for batch in batches:
        own = rows_of(batch, place, ranks)
        # A rank without a row takes part in exchanges all the same, with one that does not count.
        counts = len(own.ids) > 0
        flat = flat_batch(own if counts else rows_of(batch, 0, len(batch.ids)), device)
        losses, recall = _passed(model, flat, indexing, pipeline)
        if not counts:
            continue
        if losses is not None:
            nats += float(losses.double().sum())
            labels += flat.counts.lm
            size += tokenizer.bytes_of(own.labels)
        found += sum(int(hits) for hits, _ in recall)
        wanted += sum(int(of) for _, of in recall)
    if isinstance(model, FSDPModule):
        model.reshard()  # a backward pass would have done it
    if mesh is None:
        return Evaluation(nats, labels, size, found, wanted)
    sums = torch.tensor([nats, labels, size, found, wanted], dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=mesh.data)
    if pipeline is not None:
        dist.all_reduce(sums, group=pipeline.group)
    nats, *whole = sums.tolist()
    return Evaluation(nats, *(int(each) for each in whole))


def _passed(
    model: Transformer, batch: FlatBatch, indexing: Indexing, pipeline: Pipeline | None
) -> tuple[Tensor | None, list[Tensor]]:
    """Losses of the next token `[T]`, None where another rank has them, and the recall of the layers on this rank."""
    if pipeline is None:
        trunk = model.trunk(batch.ids, batch.segments, indexing=indexing)
        return _losses(model, trunk, batch), trunk.recall
    losses: list[Tensor] = []
    recall: list[Tensor] = []
    parts = {stage.number: stage.part for stage in pipeline.own}

    def work(number: int, streams: Tensor | None, _: int) -> Tensor:
        context = model.context(batch.ids, batch.segments, indexing)
        entered = model.embedded(batch.ids) if streams is None else streams
        trunk = model.through(parts[number].layers, entered, context)
        recall.extend(trunk.recall)
        if parts[number].head:
            losses.append(_losses(model, trunk, batch))
        return trunk.streams

    pipeline.forward(len(batch.ids), work)
    return losses[0] if losses else None, recall


def _losses(model: Transformer, trunk: Trunk, batch: FlatBatch) -> Tensor:
    hidden = model.collapse(trunk.streams)
    return model.ops.linear_cross_entropy(hidden, model.head.weight, batch.labels)[0]
