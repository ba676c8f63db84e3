"""What Muon does to numbers one by one, before and after its iteration, on many pieces of matrices at once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from undertow.optim.kernels import available
from undertow.optim.muon import MOMENTUM, advance, apply, beside
from undertow.optim.part import Part


def directions(pieces: list[Part], momentum: float, dtype: torch.dtype) -> list[Tensor]:
    """Bring the momenta of pieces `[rows, width]` up to date; the direction of each in `dtype`, not over any norm."""
    found: list[Tensor] = [torch.empty(0)] * len(pieces)
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        if _served([piece.grad, piece.state[MOMENTUM]], {torch.bfloat16, torch.float32}):
            alike[piece.grad.shape, piece.grad.dtype, piece.state[MOMENTUM].dtype].append(i)
        else:
            found[i] = advance(piece, momentum).to(dtype)
    for numbers in alike.values():
        from undertow.ops.triton.optimizer.momentum import Matrices

        grads = [pieces[i].grad[None] for i in numbers]
        moments = [pieces[i].state[MOMENTUM][None] for i in numbers]
        moved = Matrices(grads, moments, [pieces[i].weight[None] for i in numbers], None).moved(momentum, dtype)
        for i, direction in zip(numbers, moved, strict=True):
            found[i] = direction
    return found


def apply_all(pieces: list[Part], updates: list[Tensor], rates: list[float], decay: float) -> None:
    """Bring the weights of each piece to `w decay - rate update`; updates have as many numbers as their pieces."""
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        below = beside(piece)
        kinds = piece.weight.dtype, None if below is None else below.dtype
        wanted = (torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.int16)
        if kinds in wanted and _served([piece.weight, piece.weight if below is None else below]):
            alike[piece.weight.shape, kinds, rates[i]].append(i)
        else:
            apply(piece, updates[i].view(piece.weight.shape), rates[i], decay)
    for (shape, _, rate), numbers in alike.items():
        from undertow.ops.triton.optimizer.momentum import Matrices

        weights = [pieces[i].weight[None] for i in numbers]
        below = [held[None] for i in numbers if (held := beside(pieces[i])) is not None]
        grads = [pieces[i].grad[None] for i in numbers]
        update = torch.stack([updates[i].view(shape) for i in numbers])
        Matrices(grads, grads, weights, below or None).update(update, decay, rate)


def _served(tensors: list[Tensor], types: set[torch.dtype] | None = None) -> bool:
    """Whether kernels take tensors of these types where they lie."""
    if not available(tensors[0].device) or (types and not {tensor.dtype for tensor in tensors} <= types):
        return False
    from undertow.ops.triton.optimizer.momentum import unfit

    return unfit([tensor[None] for tensor in tensors]) is None
