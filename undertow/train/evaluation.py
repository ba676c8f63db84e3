"""Held-out loss: pooled over all labels, per token and per byte of text; and how well the indexer chooses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from undertow.data.packing import Batch
from undertow.data.tokenizer import Tokenizer
from undertow.model.context import Indexing
from undertow.model.transformer import Transformer
from undertow.train.batches import flat_batch


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
) -> Evaluation:
    """Next-token loss of `model` on `batches`, and with `indexing.recall` the indexer's.

    Sums are pooled over all of them, never means of means.
    """
    nats, labels, size, found, wanted = 0.0, 0, 0, 0, 0
    for batch in batches:
        flat = flat_batch(batch, device)
        trunk = model.trunk(flat.ids, flat.segments, indexing=indexing)
        hidden = model.collapse(trunk.streams)
        nats += float(model.ops.linear_cross_entropy(hidden, model.head.weight, flat.labels)[0].double().sum())
        labels += flat.counts.lm
        size += tokenizer.bytes_of(batch.labels)
        found += sum(int(hits) for hits, _ in trunk.recall)
        wanted += sum(int(of) for _, of in trunk.recall)
    return Evaluation(nats, labels, size, found, wanted)
