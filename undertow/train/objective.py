"""What training minimises (model card 8.1): next token, token after next, balance of experts, the indexer's choice."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.config.model import ModelConfig
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.model.context import Indexing
from undertow.model.modules import Again
from undertow.model.part import Part
from undertow.model.transformer import Transformer, Trunk
from undertow.ops import Ops
from undertow.train.balance import balance_loss, expert_counts
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
    return losses_of(model, batch, weights, of, trunk, model.part)


def losses_of(
    model: Transformer, batch: FlatBatch, weights: Weights, of: Denominators, trunk: Trunk, stage: Part,
    *, split: bool = False,
) -> Losses:  # fmt: skip
    """What some layers add to the losses of a batch, having made `trunk`; and its ends, where `stage` has them.

    Those of all stages of a model sum to the model's; `counts` has a row for each layer of the stage, and for its MTP
    block. Without anything to add, `total` is 0 and has no gradient. `split`: the backward pass comes in two parts, of
    which both run the loss operator's, so that it may not hand over gradients made ahead.
    """
    parts: dict[str, Tensor] = {}
    terms: list[Tensor] = []
    layers, routes = list(stage.layers), list(trunk.routes)
    sequences = [batch.sequence] * len(routes)
    mean = partial(_mean_of_rows, model.ops) if split else model.ops.linear_cross_entropy_mean
    if stage.head:
        hidden = model.collapse(trunk.streams)
        main, normaliser = mean(hidden, model.head.weight, batch.labels, max(of.lm, 1), weights.z)
        terms.append(main)
        parts["lm"] = main
        if weights.z:
            parts["z"] = normaliser.square().sum() / max(of.lm, 1)
            parts["lm"] = main.detach() - weights.z * parts["z"]  # the loss of the operator has it within
    if stage.mtp and weights.mtp:
        drafted = model.mtp_hidden(trunk.streams, batch.ids, batch.segments)
        parts["mtp"], _ = mean(
            drafted.hidden, model.head.weight, batch.mtp_labels, max(of.mtp, 1), upstream=weights.mtp
        )
        terms.append(weights.mtp * parts["mtp"])
        layers.append(model.config.num_hidden_layers)
        routes.append(drafted.routing)
        sequences.append(batch.sequence[drafted.rows])
    learned = [i for i, layer in enumerate(layers) if not model.config.is_hash(layer)]
    if weights.balance and learned:
        every = _learned_layers(model.config, weights)
        sums = [balance_loss(routes[i], sequences[i], batch.counts.rows) for i in learned]
        parts["balance"] = torch.stack(sums).sum() / (of.rows * every)
        terms.append(weights.balance * every * parts["balance"])
    if trunk.distillation:
        parts["indexer"] = torch.stack([kl.sum() for kl in trunk.distillation]).sum() / of.tokens
        terms.append(weights.indexer * parts["indexer"])
    total = reduce(torch.add, terms) if terms else torch.zeros((), device=trunk.streams.device)
    counts = expert_counts(routes, model.config.n_routed_experts, trunk.streams.device)
    return Losses(total, {name: part.detach() for name, part in parts.items()}, counts)


def _mean_of_rows(
    ops: Ops, hidden: Tensor, weight: Tensor, labels: Tensor, count: int, z_loss: float = 0.0, upstream: float = 1.0
) -> tuple[Tensor, Tensor]:
    losses, normaliser = ops.linear_cross_entropy(hidden, weight, labels, z_loss)
    return losses.sum() / count, normaliser


def _learned_layers(config: ModelConfig, weights: Weights) -> int:
    """Layers of a whole model whose routing is learned, the MTP block if its loss takes part."""
    drafting = 1 if config.num_nextn_predict_layers and weights.mtp else 0
    return sum(not config.is_hash(layer) for layer in range(config.num_hidden_layers + drafting))
