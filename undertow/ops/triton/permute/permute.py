"""Rows of tokens in expert order, and their gradients summed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.experts import Dispatch
from undertow.ops.triton.permute.rows import refused_type, spread, summed


def refusal(x: Tensor) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    return refused_type(x)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Dispatch) -> Tensor:
        ctx.order = order
        return spread(x, order, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return summed(grad, ctx.order, grad.dtype), None


def permute(x: Tensor, order: Dispatch) -> Tensor:
    """Rows of `x [T, d]`, bfloat16 or float32, in expert order, each token once per choice -> `[T k, d]`."""
    return _Permute.apply(x, order)
