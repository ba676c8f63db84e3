"""What passes between stages: residual streams forward, their gradient back, both contiguous.

A stage's own losses need no exchange: their gradient joins where the streams leave the stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor) -> Tensor:
        return streams.view_as(streams)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clone(memory_format=torch.contiguous_format)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return streams.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones((), dtype=ctx.loss_dtype, device=grad.device)


def enter(streams: Tensor) -> Tensor:
    """Received `streams [T, n, d]` as a stage reads them.

    Their gradient is contiguous, as backends ask for, and a copy: that of a stage without layers would be the very
    memory in which the gradient of its result was received.
    """
    return _Enter.apply(streams)  # type: ignore[return-value]


def leave(streams: Tensor, loss: Tensor) -> Tensor:
    """`streams [T, n, d]` as they are sent on, with the scalar `loss` of the stage: the backward pass starts from the
    gradient that comes back, and from 1 for the loss.

    They are a copy: what a schedule that splits the backward pass sends must be nobody's view.
    """
    return _Leave.apply(streams, loss)  # type: ignore[return-value]
