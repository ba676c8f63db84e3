"""What training minimises (model card 8.1): next token, token after next, balance of experts, the indexer's choice."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.config.training import IndexerConfig, TrainConfig
from undertow.model.context import Indexing
from undertow.model.modules import Again
from undertow.model.transformer import Transformer
from undertow.train.balance import balance_loss, expert_counts, routers
from undertow.train.batches import Denominators, FlatBatch
from undertow.train.stages import Stage


class Weights(NamedTuple):
    """Weights of the losses beside the next token's; a loss of weight 0 is not computed."""

    mtp: float = 0.0
    balance: float = 0.0
    z: float = 0.0
    indexer: float = 0.0

    @staticmethod
    def of(stage: Stage, settings: TrainConfig, indexer: IndexerConfig) -> Weights:
        """Those of a step. In the indexer's warm-up the other losses have nothing to move."""
        of_indexer = indexer.weight if stage.indexing.distil else 0.0
        if stage.indexer_alone:
            return Weights(indexer=of_indexer)
        return Weights(stage.mtp_weight, settings.balance_weight, settings.z_loss_weight, of_indexer)


class Losses(NamedTuple):
    """`total` with gradient; `parts` without, each unweighted, by name; and `counts [layers, E]` of experts' tokens.

    Parts: `lm` and `mtp` in nats per label; `balance`, 1 for even load, a mean over sequences and layers with learned
    routing; `z`, mean square of the main head's log-normaliser; `indexer`, KL in nats per token, summed over
    CSA layers. Those of the parts of a batch, each divided by the whole batch's denominators, sum to the whole's.
    """

    total: Tensor
    parts: dict[str, Tensor]
    counts: Tensor


def objective(
    model: Transformer,
    batch: FlatBatch,
    weights: Weights,
    denominators: Denominators | None = None,
    indexing: Indexing = Indexing(),  # noqa: B008 - immutable
    recompute: Collection[Again] = (),
) -> Losses:
    """Losses of a batch; logits of all tokens never exist at once.

    `denominators` are those of the whole batch that this one is a part of, by default its own. `indexing` says how CSA
    layers choose and learn to; its `distil` follows the indexer's weight. `recompute` are layers, and pairs of a layer
    and a module, whose activations the backward pass computes again.
    """
    of = denominators or batch.counts
    indexing = indexing._replace(distil=weights.indexer > 0)
    trunk = model.trunk(batch.ids, batch.segments, indexing=indexing, recompute=recompute)
    parts: dict[str, Tensor] = {}
    routes, sequences = list(trunk.routes), [batch.sequence] * len(trunk.routes)
    hidden, head = model.collapse(trunk.streams), model.head.weight
    mean = model.ops.linear_cross_entropy_mean
    total, normaliser = mean(hidden, head, batch.labels, max(of.lm, 1), weights.z)
    parts["lm"] = total
    if weights.z:
        parts["z"] = normaliser.square().sum() / max(of.lm, 1)
        parts["lm"] = total.detach() - weights.z * parts["z"]  # the loss of the operator has it within
    if model.mtp and weights.mtp:
        drafted = model.mtp_hidden(trunk.streams, batch.ids, batch.segments)
        parts["mtp"], _ = mean(drafted.hidden, head, batch.mtp_labels, max(of.mtp, 1), upstream=weights.mtp)
        total = total + weights.mtp * parts["mtp"]
        routes.append(drafted.routing)
        sequences.append(batch.sequence[drafted.rows])
    learned = [i for i, router in enumerate(routers(model)[: len(routes)]) if not router.hashed]
    if weights.balance and learned:
        sums = [balance_loss(routes[i], sequences[i], batch.counts.rows) for i in learned]
        parts["balance"] = torch.stack(sums).sum() / (of.rows * len(learned))
        total = total + weights.balance * len(learned) * parts["balance"]
    if trunk.distillation:
        parts["indexer"] = torch.stack([kl.sum() for kl in trunk.distillation]).sum() / of.tokens
        total = total + weights.indexer * parts["indexer"]
    return Losses(total, {name: part.detach() for name, part in parts.items()}, expert_counts(routes))
