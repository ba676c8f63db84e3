"""The products of routed experts on a ragged batch in Triton, and their gradients.

The definition is `undertow.ops.reference.experts`. No number of rows is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.attention.descriptors import aligned
from undertow.ops.triton.grouped.product import outer, product
from undertow.ops.triton.grouped.ragged import table
from undertow.ops.triton.grouped.tiles import FEW, tiles


def refusal(x: Tensor, weight: Tensor, *, invariant: bool = False) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"rows are {_type(x)} and weights {_type(weight)}; both must be bfloat16"
    if weight.shape[1] % 16 or weight.shape[2] % 16:
        return f"matrices are {weight.shape[1]} x {weight.shape[2]}, and a side is not a multiple of 16"
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return "the weights are not contiguous from an address that is a multiple of 16"
    return None


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        if len(x) == 0:
            return x.new_empty(0, weight.shape[1])
        tile = tiles(x.device, "product")
        return product(x, weight, table(counts, len(x), tile["BM"]), tile, turned=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight, counts = ctx.saved_tensors
        if len(x) == 0:
            return torch.empty_like(x), torch.zeros_like(weight), None
        grad, tile = aligned(grad), tiles(x.device, "turned")
        order = table(counts, len(x), tile["BM"])
        grad_x = product(grad, weight, order, tile, turned=True) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            kernel = "outer, few rows" if len(x) <= FEW * len(weight) else "outer"
            outer(grad, x, order, tiles(x.device, kernel), grad_weight, add=False)
        return grad_x, grad_weight, None


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, *, invariant: bool = False) -> Tensor:
    """Per-expert product: rows of `x [N, K]`, `counts[e]` of them for expert `e`, times `weight [E, O, K]` -> `[N, O]`,
    bfloat16, summed in float32.

    `counts [E]`, of integers on the device of `x`, have the sum N, which is not checked: that would wait for the GPU.
    A row has the same bits whatever shares the call.
    """
    return _GroupedLinear.apply(aligned(x), weight, counts)


def add_weight_gradient(main: Tensor, grad: Tensor, x: Tensor, counts: Tensor) -> None:
    """Adds the weights' gradient of `grouped_linear` to `main [E, O, K]` float32, for `grad [N, O]` of its result:
    nothing is rounded to bfloat16 between steps."""
    if len(x):
        tile = tiles(x.device, "outer added")
        outer(aligned(grad), aligned(x), table(counts, len(x), tile["BM"]), tile, main, add=True)
