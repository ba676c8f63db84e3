"""Held-out loss: pooled over all labels, per token and per byte of text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from undertow.data.packing import Batch
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer
from undertow.train.batches import flat_batch
from undertow.train.objective import summed_loss


@dataclass(frozen=True)
class Evaluation:
    """`nats` of next-token cross-entropy over `labels` tokens that stand for `bytes` of UTF-8 text."""

    nats: float
    labels: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(self.labels, 1)

    @property
    def nats_per_byte(self) -> float:
        """Nats per byte: comparable between tokenizers, and with the byte entropies of the text."""
        return self.nats / max(self.bytes, 1)


def evaluate(
    model: Transformer, batches: Iterable[Batch], tokenizer: Tokenizer, device: torch.device | str
) -> Evaluation:
    """Next-token loss of `model` on `batches`. Sums are pooled over all of them, never means of means."""
    nats, labels, size = 0.0, 0, 0
    for batch in batches:
        flat = flat_batch(batch, device)
        nats += summed_loss(model, flat)
        labels += flat.counts[0]
        size += tokenizer.bytes_of(batch.labels)
    return Evaluation(nats, labels, size)
