"""What training minimises: next-token cross-entropy, and beside it the MTP block's on the token after the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undertow.model.router import Routing
from undertow.model.transformer import Transformer
from undertow.train.batches import FlatBatch


class Losses(NamedTuple):
    """`total = lm + mtp_weight * mtp`, scalars in nats per label; `mtp` is None without an MTP block or weight.

    `routes` are the routing decisions of the trunk's layers.
    """

    total: Tensor
    lm: Tensor
    mtp: Tensor | None
    routes: list[Routing]


def objective(model: Transformer, batch: FlatBatch, mtp_weight: float, counts: tuple[int, int] | None = None) -> Losses:
    """Losses of a batch (model card 7 and 8.1); logits of all tokens never exist at once.

    `counts` are the label counts (next token, MTP) of the whole batch that this one is a part of, by default its own:
    the losses of the parts then sum to that of the whole, however it is divided.
    """
    of_lm, of_mtp = counts or batch.counts
    trunk = model.trunk(batch.ids, batch.segments)
    lm = _summed(model, model.collapse(trunk.streams), batch.labels) / max(of_lm, 1)
    if not (model.mtp and mtp_weight):
        return Losses(lm, lm, None, trunk.routes)
    hidden, _ = model.mtp_hidden(trunk.streams, batch.ids, batch.segments)
    mtp = _summed(model, hidden, batch.mtp_labels) / max(of_mtp, 1)
    return Losses(lm + mtp_weight * mtp, lm, mtp, trunk.routes)


def _summed(model: Transformer, hidden: Tensor, labels: Tensor) -> Tensor:
    return model.ops.linear_cross_entropy(hidden, model.head.weight, labels).sum()


@torch.no_grad()
def summed_loss(model: Transformer, batch: FlatBatch) -> float:
    """Next-token cross-entropy summed over the labels of a batch, in nats."""
    hidden = model.collapse(model.trunk(batch.ids, batch.segments).streams)
    losses = model.ops.linear_cross_entropy(hidden, model.head.weight, batch.labels)
    return float(losses.double().sum())
