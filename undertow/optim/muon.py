"""Muon (model card 8.2): momentum whose every matrix is orthogonalised before it becomes the update."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from undertow.ops.reference.precision import wide
from undertow.optim.master import read_master, write_master
from undertow.optim.orthogonal import orthogonalise
from undertow.optim.part import Part, batches, gather, scatter, workspace

MOMENTUM = "momentum_buffer"
UPDATE_RMS = 0.18  # of a matrix' update before the learning rate: about AdamW's, so that both share one learning rate


def muon_step(
    parts: list[tuple[Part, tuple[int, ...]]],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    dtype: torch.dtype | None = None,
) -> None:
    """Update every part: `[a, b]`, or `[E, a, b]` for `E` experts, with the heights of its matrices along `a`.

    `M <- momentum M + G`, `O = orthogonalise(momentum M + G)`, `W <- W (1 - lr weight_decay) - lr 0.18 sqrt(max(a, b))
    O` for each matrix `[a, b]` by itself. Matrices of one shape, or its transpose, are iterated on together. `dtype`
    is the iteration's; None takes bfloat16 on a GPU and elsewhere float32, or the weights' own wider type.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Part]] = defaultdict(list)
    for part, heights in parts:
        for piece in _pieces(part, heights):
            alike[piece.weight.shape[1:], piece.weight.dtype, piece.weight.device].append(piece)
    for pieces in alike.values():
        for batch in batches(pieces):
            whole = gather(batch)
            _update(whole, lr, momentum, weight_decay, dtype)
            scatter(whole, batch)


def _pieces(part: Part, heights: tuple[int, ...]) -> list[Part]:
    """Stacks `[n, a, b]`, `a <= b`, of matrices or their transposes; as many as the workspace holds, at least one."""
    stacked = part.cut(lambda tensor: tensor if tensor.dim() == 3 else tensor[None])
    experts, _, width = stacked.weight.shape
    pieces, top = [], 0
    for height in heights:
        rows = stacked.cut(lambda t, top=top, height=height: t[:, top : top + height])
        lying = rows if height <= width else rows.cut(lambda t: t.mT)
        many = max(1, workspace(part.weight.device) // (height * width))
        pieces += [lying.cut(lambda t, i=i, many=many: t[i : i + many]) for i in range(0, experts, many)]
        top += height
    return pieces


def _update(part: Part, lr: float, momentum: float, weight_decay: float, dtype: torch.dtype | None) -> None:
    gradient, buffer, master = wide(part.grad), wide(part.state[MOMENTUM]), read_master(part)
    buffer.mul_(momentum).add_(gradient)
    direction = gradient.add(buffer, alpha=momentum)
    if buffer is not part.state[MOMENTUM]:
        part.state[MOMENTUM].copy_(buffer)
    update = orthogonalise(direction, dtype or (torch.bfloat16 if direction.is_cuda else direction.dtype))
    master.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * UPDATE_RMS * math.sqrt(update.shape[-1]))
    write_master(part, master)
