"""The sum of a token's rows in the order of its choices, and its gradient for each of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.experts import Dispatch
from undertow.ops.triton.permute.rows import refused_type, spread, summed


def refusal(rows: Tensor) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    return refused_type(rows)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Dispatch) -> Tensor:
        ctx.order, ctx.dtype = order, rows.dtype
        return summed(rows, order, torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return spread(grad, ctx.order, ctx.dtype), None


def unpermute(rows: Tensor, order: Dispatch) -> Tensor:
    """Sum of each token's `k` rows in the order of its choices: `[T k, d]`, bfloat16 or float32 -> `[T, d]` float32."""
    return _Unpermute.apply(rows, order)
