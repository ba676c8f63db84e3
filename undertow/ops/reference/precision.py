"""The accumulation type of the reference operators, and elementary functions whose bits depend on one row alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def wide(x: Tensor) -> Tensor:
    """`x` in the type the references compute in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def twinned(rows: Tensor) -> Tensor:
    """`rows [N, D]`, a lone one twice: torch may cut the sum of one long row among its threads, of several never."""
    return rows.expand(2, -1) if len(rows) == 1 else rows


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = 1.0 / (1.0 + torch.exp(-x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad * y * (1.0 - y)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function from `exp` alone: torch's own gives a value other last bits at a vector's tail than inside
    it. The gradient comes from the result, finite where `exp` overflows."""
    return _Sigmoid.apply(x)
