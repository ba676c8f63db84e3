"""Muon (model card 8.2): momentum whose every matrix is orthogonalised before it becomes the update."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from undertow.ops.reference.precision import wide
from undertow.optim.host import BESIDE, Keeper, through
from undertow.optim.kernels import available
from undertow.optim.master import read_master, write_master
from undertow.optim.orthogonal import SMALLEST_NORM, iterate, orthogonalise
from undertow.optim.part import Part, batches, gather, scatter, workspace

MOMENTUM = "momentum_buffer"
IN_PLACE = 4  # workspaces at once, where there is nothing but the iteration's own matrices
UPDATE_RMS = 0.18  # of a matrix' update before the learning rate: about AdamW's, so that both share one learning rate


def muon_step(
    parts: list[tuple[Part, tuple[int, ...]]],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    dtype: torch.dtype | None = None,
    keeper: Keeper = BESIDE,
) -> None:
    """Update every part: `[a, b]`, or `[E, a, b]` for `E` experts, with the heights of its matrices along `a`.

    `M <- momentum M + G`, `O = orthogonalise(momentum M + G)`, `W <- W (1 - lr weight_decay) - lr 0.18 sqrt(max(a, b))
    O` for each matrix `[a, b]` by itself. Matrices of one shape, or its transpose, are iterated on together. `dtype`
    is the iteration's; None takes bfloat16 on a GPU and elsewhere float32, or the weights' own wider type. State on
    the host, by `keeper`, passes through a batch at a time.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Part]] = defaultdict(list)
    served: list[Part] = []
    for stack in [stack for part, heights in parts for stack in _stacks(part, heights)]:
        if _served(stack):
            served.append(stack)
            continue
        rows, width = stack.weight.shape[1:]
        for piece in _cut(stack if rows <= width else stack.cut(lambda t: t.mT)):
            alike[piece.weight.shape[1:], piece.weight.dtype, piece.weight.device].append(piece)
    for pieces in alike.values():
        for batch in through(batches(pieces), keeper):
            whole = gather(batch)
            _update(whole, lr, momentum, weight_decay, dtype)
            scatter(whole, batch)
    if served:
        _update_in_place(served, lr, momentum, weight_decay, dtype, keeper)


def _stacks(part: Part, heights: tuple[int, ...]) -> list[Part]:
    """Stacks `[E, height, b]` of matrices that Muon is to treat each by itself."""
    stacked = part.cut(lambda tensor: tensor if tensor.dim() == 3 else tensor[None])
    stacks, top = [], 0
    for height in heights:
        stacks.append(stacked.cut(lambda t, top=top, height=height: t[:, top : top + height]))
        top += height
    return stacks


def _cut(stack: Part, times: int = 1) -> list[Part]:
    """As many matrices each as `times` the workspace holds, at least one."""
    many = max(1, times * workspace(stack.weight.device) // stack.weight[0].numel())
    return [stack.cut(lambda t, i=i: t[i : i + many]) for i in range(0, len(stack.weight), many)]


def beside(part: Part) -> Tensor | None:
    """What a bfloat16 weight has beside it: its float32 form, or the int16 that it lacks."""
    return part.state.get("master", part.state.get("remainder"))


def _served(stack: Part) -> bool:
    """Whether kernels take a stack where it lies."""
    if not available(stack.weight.device):
        return False
    from undertow.ops.triton.optimizer.momentum import refusal

    return refusal(stack.grad, stack.state[MOMENTUM], stack.weight, beside(stack)) is None


def _update_in_place(
    stacks: list[Part], lr: float, momentum: float, weight_decay: float, dtype: torch.dtype | None, keeper: Keeper
) -> None:
    """The update by kernels that read and write gradients, state and weights where they lie."""
    from undertow.ops.triton.optimizer.momentum import Matrices

    alike: dict[tuple[Any, ...], list[Part]] = defaultdict(list)
    for stack in stacks:
        behind = beside(stack)
        types = stack.grad.dtype, stack.weight.dtype, behind is not None and behind.dtype
        alike[stack.weight.shape[1:], *types, stack.weight.device] += _cut(stack, IN_PLACE)
    for pieces in alike.values():
        for batch in through(batches(pieces, IN_PLACE), keeper):
            behind = [held for part in batch if (held := beside(part)) is not None]
            matrices = Matrices(
                [part.grad for part in batch],
                [part.state[MOMENTUM] for part in batch],
                [part.weight for part in batch],
                behind or None,
            )
            x = matrices.directions(momentum, dtype or torch.bfloat16, SMALLEST_NORM)
            rows, width = x.shape[-2:]
            update = iterate(x) if rows <= width else iterate(x.mT.contiguous()).mT
            matrices.update(update, 1 - lr * weight_decay, lr * UPDATE_RMS * math.sqrt(max(rows, width)))


def _update(part: Part, lr: float, momentum: float, weight_decay: float, dtype: torch.dtype | None) -> None:
    direction = advance(part, momentum)
    update = orthogonalise(direction, dtype or iteration_type(direction))
    apply(part, update, lr * UPDATE_RMS * math.sqrt(update.shape[-1]), 1 - lr * weight_decay)


def iteration_type(like: Tensor) -> torch.dtype:
    """The iteration's type where the settings name none: bfloat16 on a GPU, elsewhere that of `like`."""
    return torch.bfloat16 if like.is_cuda else like.dtype


def advance(part: Part, momentum: float) -> Tensor:
    """Bring the momentum of a part up to date; return the direction that is to be orthogonalised, at least float32."""
    gradient, buffer = wide(part.grad), wide(part.state[MOMENTUM])
    buffer.mul_(momentum).add_(gradient)
    direction = gradient.add(buffer, alpha=momentum)
    if buffer is not part.state[MOMENTUM]:
        part.state[MOMENTUM].copy_(buffer)
    return direction


def apply(part: Part, update: Tensor, rate: float, decay: float) -> None:
    """Bring the weights of a part to `w decay - rate update`."""
    master = read_master(part)
    master.mul_(decay).add_(update, alpha=-rate)
    write_master(part, master)
