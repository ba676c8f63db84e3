"""Gradients of several micro-batches, added up: one forward and backward pass after another; and what they told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.model.context import Indexing
from undertow.model.modules import Again
from undertow.model.transformer import Transformer
from undertow.parallel.mesh import Mesh
from undertow.train.batches import Denominators, FlatBatch
from undertow.train.objective import Losses, Weights, objective


class Passes(Protocol):
    """Takes the micro-batches of a step forward and backward: the gradients of all of them add up in the parameters.

    Returns losses without a graph whose sum is that of the micro-batches. Every rank calls it with as many.
    """

    def __call__(
        self,
        parts: Sequence[FlatBatch],
        weights: Weights,
        denominators: Denominators,
        indexing: Indexing,
        recompute: Collection[Again],
    ) -> list[Losses]: ...


def accumulate(
    model: Transformer,
    parts: Sequence[FlatBatch],
    weights: Weights,
    denominators: Denominators,
    indexing: Indexing,
    recompute: Collection[Again],
) -> list[Losses]:
    """`Passes` of a rank that has the whole model: one micro-batch after another, each forward and backward."""
    every = []
    for part in parts:
        losses = objective(model, part, weights, denominators, indexing, recompute)
        losses.total.backward()
        every.append(losses._replace(total=losses.total.detach()))
        del losses  # its graph holds what operators keep beside saved tensors
    return every


class Sums(NamedTuple):
    """`loss`, its `parts` and `counts [layers, E]` of experts' tokens, of all micro-batches of all ranks; and numbers
    that were `read` with them."""

    loss: float
    parts: dict[str, float]
    counts: Tensor
    read: list[float]


def sum_losses(every: Sequence[Losses], read: Sequence[Tensor], mesh: Mesh | None) -> Sums:
    """What micro-batches sum to, over all ranks of `mesh`, the same on each. `read` are scalars to be read besides.

    All at once, in one wait for the device and one exchange between ranks.
    """
    names, device = list(every[0].parts), every[0].counts.device
    counts = torch.stack([losses.counts for losses in every]).sum(0)
    totals = [losses.total for losses in every]
    scalars = [*read, *totals, *(losses.parts[name] for losses in every for name in names)]
    stacked = torch.stack([scalar.to(device) for scalar in scalars])
    if mesh is not None:
        alone = len(read)
        flat = torch.cat([stacked[alone:].double(), counts.flatten().double()])  # counts stay exact below 2^53
        dist.all_reduce(flat, group=mesh.data)
        counts = flat[len(stacked) - alone :].long().view_as(counts)
        stacked = torch.cat([stacked[:alone].double(), flat[: len(stacked) - alone]])
    values = stacked.tolist()
    extra, values = values[: len(read)], values[len(read) :]
    loss, values = sum(values[: len(every)]), values[len(every) :]
    parts: dict[str, float] = {name: sum(values[i :: len(names)]) for i, name in enumerate(names)}
    return Sums(loss, parts, counts, extra)
