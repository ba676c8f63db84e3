"""Balance between experts (model card 6): a loss inside each sequence, and router biases moved after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from undertow.model.block import Block
from undertow.model.router import Router, Routing
from undertow.model.transformer import Transformer
from undertow.ops.reference.experts import tally


def routers(model: Transformer) -> list[Router]:
    """The router of every MoE layer that `model` holds: the trunk's in order, then the MTP block's."""
    return [block.ffn.gate for block in _blocks(model)]


def _blocks(model: Transformer) -> list[Block]:
    return cast(list[Block], [*model.layers, *model.mtp])


def balance_loss(routing: Routing, sequence: Tensor, sequences: int) -> Tensor:
    """`sum_e f_e P_e` of each sequence, summed over `sequences` of them: a scalar, one per sequence if balanced.

    `f_e = E / (K T) #{t : e chosen}` counts the choices that were made and has no gradient, `P_e` is the mean over the
    sequence's `T` tokens of the expert's share of the scores. `sequence [T]` is the sequence of each token.
    """
    experts, chosen = routing.scores.shape[-1], routing.indices.shape[-1]
    shares = routing.scores / routing.scores.sum(-1, keepdim=True)
    mass = torch.zeros(sequences, experts, dtype=shares.dtype, device=shares.device).index_add(0, sequence, shares)
    tokens = tally(sequence, sequences).clamp(min=1)[:, None].to(shares.dtype)
    place = sequence[:, None] * experts + routing.indices
    load = tally(place.flatten(), sequences * experts).view(sequences, experts)
    return (load.to(shares.dtype) * (experts / chosen) * mass / tokens.square()).sum()


def expert_counts(routes: Sequence[Routing], experts: int, device: torch.device | str = "cpu") -> Tensor:
    """How many tokens chose each of `experts`, `[layers, E]` int64."""
    if not routes:
        return torch.zeros(0, experts, dtype=torch.int64, device=device)
    return torch.stack([tally(routing.indices.flatten(), experts) for routing in routes])


@torch.no_grad()
def update_biases(model: Transformer, counts: Tensor, rate: float) -> None:
    """Move each router's bias by `rate` towards an even load: `bias_e += rate sign(mean - load_e)`.

    `counts [layers, E]` are those of the whole batch and model, the MTP block's last; layers beyond its length took no
    part. A hash layer has no bias.
    """
    for block in _blocks(model):
        router = block.ffn.gate
        if block.layer < len(counts) and not router.hashed:
            load = counts[block.layer].to(torch.float64)
            router.bias.add_(torch.sign(load.mean() - load).to(router.bias.dtype), alpha=rate)
