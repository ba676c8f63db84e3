"""Linear layers whose result is float32: bfloat16 factors as they are, by the matrix library, summed in float32.

The definition is `undertow.ops.reference.linear.wide_linear`. Products of bfloat16 are exact in float32, so that
the result is the definition's but for the order of a sum, without a copy of either factor and at the speed of bfloat16.
Gradients are rounded to bfloat16 before their products, as those of every other linear layer of such a model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.products import product


def refusal(x: Tensor, weight: Tensor, *, invariant: bool = False) -> str | None:
    """Why the products do not serve a call with these operands, or None if they do."""
    if invariant:
        return "a row's products depend on how many share the call, and batch_invariant is on"
    for name, operand in (("rows", x), ("weights", weight)):
        if operand.dtype != torch.bfloat16:
            return f"{name} are {str(operand.dtype).removeprefix('torch.')}, and the products take bfloat16"
    return None


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
        product(x, weight.t(), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad, grad_x, grad_weight = grad.to(x.dtype), None, None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            product(grad, weight, grad_x)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
            product(grad.t(), x, grad_weight)
        return grad_x, grad_weight


def wide_linear(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """`x [..., K]` times `weight [O, K]` transposed, both bfloat16 -> `[..., O]` float32; `invariant` must be off."""
    flat = x.reshape(-1, x.shape[-1])
    return _WideLinear.apply(flat, weight).view(*x.shape[:-1], len(weight))
