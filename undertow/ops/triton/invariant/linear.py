"""Linear layers in Triton whose rows have the same bits whatever shares the call.

The definition is `undertow.ops.reference.linear` with `invariant`. What a row's bits follow from is its own numbers,
the weight, the chip and the version of Triton. Gradients are by the matrix library: they have the same bits again for
the same call, and no more is promised.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.invariant.product import product_of


def refusal(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"rows are {_type(x)} and weights {_type(weight)}; both must be bfloat16"
    return "a sum of no numbers" if x.shape[-1] == 0 else None


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


class _Products(torch.autograd.Function):
    """`x [T, g, K]`, `weight [g, O, K]` -> `[T, g, O]`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product_of(x, weight, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype).transpose(0, 1)
        grad_x = (grad @ weight).transpose(0, 1) if ctx.needs_input_grad[0] else None
        grad_weight = grad.transpose(1, 2) @ x.transpose(0, 1) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    y = _Products.apply(x.reshape(-1, 1, x.shape[-1]), weight[None], dtype)
    return y.view(*x.shape[:-1], len(weight))


def linear(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """`x [..., K]` times `weight [O, K]` transposed, no bias -> `[..., O]`, all bfloat16.

    Sums are in float32. `invariant` changes nothing: there is no other order.
    """
    return _linear(x, weight, x.dtype)


def wide_linear(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """`linear` with a result in float32. Gradients are rounded to the type of the factors before their products."""
    return _linear(x, weight, torch.float32)


def block_linear(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """`x [T, g, K]` times `weight [g, O, K]`, group by group -> `[T, g, O]`, as `linear` for each."""
    return _Products.apply(x, weight, x.dtype)
